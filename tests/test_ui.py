"""`fedet ui` shows what is in the runs folder to those who know its address, and nothing else to anybody."""

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import warnings
import webbrowser
from pathlib import Path

import anyio
import pytest
from test_report import HOSTILE, Balanced, make_run

from fedet.errors import ConfigError, FedetError
from fedet.reporting import results
from fedet.reporting.curves import Curve
from fedet.reporting.run_data import read_run
from fedet.ui import folder, guard, server
from fedet.ui.charts import Chart
from fedet.ui.jobs import Jobs

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Starlette reads names that anyio is about to drop
    from starlette.testclient import TestClient

TOKEN, PORT = "t0ken", 8123


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    make_run(root / "one", failures=[{"client": 2, "kind": "diverged", "why": "sent non-finite values"}])
    make_run(root / "two", "fedavg", scores=(0.1, 0.3, 0.4, 0.5), finished=False)
    return root


def site(root, control=False, host=f"127.0.0.1:{PORT}"):
    app = server.application(server.Site(root, Jobs(root), control), TOKEN, PORT)
    return TestClient(app, base_url=f"http://{host}", raise_server_exceptions=True, follow_redirects=False)


def page(root, path="", status=200, **options):
    answer = site(root, **options).get(f"/{TOKEN}/{path}")
    assert answer.status_code == status, answer.text
    parser = Balanced()
    parser.feed(answer.text)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert all(link.startswith((f"/{TOKEN}/", "#")) for link in parser.links), parser.links
    return answer.text


def test_only_who_knows_the_token_gets_anything(runs):
    client = site(runs)
    for path in ("/", "/run/one", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", "/static/style.css", "//"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert "fedet ui" in answer.text
        assert "one" not in answer.text.replace("one that", "")
    assert client.get(f"/{TOKEN}/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}", "127.0.0.1.evil:8123"]
)
def test_a_name_that_was_made_to_point_to_this_machine_is_refused(runs, host):
    assert site(runs).get(f"/{TOKEN}/", headers={"host": host}).status_code == 421


def test_localhost_is_this_machine_too(runs):
    assert site(runs, host=f"localhost:{PORT}").get(f"/{TOKEN}/").status_code == 200


def test_without_control_nothing_can_be_started_and_no_page_offers_it(runs):
    client = site(runs)
    for action in ("start", "stop/two", "resume/two"):
        answer = client.post(f"/{TOKEN}/{action}", data={"preset": "digits", "method": "fedet"})
        assert answer.status_code == 403
        assert "--allow-control" in answer.text
    assert 'method="post"' not in page(runs) + page(runs, "run/two")
    assert 'method="post"' in page(runs, control=True)
    assert "/resume/two" in page(runs, "run/two", control=True)
    assert "/resume/" not in page(runs, "run/one", control=True)


def test_another_page_cannot_post_even_with_control(runs):
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{PORT + 1}", f"https://127.0.0.1:{PORT}"):
        answer = site(runs, control=True).post(f"/{TOKEN}/start", headers={"origin": origin})
        assert (answer.status_code, answer.text) == (403, "the request comes from another page\n")
    assert site(runs, control=True).put(f"/{TOKEN}/start").status_code == 405
    assert site(runs, control=True).get(f"/{TOKEN}/start").status_code == 405


def test_names_never_lead_out_of_the_folder(runs, tmp_path):
    make_run(tmp_path / "outside")
    (tmp_path / "outside" / "report.html").write_text("secret")
    (runs / "link").symlink_to(tmp_path / "outside")
    (runs / "one" / "linked.html").symlink_to(tmp_path / "outside" / "report.html")
    (runs / ".hidden").mkdir()
    shutil.copy(tmp_path / "outside" / "report.html", runs / ".hidden" / "report.html")
    client = site(runs)
    names = [
        "../outside",
        "%2e%2e/outside",
        "..%2foutside",
        "link",
        "one/../../outside",
        f"/{tmp_path}/outside",
        "",
        "one%00",
        ".hidden",
    ]
    for name in names:
        for place in ("run", "comparison", "files", "events"):
            for path in (name, f"{name}/report.html", f"{name}/config.toml"):
                answer = client.get(f"/{TOKEN}/{place}/{path}") if (place, path) != ("events", "") else None
                assert answer is None or answer.status_code in (403, 404), (place, path)
                assert answer is None or "secret" not in answer.text
    assert client.get(f"/{TOKEN}/files/one/linked.html").status_code == 404
    assert "outside" not in page(runs).replace(str(tmp_path), "")
    for name in ("../outside", "link", "nothing", "two/.."):
        with pytest.raises(FedetError):
            folder.locate(runs, name)


