"""Callbacks follow a run, stop it cleanly, and are given what they were promised; progress is shown where somebody looks."""

import io
import time

import pytest
from rich.console import Console
from terminal import SMALL

import fedet
from fedet.engine.callbacks import Callbacks, combined, warn
from fedet.errors import FedetError
from fedet.tracking import progress


def stopping(at, seen):
    def evaluated(entry):
        seen.append(entry["round"])
        if entry["round"] == at:
            raise fedet.StopRun

    return Callbacks(evaluation=evaluated)


def plain(result, rounds):
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.metrics[:rounds]]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_callback_stops_a_run_cleanly_and_it_resumes_to_the_same_bits(tmp_path, workers):
    whole = fedet.run(SMALL, out=tmp_path, rounds=4, progress=False)
    seen = []
    part = fedet.run(SMALL, out=tmp_path, rounds=4, run__workers=workers, progress=False, callbacks=stopping(2, seen))
    assert seen == [1, 2]
    assert (part.summary["stopped"], part.summary["rounds"], len(part.metrics)) == ("callback", 2, 2)
    assert part.report.is_file()
    assert part.model is not None
    assert plain(part, 2) == plain(whole, 2)
    rest = fedet.resume(part.run_dir, workers=0, progress=False)
    assert rest.summary["stopped"] == "rounds"
    assert plain(rest, 4) == plain(whole, 4)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_in_a_comparison_it_stops_all_runs_with_checkpoints(tmp_path, jobs):
    options = {"methods": ["fedet", "fedavg"], "out": tmp_path, "rounds": 3, "jobs": jobs, "progress": False}
    with pytest.raises(fedet.Interrupted, match="continue"):
        fedet.compare(SMALL, callbacks=Callbacks(round=lambda entry: (_ for _ in ()).throw(fedet.StopRun())), **options)
    assert [result.summary["rounds"] for result in fedet.compare(SMALL, **options).results] == [3, 3]


def test_callbacks_are_told_of_evaluations_and_of_the_end(tmp_path):
    told = {"round": [], "evaluation": [], "ended": []}
    callbacks = Callbacks(
        round=lambda entry: told["round"].append(entry["round"]),
        evaluation=lambda entry: told["evaluation"].append(entry["round"]),
        ended=told["ended"].append,
    )
    result = fedet.run(SMALL, out=tmp_path, rounds=3, run__eval_every=2, callbacks=callbacks, progress=False)
    assert told == {"round": [1, 2, 3], "evaluation": [2, 3], "ended": [result]}
    with pytest.raises(FedetError, match="server"):
        fedet.run(SMALL, out=tmp_path, rounds=1, method__server__lr=1e30, callbacks=callbacks, progress=False)
    assert told["ended"] == [result, None]


def test_several_callbacks_are_called_in_turn_and_warned_once():
    order = []
    parts = [Callbacks(round=lambda entry, n=n: order.append(n)) for n in (1, 2)]
    both = combined([*parts, Callbacks(warning=order.append)])
    both.told({"round": 1})
    both.warning("w")
    both.for_another_run().round({"round": 2})
    assert order == [1, 2, "w", 1, 2]
    assert combined([]).warning is warn


def test_progress_is_for_terminals_and_notebooks(monkeypatch):
    assert not progress.wanted(None)
    assert progress.wanted(True)
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    assert progress.wanted(None)
    assert not progress.wanted(False)


def entry(number, accuracy):
    return {"round": number, "accuracy": accuracy, "models": {"server": accuracy, "consensus": 0.9}}


def board_of(accuracies, rounds=10):
    board = progress.Board()
    line = progress.Line(board, warn)
    line.label, line.total, board.lines = "fedet s0", rounds, [line]
    line._start = time.monotonic()  # as if the run had just begun
    for number, accuracy in enumerate(accuracies, 1):
        line.advance(entry(number, accuracy))
    return board, line


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_fits_the_terminal_and_says_the_most_important_first(width):
    board, line = board_of([0.1, 0.2, 0.3, 0.5, 0.7, 0.6])
    line.show_stage("clients", 3, 10)
    console = Console(file=io.StringIO(), width=width)
    console.print(progress.row(width, *board.rows()[0]))
    (text,) = console.file.getvalue().splitlines()
    assert len(text) <= width
    assert "6/10" in text
    assert "accuracy 60.0% ↗  best 70.0%" in text
    assert "left" in text
    assert ("clients training 3/10" in text) == ("consensus 90.0%" in text) == (width == 120)


def test_trends():
    assert progress.trend([0.1] * 5) == ""
    assert progress.trend([0.5] * 6) == "→"
    assert progress.trend([0.5, 0.5, 0.5, 0.4, 0.4, 0.4]) == "↘"
    assert [progress.duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1 h 02 min"]


def test_a_comparison_has_one_line_for_all_its_runs(tmp_path):
    board = progress.Board()
    first = progress.Line(board, warn).callbacks()
    configs = [fedet.config.load("digits", {"run.rounds": 4, "method.name": name}) for name in ("fedet", "fedavg")]
    first.planned(configs)
    for config, accuracy in zip(configs, (0.5, 0.4), strict=True):
        run = first.for_another_run()
        run.started(config, tmp_path / "runs" / "compare-x" / "a", 0)
        run.round(entry(1, accuracy))
    labels = [(label, done, total) for label, done, total, _ in board.rows()]
    assert labels == [("fedet s0", 1, 4), ("fedavg s0", 1, 4), ("all runs", 2, 8)]
    run.ended(None)  # after one of four rounds
    (*_, (label, done, total, words)) = board.rows()
    assert (label, done, total) == ("all runs", 5, 8)
    assert words[0] == "1/2 runs"
    assert words[-1] == "best 50.0% fedet s0"
    assert len(board.heading) == 1
    assert board.heading[0].startswith("2 runs on digits, cpu")
    assert board.heading[0].endswith("compare-x")
    assert "<progress value='5' max='8'>" in progress.as_html(board)
