"""What the command line prints at the end of runs and comparisons fits the terminal and says what came out."""

import json
import re
import sys

import pytest
from rich.cells import cell_len
from test_report import make_result, make_run

from fedet.cli import console
from fedet.engine.comparison import Comparison
from fedet.engine.session import Result

SCORES = {0: (0.2, 0.55, 0.8, 0.7), 1: (0.3, 0.4, 0.9, 0.8), 2: (0.3, 0.5, 0.85, 0.75)}


def result(folder):
    return Result(folder, json.loads((folder / "result.json").read_text(encoding="utf-8")))


@pytest.fixture
def compared(tmp_path):
    """Fed-ET with three seeds, FedAvg with the same, which ended early, and a reference."""
    folders = [make_run(tmp_path / f"fedet-s{seed}", seed=seed, scores=scores) for seed, scores in SCORES.items()]
    for seed in SCORES:
        folder = make_run(tmp_path / f"fedavg-s{seed}", "fedavg", seed, scores=(0.1, 0.3 + seed / 10))
        told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        (folder / "result.json").write_text(json.dumps(told | {"stopped": "budget_params"}), encoding="utf-8")
        folders.append(folder)
    return Comparison(tmp_path, [result(folder) for folder in folders])


def test_a_comparison_of_seeds_prints_means_and_the_outcome(compared, capsys):
    console.comparison(compared)
    said = capsys.readouterr().out
    assert "Test accuracy, mean over 3 seeds" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["fedet", "server", "(vgg)", "20,000", "75.00", "85.00"] in lines
    assert ["cnn", "1,000", "37.50", "42.50"] in lines  # half of the server's
    assert ["fedavg", "server", "(vgg)", "20,000", "40.00", "40.00"] in lines
    assert "Fed-ET reached the best accuracy, 85.0% (mean over 3 seeds), before FedAvg with 40.0%" in said


def test_one_seed_is_named(compared, capsys):
    console.comparison(Comparison(compared.folder, [compared.results[0], compared.results[3]]))
    said = capsys.readouterr().out
    assert "Test accuracy, seed 0" in said
    assert "This is one seed, so small differences may be chance." in said


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_tables_fit_the_terminal_and_no_cell_is_torn(compared, capsys, monkeypatch, width):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    console.comparison(compared)
    said = capsys.readouterr().out
    assert re.search("\x1b\\[1m *fedet ", said)  # the best is bold
    _, tables = re.sub(r"\x1b\[[\d;]*m", "", said).split("Comparison", 1)
    table = tables.split("Fed-ET reached")[0]
    assert max(cell_len(line) for line in table.splitlines()) <= width
    (row,) = (line for line in table.splitlines() if " fedet " in line)
    assert "85.00 ± 5.00" in row
    assert "20k" in row
    assert ("seconds" in table, "final accuracy" in table) == (width >= 160, width >= 110)


def test_names_with_brackets_and_control_characters_are_shown_as_they_are(capsys):
    console.table("a [/b]", [{"[red]key": "[/x].csv \x1b[2J", "n": 1}])
    console.cells("t", ["[h]", "[/h]"], [["[/row]", "[bold]2"]])
    shown = capsys.readouterr().out
    for text in ("a [/b]", "[red]key", "[/x].csv", "\\x1b[2J", "[h]", "[/h]", "[/row]", "[bold]2"):
        assert text in shown


def test_a_run_says_in_words_how_it_ended(tmp_path, capsys):
    folder = make_run(tmp_path / "one")
    console.result(Result(folder, make_result("fedet", 0, [{"accuracy": 0.7, "round": 4, "params_total": 20000}])))
    said = capsys.readouterr().out
    assert "1 rounds in 6 s, all rounds finished; 20k parameters sent" in said
    assert "70.00" in said


def test_python_shows_a_result_in_a_line_and_a_comparison_as_a_table(compared):
    assert repr(compared.results[0]) == (
        f"fedet on digits, seed 0, 4 rounds: accuracy 70.0%, best 80.0%; in {compared.results[0].run_dir}"
    )
    head, fedet, fedavg, where = repr(compared).splitlines()
    assert head.split()[:3] == ["method", "best", "accuracy,"]
    assert fedet.split()[:4] == ["fedet", "85.00", "±", "5.00"]
    assert len(head) == len(fedet) == len(fedavg)
    assert where == f"in {compared.folder}"