def test_files_of_reports_are_served_but_can_run_nothing_and_others_are_not_served(runs):
    (runs / "one" / "report.html").write_text("<script>alert(1)</script>")
    client = site(runs)
    answer = client.get(f"/{TOKEN}/files/one/report.html")
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("config.toml", "metrics.jsonl", "env.json", "split.npz", "plots", "missing.html"):
        assert client.get(f"/{TOKEN}/files/one/{name}").status_code == 404


def test_pages_load_nothing_from_elsewhere_and_are_not_kept(runs):
    answer = site(runs).get(f"/{TOKEN}/run/one")
    assert answer.headers["content-security-policy"] == guard.PAGE_POLICY
    assert "default-src 'self'" in guard.PAGE_POLICY
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert " style=" not in answer.text
    for name in (
        "style.css",
        "ui.css",
        "theme.js",
        "charts.js",
        "live.js",
        "uplot-1.6.32.min.js",
        "uplot-LICENSE.txt",
        "icon.svg",
    ):
        assert site(runs).get(f"/{TOKEN}/static/{name}").status_code == 200
        assert f"static/{name}" in answer.text or "LICENSE" in name
    for name in ("nothing.js", "..%2fserver.py", "server.py"):
        assert site(runs).get(f"/{TOKEN}/static/{name}").status_code in (403, 404)


def test_text_in_run_folders_is_escaped_everywhere(runs):
    metrics = runs / "one" / "metrics.jsonl"
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    rounds[-1]["failures"] = [{"client": 1, "kind": HOSTILE, "why": HOSTILE}]
    for entry in rounds:
        entry["models"][HOSTILE] = 0.5
    metrics.write_text("".join(json.dumps(entry) + "\n" for entry in rounds))
    config = runs / "one" / "config.toml"
    name = HOSTILE.replace("/", "")  # a data set is called by what stands after the last of them
    config.write_text(config.read_text().replace('name = "digits"', f"name = {json.dumps(name)}"))
    (runs / "two" / "config.toml").write_text(HOSTILE)
    shutil.copytree(runs / "one", runs / "three")
    for text in (page(runs), page(runs, "run/one"), page(runs, "compare?run=one&run=three")):
        assert "alert(" in text
        assert "<script>alert" not in text
        assert "</td><script" not in text
    assert "damaged" in page(runs)


def test_lost_rounds_are_shown_with_their_reasons(runs):
    metrics = runs / "one" / "metrics.jsonl"
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    for entry, why in zip(
        rounds, [None, HOSTILE, "1 usable reply of 5, 3 needed", "1 usable reply of 5, 3 needed"], strict=True
    ):
        entry.update({"lost": why is not None} | ({"why_lost": why} if why else {}))
    metrics.write_text("".join(json.dumps(entry) + "\n" for entry in rounds))
    text = page(runs, "run/one")
    assert "3 rounds were lost: 2, 3, 4. Why: 1 usable reply of 5, 3 needed (2 times);" in text
    assert "<script>alert" not in text


def test_lines_that_cannot_be_read_are_left_out(runs):
    metrics = runs / "two" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "{nonsense\n" + '{"round": "x"}\n' + lines[2] + lines[3][:40])
    text = page(runs, "run/two")
    assert "round 3 of 4" in text
    assert "40.0%" in text


def test_the_list_has_runs_comparisons_and_studies(runs):
    make_run(runs / "compare-tiny-0" / "fedet-s0")
    listing = {"runs": ["fedet-s0", "fedavg-s0", "../../escape"], "seeds": [0], "notes": ["x was left out"]}
    (runs / "compare-tiny-0" / "comparison.json").write_text(json.dumps(listing))
    (runs / "study-table2").mkdir()
    (runs / "study-table2" / "study.html").write_text("a table")
    text = page(runs)
    for expected in (
        "run/one",
        "run/compare-tiny-0/fedet-s0",
        "comparison/compare-tiny-0",
        "study-table2/study.html",
        "Fed-ET on digits</a>",
        "Fed-ET reached the best accuracy, 80.0%",
        "1 of 3 runs",
    ):
        assert expected in text
    assert text.index("comparison/compare-tiny-0") < text.index("run/one")
    shown = page(runs, "comparison/compare-tiny-0")
    assert "2 have not started" in shown
    assert "x was left out" in shown
    assert site(runs).get(f"/{TOKEN}/files/study-table2/study.html").text == "a table"


STUDY = {"title": "A table", "runs": 3, "finished": 1, "failed": {"x": HOSTILE}, "head": ["method"], "body": [[HOSTILE]]}


