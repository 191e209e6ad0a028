"""`fedet ui` in a real browser: a run is started, a point arrives, a comparison opens, and the console stays empty."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from test_report import make_run

pytestmark = pytest.mark.timeout(1200)  # seconds are enough, but not where others use the machine too
PICTURES = os.environ.get("FEDET_PICTURES")
"""A folder for pictures of the pages, if somebody wants to look at them."""


@pytest.fixture
def served(tmp_path):
    """The address of a page that may control runs, on a folder with a comparison."""
    root = tmp_path / "runs"
    for method, score in (("fedet", 0.9), ("fedavg", 0.8), ("central", 0.97)):
        make_run(root / "compare-x" / f"{method}-s0", method, scores=tuple(score - 0.5 / n for n in range(1, 13)))
    names = {"runs": [path.name for path in sorted((root / "compare-x").iterdir())]}
    (root / "compare-x" / "comparison.json").write_text(json.dumps(names), encoding="utf-8")
    command = [sys.executable, "-m", "fedet", "ui", str(root), "--no-open", "--allow-control"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address), address
        yield address, root
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert "Traceback" not in errors
        assert process.returncode == 0, errors


def wait(found, condition, seconds=600):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(found, seconds, poll_frequency=0.2).until(condition)


POINTS = """
const area = document.getElementById("area-accuracy");
return area && area.querySelector("canvas") ? JSON.parse(area.dataset.plot).series[0].values : [];
"""


def points(found):
    """The values of the first curve that the browser has drawn; in one step, because the page changes by itself."""
    return found.execute_script(POINTS)


def picture(found, name, width):
    if PICTURES:
        browser.full_page(found, Path(PICTURES) / f"{name}-{width}.png", width)
        browser.resize(found, width, 900)


def test_a_run_is_started_a_point_arrives_and_a_comparison_opens(served, tmp_path):
    address, root = served
    with browser.opened(tmp_path / "profile") as found:
        found.get(address)
        found.find_element("name", "rounds").send_keys("2")
        found.find_element("css selector", ".start button").click()
        wait(found, lambda page: "/run/digits-fedet-" in page.current_url)
        wait(found, lambda page: len(points(page)) == 2)  # without reloading: the events told the page
        wait(found, lambda page: "all rounds finished" in page.find_element("id", "status").text)
        assert all(0 <= value <= 1 for value in points(found))
        wait(found, lambda page: page.find_elements("css selector", "#experts .expert"))
        assert "No model has been evaluated" not in found.find_element("id", "main").text
        picture(found, "run", 1280)
        found.get(address)
        boxes = found.find_elements("css selector", "input[name=run]")
        assert len(boxes) == 4
        for box in boxes[:2]:
            box.click()
        found.find_element("xpath", "//button[contains(., 'Compare')]").click()
        wait(found, lambda page: "reached the best accuracy" in page.find_element("id", "sentence").text)
        wait(found, lambda page: page.find_elements("css selector", "#area-params canvas"))
        assert browser.console(found) == []
        assert requested_hosts(found) == {address.split("/")[2]}
    assert list(root.glob("digits-fedet-*/result.json"))


ONE_CHANCE = """
const real = window.fetch;
let over = false;
window.fetch = async (...what) => {
  if (over) throw new Error("nothing more happens");
  const answer = await real(...what);
  over = (await answer.clone().text()).includes("area-accuracy");
  return answer;
};
"""
"""The page may read itself again until it has read charts once."""


def test_charts_appear_with_the_first_rounds_even_if_nothing_happens_afterwards(served, tmp_path):
    address, root = served
    run = make_run(root / "quick", scores=(0.5, 0.6))
    told = (run / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    with browser.opened(tmp_path / "profile") as found:
        found.get(address + "run/quick")
        assert "No model has been evaluated yet" in found.find_element("id", "main").text
        found.execute_script(ONE_CHANCE)
        told.rename(run / "metrics.jsonl")
        wait(found, lambda page: points(page) == [0.5, 0.6], seconds=60)
        assert browser.console(found) == []


def requested_hosts(found):
    messages = [json.loads(entry["message"])["message"] for entry in found.get_log("performance")]
    addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return {address.split("/")[2] for address in addresses if address.startswith(("http", "ws"))}


def test_pages_fit_a_telephone_follow_the_theme_and_work_by_keyboard(served, tmp_path):
    from selenium.webdriver.common.keys import Keys

    address, _ = served
    with browser.opened(tmp_path / "profile", width=400, dark=True) as found:
        for name, path in (("list", ""), ("run", "run/compare-x/fedet-s0"), ("comparison", "comparison/compare-x")):
            found.get(address + path)
            wait(found, lambda page, path=path: not path or page.find_elements("css selector", "canvas"))
            assert found.execute_script("return document.documentElement.scrollWidth <= innerWidth && innerWidth === 400"), name
            assert brightness(found) < 60
            picture(found, name, 400)
        found.find_element("id", "theme").click()
        assert found.find_element("id", "theme").text == "Theme: light"
        assert brightness(found) > 200
        found.refresh()
        assert brightness(found) > 200
        found.find_element("tag name", "body").send_keys(Keys.TAB)
        assert found.switch_to.active_element.text == "Skip to the content"
        late = found.find_element("css selector", ".late")
        late.send_keys(Keys.ENTER)
        assert late.get_attribute("aria-pressed") == "true"
        summary = found.find_element("css selector", "#chart-accuracy summary")
        summary.send_keys(Keys.ENTER)
        assert "fedavg" in found.find_element("id", "table-accuracy").text
        assert browser.console(found) == []


def brightness(found):
    colour = found.execute_script("return getComputedStyle(document.body).backgroundColor")
    return max(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.slow
def test_a_run_is_stopped_at_a_checkpoint_and_resumed(served, tmp_path):
    address, root = served
    with browser.opened(tmp_path / "profile") as found:
        found.get(address)
        found.find_element("css selector", ".start button").click()
        wait(found, lambda page: len(points(page)) > 1)
        found.find_element("id", "stop").click()
        wait(found, lambda page: page.find_elements("id", "resume"))
        (checkpoint,) = root.glob("digits-fedet-*/last/checkpoint.safetensors")
        assert not json.loads((checkpoint.parents[1] / "result.json").read_text())["stopped"]
        done = len(points(found))
        found.find_element("id", "resume").click()
        wait(found, lambda page: len(points(page)) > done)
        assert found.find_elements("id", "stop")
        assert browser.console(found) == []
