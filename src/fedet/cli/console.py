"""Tables and results on standard output."""

from __future__ import annotations

import dataclasses
import io
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedet.cli import output
from fedet.engine import session
from fedet.engine.comparison import Comparison
from fedet.models.text import notice
from fedet.reporting import comparisons, references, results, words
from fedet.reporting.results import si
from fedet.reporting.run_data import RunData, read_run
from fedet.storage.run_folder import RunFolder
from fedet.study.audit import AuditOfRun
from fedet.study.bound import TERMS, BoundOfRun

FEW_METHODS = 3
"""Up to so many methods, a comparison's table has every model of each."""
NUMBER = re.compile(rf"[+-]?[\d,.]+[kMGT%]?( .*)?|–|{results.NOT_REACHED}")
"""Texts that a column of numbers may have."""


def table(
    title: str,
    rows: Sequence[dict[str, Any]],
    more: Sequence[dict[str, Any]] = (),
    heading: str = "",
    *,
    best: Sequence[int] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print rows of plain values as a table, and below a heading, if there are any, some more.

    Rows whose numbers are in `best` are bold. Where the terminal is too narrow, columns in `spare` are left out, one by one.
    """
    keys = list(rows[0]) if rows else []
    for left_out in (None, *spare):
        keys = [key for key in keys if key != left_out]
        view = _empty(title)
        for key in keys:
            view.add_column(plain(key), justify="right" if all(_is_number(row[key]) for row in (*rows, *more)) else "left")
        for number, row in enumerate(rows):
            view.add_row(*(_cell(row[key]) for key in keys), style="bold" if number in best else None)
        if more:
            view.add_section()
            view.add_row(f"[italic]{plain(heading)}[/italic]")
        for row in more:
            view.add_row(*(_cell(row[key]) for key in keys))
        if _fits(view):
            break
    _print(view)


def cells(
    title: str, head: Sequence[str], body: Sequence[Sequence[str]], heading_before: int | None = None, heading: str = ""
) -> None:
    """Print a table of text; headings may repeat. There may be a heading in a row of its own before one of the rows."""
    view = _empty(title)
    for number, name in enumerate(head):
        view.add_column(plain(name), justify="right" if number else "left", overflow="fold")
    for number, row in enumerate(body):
        if number == heading_before:
            view.add_section()
            view.add_row(heading, style="dim")
        view.add_row(*map(plain, row))
    _print(view)


def _empty(title: str) -> Table:
    return Table(title=plain(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def plain(text: str) -> str:
    """A text that is shown as it is, whatever is in it: names may have brackets, which would be taken for markup."""
    return escape(output.printable(text))


def _is_number(value: object) -> bool:
    return bool(NUMBER.fullmatch(value)) if isinstance(value, str) else not isinstance(value, bool)


def _fits(view: Table) -> bool:
    """Whether no cell of the table has to be wrapped."""
    console = _console(io.StringIO())
    return console.measure(view, options=console.options.update(width=10_000)).maximum <= console.width


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _console(file: io.StringIO) -> Console:
    on_terminal = _on_terminal()
    width = None if on_terminal else 160  # a file or a pipe has no width to wrap at
    return Console(width=width, file=file, force_terminal=on_terminal or None)


def _print(view: Table) -> None:
    rendered = io.StringIO()  # if rich wrote to standard output itself, it would end the program when the reader has left
    _console(rendered).print(view)
    output.write("\n".join(line.rstrip() for line in rendered.getvalue().splitlines()))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else plain(str(value))


def result(outcome: session.Result) -> None:
    """Print a finished run: its models, its traffic, the paths of its files."""
    run, summary = read_run(outcome.run_dir), outcome.summary
    table("Test accuracy", [{key: row[key] for key in results.MODEL_HEAD[1:]} for row in model_table("", [run])])
    sent = summary["params_up"] + summary["params_down"]
    ended = words.STOPPED.get(summary["stopped"], f"stopped by {summary['stopped']}")
    output.write(f"{summary['rounds']} rounds in {summary['seconds']:.0f} s, {ended}; {si(sent)} parameters sent")
    if warning := notice(RunFolder(outcome.run_dir).config().models.model_dump()):
        output.write(warning)
    if text := references.spread_at_clients(str(summary["method"]), [run]):
        output.write(text)
    if (outcome.run_dir / "best").is_dir():
        output.write(f"best server model  {outcome.run_dir / 'best'}")
    output.write(f"report             {outcome.report}")


def model_table(label: str, group: Sequence[RunData]) -> list[dict[str, Any]]:
    """Final and best accuracy of every model, with its size; of runs that differ only by seed the means."""
    return [dict(zip(results.MODEL_HEAD, cells, strict=True)) for cells in results.model_cells({label: group})]


def comparison(outcome: Comparison) -> None:
    """Print every model (of more than a few methods, the server models but for the first), the table, and the outcome."""
    groups = results.grouped([read_run(result.run_dir) for result in outcome.results])
    _models(groups)
    head, body = results.table(outcome.rows)
    count = sum(not row["reference"] for row in outcome.rows) or len(body)
    rows = [dict(zip(head, row, strict=True)) for row in body]
    best, spare = results.best_rows(outcome.rows), ("seconds", "n", "final accuracy, %", *reversed(head[6:-1]))
    table("Comparison", rows[:count], rows[count:], references.HEADING, best=best, spare=spare)
    notes = (references.spread_at_clients(label, group) for label, group in groups.items())
    for note in (*filter(None, notes), *outcome.notes):
        _paragraph(note)
    _paragraph(comparisons.sentence(outcome.rows, comparisons.differences(outcome.rows, groups)))
    output.write(f"report  {outcome.report}")


def _paragraph(text: str) -> None:
    """Print sentences; on a terminal no word is torn."""
    width = _console(io.StringIO()).width
    output.write(textwrap.fill(text, width, break_long_words=False) if _on_terminal() else text)


def _models(groups: Mapping[str, Sequence[RunData]]) -> None:
    federated = [label for label, group in groups.items() if not group[0].reference]
    whole = federated if len(federated) <= FEW_METHODS else federated[:1]
    rows: list[dict[str, Any]] = []
    possible: list[dict[str, Any]] = []
    for label, group in groups.items():
        found = model_table(label, group)[: None if label in whole else 1]
        (rows if label in federated else possible).extend(found)
    seeds = sorted({run.seed for group in groups.values() for run in group})
    title = f"Test accuracy, seed {seeds[0]}" if len(seeds) == 1 else f"Test accuracy, mean over {len(seeds)} seeds"
    table(title, rows or possible, possible if rows else (), references.HEADING, spare=("parameters",))


def bound(found: BoundOfRun) -> None:
    """Print the bound's terms per client, largest weight first, and how weights and bound go together."""
    rows = [
        {
            "client": c.client,
            "model": c.arch,
            "examples": c.examples,
            "weight": f"{c.weight:.2f}",
            **{name.replace("_", " "): f"{getattr(c, name):.3f}" for name in (*TERMS, "total")},
        }
        for c in sorted(found.clients, key=lambda c: -c.weight)
    ]
    table(f"Theorem 1 after round {found.round}, delta = {found.delta:g}; weight 1 is the cohort's mean", rows)
    for name, pair in found.correlations().items():
        if pair:
            output.write(f"rank correlation of weight and {name.replace('_', ' ')}: {pair[0]:+.2f} (p = {pair[1]:.2g})")
    sums = [statistics.fmean(values) for values in zip(*map(dataclasses.astuple, found.cohorts), strict=True)]
    output.write(
        f"bound of the weighted ensemble {sums[0]:.3f} ({sums[1]:.3f} with the constant of the theorem's lemma), "
        f"its test error {sums[2]:.3f}, mean of {len(found.cohorts)} cohorts"
    )


def audit(found: AuditOfRun) -> None:
    """Print how well each attack does."""
    rows = [
        {
            "model": a.target,
            "attack": a.attack,
            "AUC": f"{a.auc:.3f} ({a.auc_interval[0]:.3f} to {a.auc_interval[1]:.3f})",
            "TPR at 1% FPR": f"{a.tpr:.1%} ({a.tpr_interval[0]:.1%} to {a.tpr_interval[1]:.1%})",
            "members": a.members,
        }
        for a in found.attacks
    ]
    noise = "with privacy" if found.private else "without privacy"
    table(f"Membership inference after round {found.round}, {len(found.clients)} clients, {noise}; guessing: 0.5 and 1%", rows)


def checks(outcomes: Sequence[Any]) -> None:
    """Print the outcomes of a method's checks."""
    table("Checks", [{"check": o.name, "ok": o.ok, "detail": o.detail} for o in outcomes])


def verification(outcomes: Sequence[tuple[str, bool, str]]) -> None:
    """Print the outcomes of a data set's verification."""
    table("Verification", [{"check": name, "ok": ok, "detail": detail} for name, ok, detail in outcomes])
