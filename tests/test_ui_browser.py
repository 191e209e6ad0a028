"""`fedet ui` in a real browser: a run is started, a point arrives, a comparison opens, and the console stays empty."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import browser
import pytest
from test_report import make_result, make_round, make_run

pytestmark = pytest.mark.timeout(1200)  # seconds are enough, but not where others use the machine too
PICTURES = os.environ.get("FEDET_PICTURES") and Path(os.environ["FEDET_PICTURES"]).resolve()
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
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert "Traceback" not in errors
        assert process.returncode == 0 or sys.platform == "win32", errors


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


def listed(found):
    """The names of the runs in the list, as `points` in one step."""
    return found.execute_script("return [...document.querySelectorAll('#runs a')].map((link) => link.textContent.trim());")


def picture(found, name, width):
    if PICTURES:
        PICTURES.mkdir(parents=True, exist_ok=True)
        browser.full_page(found, PICTURES / f"{name}-{width}.png", width)
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


def goes_on(run, number, score):
    """The run does one more round."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(make_round(number, score, True)) + "\n")


def active(found):
    return found.execute_script("return document.activeElement")


HIDDEN = """
Object.defineProperty(document, "hidden", { value: arguments[0], configurable: true });
document.dispatchEvent(new Event("visibilitychange"));
"""


LISTEN = """
window.told = [];
const watched = document.querySelector("#main [role=status]");
new MutationObserver((list) => told.push(...list)).observe(watched, { subtree: true, childList: true, characterData: true });
"""


def test_readers_keep_their_place_while_runs_go_on(served, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains

    address, root = served
    run = make_run(root / "live", scores=tuple(0.05 * n for n in range(1, 13)), finished=False)
    with browser.opened(tmp_path / "profile") as found:
        found.get(address)
        os.utime(run / "metrics.jsonl", (1, 1))
        os.utime(run / "config.toml", (1, 1))  # it is the last of the list, and will be the first
        wait(found, lambda page: listed(page)[-1:] == ["live"])
        link, box = found.find_element("link text", "live"), found.find_elements("css selector", "#runs input")[1]
        box.click()
        ticked = box.get_attribute("value")
        found.execute_script("arguments[0].focus()", link)
        goes_on(run, 13, 0.62)
        wait(found, lambda page: listed(page)[:1] == ["live"])
        assert active(found) == link
        boxes = found.find_elements("css selector", "#runs input:checked")
        assert [box.get_attribute("value") for box in boxes] == [ticked]

        browser.resize(found, 400, 900)
        found.get(address + "run/live")
        wait(found, lambda page: len(points(page)) == 13)
        place = found.find_element("css selector", "#round .scroll")
        found.execute_script("arguments[0].focus(); arguments[0].scrollLeft = 40", place)
        found.execute_script("document.querySelector('details').open = true")
        found.execute_script(LISTEN)
        goes_on(run, 14, 0.64)
        wait(found, lambda page: len(points(page)) == 14)
        assert active(found) == place
        assert found.execute_script("return arguments[0].scrollLeft", place) == 40
        assert found.execute_script("return document.querySelector('details').open && told.length === 0")
        assert "round 14" in found.find_element("id", "status").text

        browser.resize(found, 1280, 900)
        found.refresh()
        wait(found, lambda page: len(points(page)) == 14)
        over = found.find_element("css selector", "#area-accuracy .u-over")
        wait(found, lambda page: over.size["width"] > 600)  # drawn for the new width
        ActionChains(found).move_to_element(over).click_and_hold().move_by_offset(100, 0).release().perform()
        wait(found, lambda page: shown(page)[0] > 1)  # the zoom is drawn in the next frame
        canvas, zoomed = found.find_element("css selector", "#area-accuracy canvas"), shown(found)
        assert 7 < zoomed[0] < zoomed[1] < 10
        told = make_result("fedet", 0, [make_round(1, 0.05, True)]) | {"stopped": None, "majority": 0.125}
        (run / "result.json").write_text(json.dumps(told), encoding="utf-8")
        goes_on(run, 15, 0.66)
        wait(found, lambda page: len(points(page)) == 15 and "majority 12.5%" in page.find_element("id", "charts").text)
        assert shown(found) == zoomed
        goes_on(run, 16, 0.68)
        wait(found, lambda page: len(points(page)) == 16)
        assert shown(found) == zoomed
        late = found.find_element("css selector", ".late")
        late.click()
        assert (late.get_attribute("aria-pressed"), shown(found)) == ("true", [8.5, 16])
        canvas = found.find_element("css selector", "#area-accuracy canvas")
        goes_on(run, 17, 0.7)
        wait(found, lambda page: shown(page) == [9, 17])
        assert found.find_element("css selector", "#area-accuracy canvas") == canvas  # nothing was drawn anew
        ActionChains(found).double_click(found.find_element("css selector", "#area-accuracy .u-over")).perform()
        assert (late.get_attribute("aria-pressed"), shown(found)) == ("false", [1, 17])

        found.execute_script(HIDDEN, True)
        goes_on(run, 18, 0.72)
        time.sleep(1.2)  # twice as long as the server needs to see it
        assert len(points(found)) == 17
        found.execute_script(HIDDEN, False)
        wait(found, lambda page: len(points(page)) == 18)
        assert browser.console(found) == []


def shown(found):
    """The rounds at the ends of the first plot's axis."""
    scale = "const { min, max } = Charts.plots.get(document.getElementById('area-accuracy')).plot.scales.x; return [min, max]"
    return found.execute_script(scale)


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