def test_a_study_is_listed_with_its_state_and_has_a_page_of_its_own(runs):
    study = runs / "study-x"
    study.mkdir()
    (study / "study.html").write_text("drawn")
    (study / "study.json").write_text(json.dumps(STUDY))
    before = folder.fingerprint(runs)
    for finished, owner, expected in ((1, os.getpid(), "running"), (2, None, "stopped"), (3, None, "finished")):
        (study / "study.json").write_text(json.dumps(STUDY | {"finished": finished}))
        (study / ".pid").write_text(f"{owner}\n") if owner else (study / ".pid").unlink(missing_ok=True)
        for text in (page(runs), page(runs, "study/study-x")):
            assert f'class="state {expected}"' in text
            assert f"{finished} of 3 runs finished" in text
            assert "<script>alert" not in text
        assert folder.fingerprint(runs) != before  # so that pages that are open are told
        before = folder.fingerprint(runs)
    assert f'href="/{TOKEN}/study/study-x"' in page(runs)
    assert "files/study-x/study.html" in text
    (study / "study.json").write_text(json.dumps(STUDY | {"runs": "x"}))
    assert "files/study-x/study.html" in page(runs)
    assert "is damaged" in page(runs, "study/study-x", status=404)


def test_however_many_runs_and_pages_there_are_only_what_has_changed_is_read_again(runs, monkeypatch):
    for number in range(3):
        shutil.copytree(runs / "one", runs / f"more-{number}")
    read = []
    monkeypatch.setattr(folder, "read_run", lambda path, **how: read.append(path.name) or read_run(path, **how))
    monkeypatch.setattr(folder, "_rows", {})
    assert len(folder.run_rows(runs)) == len(read) == 5
    (runs / "two" / "config.toml").touch()
    folder.run_rows(runs)
    assert read[5:] == ["two"]
    looks = []
    monkeypatch.setattr(folder, "fingerprint", lambda path: looks.append(path) or ())
    watch = folder.Watch(60)
    assert [watch.version(runs) for _ in range(4)] == [()] * 4
    assert len(looks) == 1


def test_the_terminal_lists_the_states_and_accuracies_of_the_page(runs, fedet):
    (runs / "two" / ".pid").write_text(f"{os.getpid()}\n")
    make_run(runs / "three", scores=(0.2, 0.6), finished=False)
    rows = {row["run"]: row for row in fedet("runs", "--out", runs, "--json").json}
    assert {name: row["state"] for name, row in rows.items()} == {"one": "finished", "two": "running", "three": "stopped"}
    page_rows = {row["name"]: row for row in folder.run_rows(runs)}
    for name, row in rows.items():
        mine = {"state": row["state"], "accuracy": row["accuracy"], "best": row["best accuracy"], "rounds": row["rounds"]}
        assert mine.items() <= page_rows[name].items()
    assert rows["three"]["best accuracy"] == 0.6


def test_an_empty_folder_says_how_to_fill_it(tmp_path):
    assert "fedet run digits" in page(tmp_path)


def charts_of(text):
    """The plots of a page by title, as the browser gets them."""
    found = {}

    class Plots(Balanced):
        def handle_startendtag(self, tag, attrs):
            super().handle_startendtag(tag, attrs)
            if dict(attrs).get("data-plot"):
                found[dict(attrs)["id"]] = json.loads(dict(attrs)["data-plot"])

    Plots().feed(text)
    return found


def test_the_page_of_a_run_has_what_its_files_say(runs):
    text = page(runs, "run/one")
    charts = charts_of(text)
    accuracy = {series["label"]: series["values"] for series in charts["area-accuracy"]["series"]}
    assert accuracy["server"] == [0.2, 0.55, 0.8, 0.7]
    assert list(accuracy) == ["server", "cnn", "mlp", "consensus"]
    assert charts["area-params"]["x"] == [5000, 10000, 15000, 20000]
    gap = {series["label"]: series["values"] for series in charts["area-gap"]["series"]}
    assert gap["consensus − server"] == pytest.approx([-0.02, -0.055, -0.08, -0.07])
    assert charts["area-disagreement"]["series"][0]["values"] == [0.1] * 4
    assert charts["area-time"]["stacked"]
    assert text.count(' expert"') == 2  # of the two classes that the consensus chose
    assert "sent non-finite values" in text
    assert "1.0k" not in text  # the cohort has sizes as they are written elsewhere
    assert '<td class="n">500</td>' in text


