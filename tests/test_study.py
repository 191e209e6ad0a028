"""A study does every run of its plan once, whatever happens in between, and its tables come from the records alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import made_up
import pytest
import tomli_w
from typer.testing import CliRunner

from fedet import check, config
from fedet.cli import app
from fedet.engine import session
from fedet.engine.callbacks import Callbacks
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.reporting import statistics
from fedet.study import cells, docs, live, pages, plan, records, runner, setups, tables
from fedet.study.records import Store

ROOT = Path(__file__).parent.parent
SMALL = {
    **check.SMALL,
    "method": {"name": "fedet", "client": {"lr": 0.1, "batch": 16, "steps": 3}},
    "methods": {"fedet": {"server": {"batch": 16, "steps": 3}}},
    "run": {"rounds": 3, "cohort": 3, "report_accuracy": [0.05, 0.9]},
}
PLAN = {
    "title": "Small",
    "bases": ["small.toml"],
    "methods": ["fedavg", "fedet"],
    "seeds": [0, 1],
    "axes": {"data.alpha": [0.5]},
    "against": "fedet",
    "paper": {
        "table": "Table 2",
        "columns": [{"data": "digits", "data.alpha": 0.5}],
        "rows": {"fedet": [[78.66, 0.31]]},
    },
}


def write_plan(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in {**PLAN, **changes}.items() if value is not None}
    (folder / "small.toml").write_text(tomli_w.dumps(SMALL), encoding="utf-8")
    (folder / "plan.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return plan.load(str(folder / "plan.toml"))


def do(folder, jobs=2, notify=lambda what, run: None, **changes):
    loaded = write_plan(folder, **changes)
    runs = plan.expand(loaded)
    done = runner.run(runs, Store(folder / "records"), folder / "runs", jobs=jobs, notify=notify)
    return cells.arrange(loaded, runs, Store(folder / "records").get), done


def contents(folder):
    """What the records say that may not depend on how often the study was stopped."""
    out = {}
    for record in Store(folder / "records").all():
        result = {key: value for key, value in record.result.items() if key != "seconds"}
        out[record.key] = record.config, {k: v for k, v in record.curves.items() if k != "seconds"}, result
    return out


def one_after_the_other(tasks, at_once, on_message, on_end):
    """Do the runs in this process, which saves the time of starting others."""
    for index, task in enumerate(tasks):

        def tell(message, index=index):
            on_message(index, message)

        callbacks = Callbacks(
            started=lambda config, path, done, tell=tell: tell({"started": [str(path), done]}),
            round=lambda entry, tell=tell: tell({"round": entry}),
        )
        loaded = config.Config.model_validate(task["config"])
        try:
            session.run_or_resume(loaded, Path(task["folder"]), task["name"], callbacks, None, 0)
        except Interrupted:
            raise
        except FedetError as error:
            on_end(index, error)
        else:
            on_end(index, None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.side_by_side, "run_all", one_after_the_other)
        patch.setenv("FEDET_PLOTS", "off")
        return folder, *do(folder)


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(runner.side_by_side, "run_all", one_after_the_other)


def test_the_runs_of_a_plan_come_in_its_order(tmp_path):
    def order(**changes):
        runs = plan.expand(write_plan(tmp_path, axes={"data.alpha": [0.1, 0.5]}, **changes))
        return [(run.config.run.seed, run.config.data.alpha, run.config.method["name"]) for run in runs]

    assert order()[:4] == [(0, 0.1, "fedavg"), (0, 0.1, "fedet"), (0, 0.5, "fedavg"), (0, 0.5, "fedet")]
    assert order(order=["data.alpha", "method"])[:3] == [(0, 0.1, "fedavg"), (1, 0.1, "fedavg"), (0, 0.1, "fedet")]
    with pytest.raises(ConfigError, match="not a coordinate"):
        order(order=["alpha"])


def test_settings_apply_to_all_to_a_base_to_a_variant_and_to_a_method(tmp_path):
    loaded = write_plan(
        tmp_path,
        seeds=[0],
        settings={"run.rounds": 5, "methods": {"fedavg": {"client": {"lr": 0.7}}}},
        settings_of={"small.toml": {"run.cohort": 2}},
        variants={"as it is": {}, "longer": {"run.rounds": 9}},
    )
    found = {(r.coordinates["variant"], r.config.method["name"]): r.config for r in plan.expand(loaded)}
    assert {key: c.run.rounds for key, c in found.items()} == {
        ("as it is", "fedavg"): 5, ("as it is", "fedet"): 5, ("longer", "fedavg"): 9, ("longer", "fedet"): 9
    }  # fmt: skip
    assert {c.run.cohort for c in found.values()} == {2}
    assert (found["longer", "fedavg"].method["client"]["lr"], found["longer", "fedet"].method["client"]["lr"]) == (0.7, 0.1)


def test_a_wrong_plan_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"in the plan's cell .*method fedavgg"):
        plan.expand(write_plan(tmp_path, methods=["fedavgg"]))
    with pytest.raises(ConfigError, match="metod"):
        write_plan(tmp_path, metod="x")
    with pytest.raises(ConfigError, match="did you mean 'table2'"):
        plan.load("tabel2")
    write_plan(tmp_path)
    with pytest.raises(ConfigError, match="no settings for --scale paper"):
        plan.load(str(tmp_path / "plan.toml"), "paper")


def test_every_run_has_a_small_record_without_paths(finished):
    folder, _, done = finished
    found = Store(folder / "records").all()
    assert len(found) == len(done.runs) == 4
    for record in found:
        text = (folder / "records" / f"{record.key}.json").read_text(encoding="utf-8")
        assert len(text) < 4000
        assert str(folder) not in text
        run = folder / "runs" / record.key
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        assert record.result["best"] == pytest.approx(result["best_accuracy"], abs=1e-6)
        assert record.result["c_acc"] == result["c_acc"]
        assert (record.result["params_up"], record.result["stopped"]) == (result["params_up"], "rounds")
        assert record.curves["round"] == [1, 2, 3]
        assert config.load(record.config).digest() == config.load(run / "config.toml").digest()
        assert records.of_run(run, config.load(run / "config.toml"), commit=record.versions.get("commit")) == record


def test_the_table_and_its_files_report_the_records_and_the_paper(finished):
    folder, grid, _ = finished
    head, (avg, et) = tables.main(grid).head, tables.main(grid).body
    assert head == ["method", "small, α = 0.5", "paper"]
    mine = [
        Store(folder / "records").get(run.key).result["best"] for run in grid.cells[("fedet",), ("small", 0.5)].runs.values()
    ]
    mean, half = sum(mine) / 2, abs(mine[0] - mine[1]) / 2**0.5
    assert et == ["Fed-ET", f"{100 * mean:.2f} ± {100 * half:.2f}", "78.66 ± 0.31"]
    assert (avg[0], avg[2]) == ("FedAvg", "–")
    page = pages.write(grid, folder / "page")
    for name in ("study.html", "table.csv", "table.tex", "plots/curves-1.svg"):
        assert (page.parent / name).stat().st_size > 100
    before = {path: path.read_bytes() for path in page.parent.rglob("*.*")}
    pages.write(grid, folder / "page")
    assert before == {path: path.read_bytes() for path in page.parent.rglob("*.*")}
    assert r"\multicolumn" in (page.parent / "table.tex").read_text(encoding="utf-8")


def test_finished_runs_are_never_repeated_even_by_another_plan(finished, monkeypatch):
    folder, _, _ = finished
    monkeypatch.setattr(runner.side_by_side, "run_all", lambda *a: pytest.fail("a finished run was started again"))
    assert len(do(folder)[1].finished) == 4
    _, done = do(folder, title="Another", methods=["fedet"], axes={}, settings={"data": {"alpha": 0.5}})
    assert len(done.finished) == 2
    missing = cells.arrange(
        *(lambda p: (p, plan.expand(p)))(write_plan(folder, methods=["moon"])), Store(folder / "records").get
    )
    assert tables.main(missing).body == [["MOON", "not run"]]
    assert tables.not_run(missing) == "Not run yet."
    partly = write_plan(folder, methods=["fedet", "moon"], axes={"data.alpha": [0.5, 9.0]})
    grid = cells.arrange(partly, plan.expand(partly), Store(folder / "records").get)
    assert tables.not_run(grid) == "Not run yet: MOON; small, α = 9."
    assert [row[0] for row in tables.main(grid.measured()).body] == ["Fed-ET"]
    assert len(tables.details(grid).body) == 1


@pytest.mark.slow
def test_a_study_that_is_stopped_in_the_middle_of_a_run_gives_the_same_records(finished, tmp_path):
    seen = []

    def stop(what, run):
        seen.append(what)
        if "finished" in seen and what == "round":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="continue with the same command"):
        do(tmp_path, jobs=1, notify=stop)
    assert len(contents(tmp_path)) == 1
    seen.clear()
    do(tmp_path, jobs=1, notify=lambda what, run: seen.append(what))
    assert seen.count("resumed") == 1
    assert seen.count("started") == 2
    assert contents(tmp_path) == contents(finished[0])


def test_a_run_that_diverges_is_recorded_as_failed_and_the_study_goes_on(tmp_path):
    told = []
    grid, done = do(
        tmp_path,
        seeds=[0],
        settings={"methods": {"fedavg": {"client": {"lr": 1e30}}}},
        notify=lambda what, run: told.append((what, run.config.method["name"])),
        jobs=1,
    )
    assert [what for what, _ in told if what in ("failed", "finished")] == ["failed", "finished"]
    (broken,) = [record for record in done.finished.values() if record.failed]
    assert "lower method.client.lr" in broken.failed
    assert [row[1] for row in tables.main(grid).body] == ["diverged", tables.main(grid).body[1][1]]
    assert "lower method.client.lr" in pages.write(grid, tmp_path / "page").read_text(encoding="utf-8")


@pytest.mark.usefixtures("in_process")
def test_a_run_that_another_process_holds_is_tried_again_later(tmp_path):
    loaded = write_plan(tmp_path, seeds=[0], methods=["fedavg"])
    (only,) = plan.expand(loaded)
    (tmp_path / "runs" / only.key).mkdir(parents=True)
    with session.RunFolder(tmp_path / "runs" / only.key).locked():
        _, done = do(tmp_path, seeds=[0], methods=["fedavg"])
    assert "in use by another process" in done.errors[only.key]
    assert not contents(tmp_path)
    _, done = do(tmp_path, seeds=[0], methods=["fedavg"])
    assert list(contents(tmp_path)) == [only.key]


@pytest.mark.usefixtures("in_process")
def test_a_longer_run_continues_a_shorter_one_and_gives_its_record(finished, tmp_path):
    shorter, resumed = {"run.rounds": 2, "run.eval_every": 3}, []
    do(tmp_path, seeds=[0], methods=["fedet"], settings=shorter)
    do(
        tmp_path,
        seeds=[0],
        methods=["fedet"],
        settings={**shorter, "run.rounds": 3},
        notify=lambda what, run: resumed.append(what),
    )
    assert resumed[0] == "resumed"
    long = next(value for key, value in contents(tmp_path).items() if key.endswith("-r3"))
    whole = next(value for key, value in contents(finished[0]).items() if "fedet" in key and "-s0-" in key)
    assert long[1]["round"] == [3]  # round 2 was evaluated only because the shorter run ended
    assert long[1]["accuracy"] == whole[1]["accuracy"][-1:]


def test_records_are_collected_from_run_folders(finished, tmp_path):
    folder, _, _ = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    unfinished = next((tmp_path / "runs").glob("*-s1-*"))
    (unfinished / "result.json").unlink()
    written, left_out = records.collect([tmp_path / "runs"], Store(tmp_path / "records"), "abc")
    assert len(written) == 3
    assert "is not finished" in left_out[0]
    assert all(record.versions["commit"] == "abc" for record in Store(tmp_path / "records").all())
    assert contents(tmp_path).items() < contents(folder).items()


def test_a_record_is_found_after_the_configuration_got_another_digest(finished, tmp_path):
    folder, _, done = finished
    first = done.runs[0].key
    record = Store(folder / "records").get(first)
    old = first.replace(first.split("-")[-3], "00000000")
    Store(tmp_path).put(records.Record(**{**vars(record), "key": old}))
    assert Store(tmp_path).get(first).result == record.result
    assert Store(tmp_path).get("digits-fedavg-ffffffff-s0-r3") is None


def test_records_of_a_method_that_gives_other_results_now_do_not_count(tmp_path, monkeypatch):
    (run, *_) = plan.expand(write_plan(tmp_path, methods=["moon"]))
    old = plan.PlannedRun(run.key.replace(run.config.digest(), "00000000"), run.config, run.coordinates)
    Store(tmp_path).put(made_up.record(old, 0.5))
    assert Store(tmp_path).get(records.key(run.config)).key == old.key
    monkeypatch.setattr(config.method_class("moon"), "revision", 1)
    assert records.key(run.config) == run.key.replace("-s0", "-v1-s0")
    defended = run.config.model_copy(update={"run": config.RunConfig(robust="on")})
    before = records.key(defended)
    monkeypatch.setattr(type(defended.run.robust), "revision", 7)
    assert records.key(defended) == before.replace("-v1-g1-s0", "-v1-g7-s0") != before
    assert records._revision(records.key(defended)) != records._revision(before)
    assert Store(tmp_path).get(records.key(run.config)) is None
    Store(tmp_path).put(made_up.record(plan.PlannedRun(records.key(run.config), run.config, run.coordinates), 0.6))
    assert Store(tmp_path).get(records.key(run.config)).result["best"] == 0.6


@pytest.mark.parametrize(
    ("probability", "df", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.95, 5, 2.01505), (0.995, 10, 3.16927)],
)
def test_students_t_has_the_quantiles_of_the_tables(probability, df, value):
    assert statistics.t_quantile(probability, df) == pytest.approx(value, rel=1e-5)


def test_paired_differences_use_the_seeds_that_both_have():
    found = statistics.paired({0: 0.5, 1: 0.6, 2: 0.7, 3: 0.9}, {0: 0.4, 1: 0.4, 2: 0.4, 5: 0.1})
    assert (found.mean, found.n) == (pytest.approx(0.2), 3)
    assert found.half_width == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5)
    assert not found.certain
    assert found.wins == 3
    assert statistics.paired({0: 0.5}, {0: 0.4}).half_width is None
    assert statistics.paired({0: 0.5}, {1: 0.4}) is None


def test_late_accuracy_and_convergence():
    rising = [i / 20 for i in range(20)]
    assert statistics.late(rising) == pytest.approx((16 + 17 + 18 + 19) / 80)
    assert statistics.late([0.3, 0.5]) == 0.5
    assert statistics.late([]) is None
    assert statistics.converged(rising) is False
    assert statistics.converged(rising[:12] + [0.6, 0.62] * 4) is True
    assert statistics.converged([0.5] * 20) is True
    assert statistics.converged([0.1, 0.2]) is None


def start(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedet", "study", "plan.toml", "--jobs", "1", "--records", "records"]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_study_that_is_killed_gives_the_same_records_when_it_is_started_again(finished, tmp_path):
    write_plan(tmp_path)
    for number in (signal.SIGINT, signal.SIGKILL):
        process = start(tmp_path)
        for line in process.stderr:
            if line.startswith(("started", "resumed")):
                break
        time.sleep(0.3)
        process.send_signal(number)
        process.communicate(timeout=60)
        time.sleep(2)  # what is left of a killed one stops at its next message
    done = start(tmp_path)
    text, _ = done.communicate(timeout=200)
    assert done.returncode == 0
    assert "Fed-ET" in text
    assert contents(tmp_path) == contents(finished[0])


def test_the_page_of_a_study_is_there_from_the_start_and_follows_its_runs(tmp_path, monkeypatch):
    written, enough = [], threading.Event()

    def write():
        written.append(session.RunFolder(tmp_path / "page").owner())
        if len(written) == 2:
            enough.set()
            raise OSError("no space is left")  # the last version, which the caller writes, meets it too

    monkeypatch.setattr(live, "EVERY", 0.05)
    with live.page(tmp_path / "page", write) as changed:
        while not written:
            time.sleep(0.01)
        for _ in range(20):
            changed()
        assert enough.wait(60)
    assert set(written) == {os.getpid()}
    assert 2 <= len(written) <= 4
    assert session.RunFolder(tmp_path / "page").owner() is None
    (tmp_path / "file").touch()
    with pytest.raises(FedetError, match="can't create the directory"), live.page(tmp_path / "file" / "page", write):
        pass


def test_a_study_on_the_command_line_has_a_page_before_its_first_run_ends(tmp_path, monkeypatch):
    seen = []

    def run_all(tasks, at_once, message, end):
        page = tmp_path / "runs" / "study-plan"
        while not (page / "study.json").exists():
            time.sleep(0.01)
        seen.append(json.loads((page / "study.json").read_text(encoding="utf-8")))
        raise KeyboardInterrupt

    write_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner.side_by_side, "run_all", run_all)
    command = ["study", "run", "plan.toml", "--quiet", "--out", "runs", "--records", "records"]
    assert isinstance(CliRunner().invoke(app, command).exception, Interrupted | SystemExit)
    assert [(told["title"], told["runs"], told["finished"]) for told in seen] == [("Small", 4, 0)]
    assert not (tmp_path / "runs" / "study-plan" / ".pid").exists()


DOCUMENT = """# Results

