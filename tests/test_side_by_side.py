"""Runs of a comparison side by side: the same bits as one after the other, and nothing lost when something stops."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fedet import check, config
from fedet.engine import comparison
from fedet.errors import ConfigError, Diverged, Interrupted
from fedet.storage.metrics import read

SMALL = {**check.SMALL, "run": {"rounds": 2, "cohort": 3}}  # without a number of threads
QUICK = {"method.client.batch": 16, "method.client.steps": 4, "run.rounds": 2}


def told(folder):
    """What a run says that may not depend on how it was run."""
    entries = [{key: value for key, value in entry.items() if key != "seconds"} for entry in read(folder / "metrics.jsonl")]
    return entries, (folder / "best" / "model.safetensors").read_bytes()


def compare(out, jobs, **changes):
    return comparison.compare(SMALL, methods=["fedavg", "moon"], seeds=[0, 1], out=out, jobs=jobs, **{**QUICK, **changes})


def children():
    return [p for p in psutil.Process().children(recursive=True) if "fedet.engine.child_run" in " ".join(p.cmdline())]


def test_side_by_side_gives_the_bits_of_one_after_the_other(tmp_path):
    heard = []
    callbacks = comparison.Callbacks(
        started=lambda config, path, done: heard.append(path.name),
        round=lambda entry: heard.append(entry["round"]),
    )
    serial, both = compare(tmp_path / "a", 1), compare(tmp_path / "b", 2, callbacks=callbacks)
    assert [r.run_dir.name for r in both.results] == ["fedavg-s0", "moon-s0", "fedavg-s1", "moon-s1"]
    for one, other in zip(serial.results, both.results, strict=True):
        assert told(one.run_dir) == told(other.run_dir)
    assert sorted(str(h) for h in heard) == sorted([*"11112222", *(r.run_dir.name for r in both.results)])
    assert not children()


def threads(outcome):
    return [config.load(result.run_dir / "config.toml").run.threads for result in outcome.results]


@pytest.fixture
def two_threads():
    """A machine whose default is not one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_a_run_that_is_left_alone_has_the_threads_and_the_bits_of_the_plan(tmp_path):
    whole, outcome = compare(tmp_path / "a", 2), compare(tmp_path / "b", 2)
    shutil.rmtree(outcome.results[1].run_dir)  # as if stopped before the last of four had started
    for jobs in (2, 1):
        again = compare(tmp_path / "b", jobs)
        assert threads(again) == threads(whole) == [1, 1, 1, 1]
        assert [told(r.run_dir) for r in again.results] == [told(r.run_dir) for r in whole.results]
        assert [row["label"] for row in again.rows] == ["fedavg", "moon"]
        shutil.rmtree(again.results[0].run_dir)


@pytest.mark.usefixtures("two_threads")
def test_an_interrupted_comparison_resumes_with_the_same_threads(tmp_path):
    def stop(entry):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="with the same command"):
        compare(tmp_path, 1, callbacks=comparison.Callbacks(round=stop))
    outcome = compare(tmp_path, 2)
    assert threads(outcome) == [2, 2, 2, 2]
    assert len(outcome.rows) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_threads_that_are_configured_are_used(tmp_path):
    assert threads(compare(tmp_path, 2, **{"run.threads": 2})) == [2, 2, 2, 2]


def test_equal_traffic_is_never_exceeded(tmp_path):
    """Six rounds of the small models are no whole number of rounds of the large one."""
    outcome = comparison.compare(
        SMALL, methods=["fedet", "fedavg"], out=tmp_path, jobs=1, equal_traffic=True, **{**QUICK, "run.rounds": 6}
    )
    first, second = (sum(result.traffic[key] for key in ("params_up", "params_down")) for result in outcome.results)
    assert second <= first
    assert outcome.results[1].summary["stopped"] == "budget_params"
    assert [row["params_total"] for row in outcome.rows] == [first, second]


def test_a_run_that_fails_stops_the_comparison_with_its_own_error(tmp_path):
    with pytest.raises(Diverged, match="lower "):
        compare(tmp_path, 2, **{"method.client.lr": 1e30})
    assert not children()


def test_jobs_must_be_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match="must be at least 1"):
        compare(tmp_path, 0)


def start(folder, *more):
    (folder / "small.json").write_text(json.dumps({**check.SMALL, "method": {"name": "moon"}}), encoding="utf-8")
    script = (
        "import json, sys, fedet.cli; from fedet import config; "
        "open('small.toml', 'w').write(config.load(json.load(open('small.json')), {'run.rounds': 4000}).to_toml()); "
        "fedet.cli.main()"
    )
    command = [sys.executable, "-c", script, "compare", "small.toml", "--seeds", "0,1", "--jobs", "2", *more]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def until_both_run(process):
    seen = set()
    for line in process.stderr:
        name, told, _ = line.partition("  round ")
        if told:
            seen.add(name)
        if len(seen) == 2:
            return
    raise AssertionError("the runs ended before they could be disturbed")


def rounds(folder):
    return {path.parent.name: len(read(path)) for path in folder.glob("runs/compare-*/*/metrics.jsonl")}


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
def test_interrupting_leaves_checkpoints_and_no_process(tmp_path):
    process = start(tmp_path)
    until_both_run(process)
    offspring = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "with the same command" in text
    assert "Traceback" not in text
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in offspring)
    before = rounds(tmp_path)
    assert len(before) == 2
    assert min(before.values()) >= 1
    for name in before:
        assert (next(tmp_path.glob(f"runs/compare-*/{name}")) / "last" / "checkpoint.safetensors").is_file()


def test_interrupting_a_process_that_still_imports_torch_prints_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    child = subprocess.run([sys.executable, "-m", "fedet.engine.child_run"], env=env, input="", capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (130, "")


@pytest.mark.slow
def test_a_killed_process_is_named_and_one_whose_parent_is_killed_stops(tmp_path):
    process = start(tmp_path)
    until_both_run(process)
    first, *_ = [p for p in psutil.Process(process.pid).children() if "fedet.engine.child_run" in " ".join(p.cmdline())]
    first.kill()
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "died" in text
    assert "repeat the command to go on" in text

    process = start(tmp_path)
    until_both_run(process)
    orphans = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in orphans):
        assert time.monotonic() < deadline, "a run went on after its parent was killed"
        time.sleep(0.1)
    assert Path(tmp_path / "runs").is_dir()