def test_an_earlier_round_can_be_looked_at(runs):
    assert ">2</span></h2>" in page(runs, "run/one?round=2")
    for wrong in ("99", "x", "-1", "9" * 400, "²"):
        assert ">4</span></h2>" in page(runs, f"run/one?round={wrong}")


def test_references_and_the_largest_class_are_lines(runs):
    make_run(runs / "c" / "fedet-s0")
    make_run(runs / "c" / "central-s0", "central", scores=(0.7, 0.8, 0.9, 0.9))
    result = json.loads((runs / "c" / "fedet-s0" / "result.json").read_text()) | {"majority": 0.12}
    (runs / "c" / "fedet-s0" / "result.json").write_text(json.dumps(result))
    (runs / "c" / "comparison.json").write_text(json.dumps({"runs": ["fedet-s0", "central-s0"]}))
    levels = charts_of(page(runs, "run/c/fedet-s0"))["area-accuracy"]["levels"]
    assert levels == [{"label": "central", "value": 0.9}, {"label": "majority", "value": 0.12}]


def test_accuracy_by_class_and_client_is_shown_where_there_is_any(runs):
    assert "Accuracy by class" not in page(runs, "run/one")
    metrics = runs / "one" / "metrics.jsonl"
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    rounds[2] |= {"per_class": [0.5, 0.75, None], "confusion": [[3, 1, 0], [0, 4, 0], [0, 0, 0]]}
    rounds[2]["per_client"] = {"mean": 0.6, "worst_tenth": 0.31, "std": 0.1, "accuracies": {"4": 0.31, "5": 0.9}}
    rounds[3] |= {"per_class": ["x"], "per_client": {"mean": "x"}}
    metrics.write_text("".join(json.dumps(entry) + "\n" for entry in rounds))
    text = page(runs, "run/one")
    for expected in ("Accuracy by class", "75.0%", "Confusions", "worst tenth 31.0%", "client 4 31.0%"):
        assert expected in text


def test_ticked_runs_are_compared(runs):
    text = page(runs, "compare?run=one&run=two")
    assert "Fed-ET reached the best accuracy, 80.0%, before FedAvg with 50.0%" in text
    assert "fedet − fedavg" in text
    assert "+30.00" in text
    assert {series["label"] for series in charts_of(text)["area-accuracy"]["series"]} == {"fedet", "fedavg"}
    assert "tick at least two" in page(runs, "compare?run=one", status=404)
    assert "there is no" in page(runs, "compare?run=one&run=../x", status=404)


def test_every_chart_has_its_numbers_as_a_table_and_every_field_a_label(runs):
    text = page(runs, "run/one", control=True)
    assert text.count("data-plot") == text.count("As a table") > 3
    assert 'As a table<span class="visually-hidden">: Time of a round</span>' in text  # else all have the same name
    assert '<td class="n">55.00%</td>' in text
    parser = Labels()
    parser.feed(page(runs, control=True) + text)
    assert parser.unlabelled == []


@pytest.mark.parametrize(("rounds", "said", "rows"), [(60, "", 60), (61, "Every 2nd of 61 rows", 31), (200, "Every 4th", 50)])
def test_a_table_says_which_rows_it_leaves_out(rounds, said, rows):
    numbers = list(range(1, rounds + 1))
    _, body, left_out = Chart("x", "X", [Curve("a", numbers, [0.5] * rounds)]).table()
    assert (len(body), body[-1][0]) == (rows, str(rounds))
    assert left_out.startswith(said)
    assert bool(left_out) == bool(said)


def test_only_the_state_is_told_to_a_screen_reader_at_once(runs):
    for path in ("run/two", "compare?run=one&run=two"):
        assert re.findall(r'role="status">(.*?)</span>$', page(runs, path), flags=re.M) == [""]  # that of the connection
        assert '<span role="status"><span class="state stopped">stopped</span></span>' in page(runs, path)


class Labels(Balanced):
    """Collects the fields that a screen reader could not name."""

    def __init__(self):
        super().__init__()
        self.unlabelled = []

    def handle_startendtag(self, tag, attrs):
        super().handle_startendtag(tag, attrs)
        if tag in ("input", "select", "meter", "progress") and "label" not in self.open and "aria-label" not in dict(attrs):
            self.unlabelled.append((tag, attrs))