<!-- results: plan.toml -->
old
<!-- end -->

Fed-ET reached <!-- results: plan.toml cell method=fedet data.alpha=0.5 -->12<!-- end --> %, in
<!-- results: plan.toml runs --><!-- end --> runs.

<!-- results: plan.toml curves -->
<!-- end -->

<!-- results: plan.toml traffic only=1 --><!-- end -->
<!-- results: plan.toml traffic only=7 --><!-- end -->

<!-- results: plan.toml differences --><!-- end -->
<!-- results: plan.toml source --><!-- end -->

```
<!-- results: plan.toml -->
an example
<!-- end -->
```
"""


def test_documents_are_generated_from_the_records_and_checked_against_them(finished, tmp_path):
    folder, grid, _ = finished
    write_plan(tmp_path)
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    page = tmp_path / "docs" / "guide" / "results.md"
    page.write_text(DOCUMENT, encoding="utf-8")
    documents = docs.Documents(tmp_path, folder / "records")
    rounds, traffic = (tmp_path / "docs" / "img" / f"plan-{view}-1.svg" for view in ("curves", "traffic"))
    assert set(documents.write()) == {page, rounds, traffic}
    assert "parameters sent, up and down" in traffic.read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "an example" in text
    assert tables.to_markdown(tables.main(grid)) in text
    (cell,) = re.findall(r"Fed-ET reached <!--.*?-->(.*?)<!--", text)
    assert cell == tables.text(grid.cells[("fedet",), ("small", 0.5)], grid.plan)
    assert "-->4<!--" in text
    assert "](../img/plan-curves-1.svg)" in text
    assert "](../img/plan-traffic-1.svg)" in text
    assert "only=7 -->\n\nNot run yet.\n\n<!-- end" in text
    assert not documents.differing()
    page.write_text(text.replace(cell, "99.99"), encoding="utf-8")
    assert list(documents.differing()) == [page]
    page.write_text(text.replace("plan.toml cell", "plan.toml sell"), encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean 'cell'"):
        documents.differing()


@pytest.mark.parametrize(
    "text", ["{begin} -->\nprose", "{begin} -->\nprose\n{begin} -->\n<!-- end -->", "{begin} --\n<!-- end -->"]
)
def test_a_block_without_its_end_is_refused_and_swallows_nothing(finished, tmp_path, text):
    write_plan(tmp_path)
    page = tmp_path / "README.md"
    page.write_text(text.format(begin="<!-- results: plan.toml"), encoding="utf-8")
    before = page.read_bytes()
    with pytest.raises(ConfigError, match=r"has no `<!-- end -->` before the next one"):
        docs.Documents(tmp_path, finished[0] / "records").write()
    assert page.read_bytes() == before


@pytest.mark.parametrize(
    "to",
    [
        {"archs": ["cnn"]},
        {"label_counts": [[1], [1, 2], [3], [4], [5], [6]]},
        {"label_counts": "x"},
        {"arch_params": {"a": -1}},
    ],
)
def test_a_damaged_record_of_a_set_up_is_one_sentence(tmp_path, to):
    loaded = write_plan(tmp_path, kind="data", methods=["fedavg"], seeds=[0], against=None)
    (only,) = plan.expand(loaded)
    known = {"arch_params": {"cnn": 9}, "server": "cnn", "label_counts": [[1, 2]] * 6, "archs": ["cnn"] * 6}
    path = setups.path_of(only, tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps(known), encoding="utf-8")
    assert len(setups.distributions(loaded, [only], tmp_path)) == 1
    path.write_text(json.dumps(known | to), encoding="utf-8")
    with pytest.raises(FedetError, match="is damaged: "):
        setups.distributions(loaded, [only], tmp_path)


def test_the_documents_of_this_repository_agree_with_its_records():
    assert not docs.Documents(ROOT, ROOT / "results" / "records").differing()


def cli(*words):
    outcome = CliRunner().invoke(app, list(words))
    return outcome.exit_code, outcome.output


def test_the_commands_of_a_study(finished, tmp_path, monkeypatch):
    folder, _, done = finished
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path)
    plan_file, kept = "plan.toml", ["--records", str(folder / "records")]
    code, text = cli("study", "list")
    assert (code, "table2" in text, "ablation" in text) == (0, True, True)
    code, text = cli("study", plan_file, "--dry-run", *kept)
    assert code == 0
    assert text.count("finished") == 4
    assert all(run.key in text for run in done.runs)
    code, text = cli("study", plan_file, "--rounds", "4", "--dry-run", *kept)
    assert text.count("to do") == 4
    code, text = cli("study", plan_file, "--json", *kept)
    assert json.loads(text.splitlines()[-1])["table"]["body"][1][0] == "Fed-ET"
    code, text = cli("study", "table", plan_file, *kept)
    assert (code, "78.66 ± 0.31" in text) == (0, True)
    code, text = cli("study", "collect", str(folder / "runs"), "--records", "taken")
    assert (code, len(list((tmp_path / "taken").glob("*.json")))) == (0, 4)
    assert cli("study", "docs", "--check")[0] == 0
    assert cli("study", "nothing")[0] == 2
    assert cli("study", plan_file, "--scale", "moon")[0] == 2


@pytest.mark.parametrize("scale", ["desk", "paper"])
@pytest.mark.parametrize("name", plan.plans())
def test_the_plans_of_the_package_can_be_run(name, scale):
    loaded = plan.load(name, scale)
    runs = plan.expand(loaded)
    grid = cells.arrange(loaded, runs, lambda key: None)
    assert {cell.missing for cell in grid.cells.values()} == {len(grid.seeds) for grid in loaded.grids}
    if loaded.kind == "runs":
        assert {cell for row in tables.main(grid).body for cell in row} >= {"not run"}
        assert loaded.against is None or loaded.against in {str(place[0]) for place in (*grid.rows, *grid.columns)}


def scored(tmp_path, score, **changes):
    """The grid of a plan whose runs have these scores by their coordinates; None leaves a run out."""
    loaded = write_plan(tmp_path, **changes)
    runs = plan.expand(loaded)
    known = {run.key: made_up.record(run, score(run.coordinates)) for run in runs if score(run.coordinates) is not None}
    return cells.arrange(loaded, runs, known.get)


def test_references_are_a_block_of_their_own_at_the_end_and_never_the_best(tmp_path):
    scores = {"fedavg": 0.6, "fedet": 0.7, "central": 0.9, "local": 0.3}
    first, second = {"methods": ["fedet"], "references": ["central"]}, {"methods": ["fedavg", "local"]}
    grid = scored(tmp_path, lambda at: scores[at["method"]], methods=[], grids=[first, second], paper=None)
    found = tables.main(grid)
    assert [row[0] for row in found.body] == ["Fed-ET", "FedAvg", "central", "local"]
    assert (found.references, found.bold) == (2, {(0, 1)})
    assert "| *what was possible* |  |\n| central |" in tables.to_markdown(found)
    assert "\\midrule\n\\multicolumn{2}{l}{\\emph{what was possible}} \\\\\ncentral &" in tables.to_tex(grid)
    page = pages.write(grid, tmp_path / "out").read_text(encoding="utf-8")
    assert page.index("FedAvg</td>") < page.index('class="heading">What was possible') < page.index("central</td>")
    assert tables.against(grid) == "Fed-ET"
    assert tables.against(scored(tmp_path, lambda at: 0.5, references=["central"], against=None)) == "Fed-ET"


def test_testbeds_are_not_compared_with_each_other(tmp_path):
    (tmp_path / "other.toml").write_text(
        tomli_w.dumps({**SMALL, "name": "other", "run": {**SMALL["run"], "rounds": 2}}), encoding="utf-8"
    )
    best = {("small", 0.0): 0.5, ("small", 0.05): 0.7, ("other", 0.0): 0.4, ("other", 0.05): 0.3}
    noise = {0: 0.0, 1: 0.001}
    grid = scored(
        tmp_path,
        lambda at: best[at["base"], at["method.lam"]] + noise[at["seed"]] * (at["method.lam"] > 0),
        bases=["small.toml", "other.toml"], methods=["fedet"], rows=["base"], columns=["method.lam"],
        axes={"method.lam": [0.0, 0.05]}, against="0.05", paper=None,
    )  # fmt: skip
    assert tables.main(grid).bold == {(0, 2), (1, 1)}
    found = tables.differences(grid)
    assert found.head[:2] == ["against", "base"]
    # The mean of 20.0 and 20.1 with t(0.975, 1) = 12.7062: 0.0707107 * 12.7062 / sqrt(2) = 0.635.
    assert found.body[0] == ["λ = 0", "small", "+20.05", "+19.41 to +20.69", "2", "better"]
    assert found.body[1][1:3] + found.body[1][-1:] == ["other", "-9.95", "worse"]
    assert tables.against(grid) == "λ = 0.05"


def test_what_diverged_with_one_seed_is_neither_the_best_nor_judged_by_the_others(tmp_path):
    loaded = write_plan(tmp_path, methods=["fedavg", "fedprox", "fedet"], seeds=[0, 1, 2], against="fedet", paper=None)
    runs, best, records = plan.expand(loaded), {"fedavg": 0.6, "fedprox": 0.9, "fedet": 0.7}, {}
    for run in runs:
        method, seed = run.coordinates["method"], run.coordinates["seed"]
        failed = {"failed": "diverged"} if (method, seed) == ("fedprox", 2) else {}
        records[run.key] = made_up.record(run, best[method] + 0.001 * seed * (method != "fedet"), **failed)
    grid = cells.arrange(loaded, runs, records.get)
    assert [tables.main(grid).body[row][0] for row, _ in tables.main(grid).bold] == ["Fed-ET"]
    assert {row[0]: row[-1] for row in tables.differences(grid).body} == {"FedAvg": "better", "FedProx": "undecided"}


def test_a_testbed_without_a_coordinate_has_none_in_its_heading():
    loaded = plan.load("table2", "paper")
    grid = cells.arrange(loaded, plan.expand(loaded), lambda key: None)
    headings = [tables.column_label(loaded, column) for column in grid.columns]
    assert headings[-1] == "sent140-paper"
    assert "α = 0.1, cifar10-paper" in headings


def edited(parts, *path, to):
    """The record with one value changed."""
    table = parts
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("result", "best"), 0.99, "result.best does not follow from its curves"),
        (("result", "late"), 0.99, "result.late does not follow"),
        (("result", "final"), None, "result.final does not follow"),
        (("result", "params_up"), 1, "params_up and params_down does not follow"),
        (("result", "best"), 7.5, "result.best: input should be less than or equal to 1"),
        (("result", "seconds"), {}, "result.seconds.total: field required"),
        (("result", "seconds", "total"), float("nan"), "result.seconds.total: input should be a finite number"),
        (("curves", "accuracy"), [0.5], "curves: its columns differ in length"),
        (("curves", "params_total"), [9, 8, 7], "parameters sent do not rise"),
        (("curves", "loss", 0), "low", "curves.loss.0"),
        (("config", "method"), {}, "config.method.name: field required"),
        (("config",), [], "config"),
        (("key",), "another-run", "it is the record of the run another-run"),
        (("format",), 2, "another version of fedet"),
    ],
)
def test_a_record_that_was_changed_is_refused_in_one_sentence(finished, tmp_path, path, to, words):
    source = min((finished[0] / "records").glob("*.json"))
    parts = json.loads(source.read_text(encoding="utf-8"))
    edited(parts, *path, to=to)
    (tmp_path / source.name).write_text(json.dumps(parts), encoding="utf-8")
    with pytest.raises(FedetError, match=words) as raised:
        records.read(tmp_path / source.name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": []}, "rows"),
        ({"rows": ["methods"]}, "rows: 'methods' is not a coordinate of this plan: seed, grid, base"),
        ({"columns": ["data.alfa"]}, "columns: 'data.alfa' is not a coordinate"),
        ({"against": "fedett"}, "against: 'fedett' is not a method of this plan: fedavg, fedet"),
    ],
)
def test_a_table_of_what_the_plan_does_not_have_is_refused_before_anything_runs(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        plan.expand(write_plan(tmp_path, **changes))


def test_a_cell_says_how_many_of_its_runs_there_are(tmp_path):
    grid = scored(tmp_path, lambda at: 0.5 if at["seed"] == 0 else None, metric="c_acc", targets={"small": 0.9}, paper=None)
    assert tables.main(grid).body[0][1] == "not reached (1 of 2 runs)"
    failed = {run.key: made_up.record(run, 0.5, failed="diverged") for run in next(iter(grid.cells.values())).runs.values()}
    grid = cells.arrange(grid.plan, plan.expand(grid.plan), dict(list(failed.items())[:1]).get)
    assert tables.main(grid).body[0][1] == "diverged (1 of 2 runs)"


def test_names_of_the_users_own_are_escaped(tmp_path):
    name = "50 % <b> & a_b|c~{d}\\ #1 $x^2"
    grid = scored(tmp_path, lambda at: 0.5, methods=["fedet"], rows=["variant"], against=None, variants={name: {}, "plain": {}})
    tex = tables.to_tex(grid)
    escaped = r"50 \% $<$b$>$ \& a\_b$|$c\textasciitilde{}\{d\}\textbackslash{} \#1 \$x\textasciicircum{}2 & "
    assert escaped in tex
    (line,) = [line for line in tables.to_markdown(tables.main(grid)).splitlines() if "50 %" in line]
    assert line.startswith(r"| 50 % &lt;b> & a_b\|c~{d}\ #1 $x^2 |")
    page = pages.write(grid, tmp_path / "out").read_text(encoding="utf-8")
    assert "<b>" not in page
    assert "50 % &lt;b&gt; &amp; a_b|c" in page


def test_latex_says_which_accuracy_a_cost_is_for(tmp_path):
    grid = scored(tmp_path, lambda at: 0.95, metric="c_acc", targets={"small": 0.9}, paper=None, columns=["base"])
    assert r" & $C_{\text{acc}}(90\%)$ \\" in tables.to_tex(grid)


def test_the_guide_lists_every_plan():
    listed = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "guide" / "study.md").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(name for names in listed for name in re.findall("`([^`]+)`", names)) == plan.plans()


def test_the_papers_values_stand_beside_the_same_cells():
    loaded = plan.load("fedgkt", "paper")
    grid = cells.arrange(loaded, plan.expand(loaded), lambda key: None)
    assert [row[::2] for row in tables.main(grid).body] == [
        ["FedGKT", "47.40 ± 2.20", "73.20 ± 1.20"],
        ["Fed-ET", "78.66 ± 0.31", "81.13 ± 0.28"],
    ]
    four = plan.load("table4", "paper")
    found = tables.main(cells.arrange(four, plan.expand(four), lambda key: None))
    assert found.head == ["base", "λ = 0", "paper", "λ = 0.05", "paper", "λ = 0.5", "paper"]
    assert found.body[2][2::2] == ["72.11 ± 0.28", "74.37 ± 0.42", "75.78 ± 0.39"]