def test_mistakes_in_the_form_are_told_and_nothing_starts(runs):
    jobs = Jobs(runs)
    for form, words in (
        ({"preset": "../x", "method": "fedet"}, "no preset"),
        ({"preset": "digits", "method": "evil.py:Method"}, "no method"),
        ({"preset": "digits", "method": "fedet", "rounds": "many"}, "whole number"),
        ({"preset": "digits", "method": "fedet", "rounds": "0"}, "greater than or equal to 1|at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            jobs.start(form)
    assert jobs.jobs == {}
    answer = site(runs, control=True).post(f"/{TOKEN}/start", data={"preset": "<b>", "method": "fedet"})
    assert answer.status_code == 400
    assert "&lt;b&gt;" in answer.text
    assert site(runs, control=True).post(f"/{TOKEN}/start", content=b"x" * 20_000).status_code == 413


def test_a_form_becomes_a_command(runs, monkeypatch):
    started = []
    monkeypatch.setattr(Jobs, "_run", lambda self, what, arguments: started.append((what, arguments)))
    Jobs(runs).start({"preset": "digits", "method": "fedavg", "rounds": "3", "seed": "7"})
    Jobs(runs).start({"preset": "digits", "method": "fedet", "rounds": "", "seed": ""})
    options = ["--rounds", "3", "--seed", "7"]
    assert started == [
        ("fedavg on digits", ["run", "digits", "--method", "fedavg", *options, "--out", str(runs)]),
        ("fedet on digits", ["run", "digits", "--method", "fedet", "--out", str(runs)]),
    ]


def test_programs_that_are_started_leave_nothing_behind(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Jobs(runs).close()
    assert not list(tmp_path.glob("fedet-ui-*"))
    jobs, real = Jobs(runs), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: real([sys.executable, "-c", ""], **how))
    job = jobs.start({"preset": "digits", "method": "fedet"})
    assert job.process.wait() == 0
    assert job.log.exists()
    jobs.close()
    assert not list(tmp_path.glob("fedet-ui-*"))


def test_the_token_is_in_no_command_line_but_in_a_file_that_only_this_user_can_read(fedet, monkeypatch):
    found = []

    def opened(address):
        found.append(address)
        path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(address).path))
        assert os.name == "nt" or [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
        assert f"url=http://127.0.0.1:{PORT}/{TOKEN}/" in path.read_text()
        found.append(path)

    def serve(root, port, control, announce):
        announce(f"http://127.0.0.1:{PORT}/{TOKEN}/")
        return []

    monkeypatch.setattr(webbrowser, "open", opened)
    monkeypatch.setattr(server, "serve", serve)
    assert TOKEN in fedet("ui").out
    address, path = found
    assert address.startswith("file://")
    assert TOKEN not in address
    assert not path.parent.exists()
    fedet("ui", "--no-open")
    assert len(found) == 2


def test_a_process_that_the_page_did_not_start_is_never_signalled(runs):
    (runs / "two" / ".pid").write_text("1\n")
    answer = site(runs, control=True).post(f"/{TOKEN}/stop/two")
    assert answer.status_code == 400
    assert "was not started from this page" in answer.text


@pytest.mark.parametrize("content", ["", "x", "-1", "0.5", "9" * 30, "99999999"])
def test_a_process_number_can_be_anything(runs, content):
    (runs / "two" / ".pid").write_text(content)
    assert "stopped" in page(runs, "run/two")


def test_the_end_of_a_process_is_a_change_even_if_nobody_has_waited_for_it(runs):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (runs / "two" / ".pid").write_text(f"{process.pid}\n")
    during = folder.fingerprint(runs / "two")
    assert results.state(folder.run_of(runs, "two")) == "running"
    process.stdin.close()
    while results.state(folder.run_of(runs, "two")) == "running":
        time.sleep(0.01)
    assert process.returncode is None  # nobody has waited: where there are zombies, it is one
    assert folder.fingerprint(runs / "two") != during
    process.wait()


def test_changes_of_files_are_told(runs):
    async def follow():
        async def gone():
            return False

        events = server.changes(runs / "two", folder.Watch(0.1), gone)
        first = await anext(events)
        with (runs / "two" / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        with anyio.fail_after(20):
            second = await anext(events)
        await events.aclose()
        return first, second

    first, second = anyio.run(follow)
    assert first.startswith("data: ")
    assert second.startswith("data: ")
    assert first != second


def test_without_the_extra_one_sentence_says_what_to_install(fedet, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name, *rest))
    assert fedet("ui").sentence(2).endswith("pip install 'fedet[ui]'")


def test_a_folder_that_is_not_there_is_told(fedet):
    assert "missing is not a directory" in fedet("ui", "missing", "--no-open").sentence(2)


def test_a_port_that_is_taken_is_told(fedet):
    Path("runs").mkdir()
    with server._listening(0) as taken:
        assert "choose another one with --port" in fedet("ui", "--no-open", "--port", taken.getsockname()[1]).sentence(2)
