"""Tables and results on standard output."""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedet.cli import output
from fedet.engine import session
from fedet.engine.comparison import Comparison
from fedet.models.text import notice
from fedet.reporting import references, results
from fedet.reporting.results import si
from fedet.reporting.run_data import read_run
from fedet.storage.run_folder import RunFolder
from fedet.study.audit import AuditOfRun
from fedet.study.bound import TERMS, BoundOfRun

FEW_METHODS = 3
"""Up to so many methods, a comparison's table has every model of each."""


def table(title: str, rows: Sequence[dict[str, Any]], more: Sequence[dict[str, Any]] = (), heading: str = "") -> None:
    """Print rows of plain values as a table, and below a line and a heading, if there are any, some more."""
    view = Table(title=title, title_justify="left", header_style="bold")
    for key in rows[0] if rows else ():
        right = all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
        view.add_column(key, justify="right" if right else "left", overflow="fold")
    for row in rows:
        view.add_row(*(_cell(value) for value in row.values()))
    if more:
        view.add_section()
        view.add_row(f"[italic]{heading}[/italic]")
    for row in more:
        view.add_row(*(_cell(value) for value in row.values()))
    _print(view)


def cells(title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table of text; headings may repeat."""
    view = Table(title=title, title_justify="left", header_style="bold")
    for number, heading in enumerate(head):
        view.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in body:
        view.add_row(*row)
    _print(view)


def _print(view: Table) -> None:
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    rendered = io.StringIO()  # if rich wrote to standard output itself, it would end the program when the reader has left
    width = None if on_terminal else 160  # a file or a pipe has no width to wrap at
    Console(width=width, file=rendered, force_terminal=on_terminal or None).print(view)
    output.write(rendered.getvalue().removesuffix("\n"))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def result(outcome: session.Result) -> None:
    """Print a finished run: its models, its traffic, the paths of its files."""
    table("Test accuracy", model_table(outcome))
    summary = outcome.summary
    sent = summary["params_up"] + summary["params_down"]
    took = f"{summary['rounds']} rounds in {summary['seconds']:.0f} s"
    output.write(f"{took}; {si(sent)} parameters sent; stopped by {summary['stopped']}")
    if warning := notice(RunFolder(outcome.run_dir).config().models.model_dump()):
        output.write(warning)
    if text := references.spread_at_clients(str(summary["method"]), [read_run(outcome.run_dir)]):
        output.write(text)
    if (outcome.run_dir / "best").is_dir():
        output.write(f"best server model  {outcome.run_dir / 'best'}")
    output.write(f"report             {outcome.report}")


def model_table(outcome: session.Result) -> list[dict[str, Any]]:
    """Final and best accuracy of every model of a run, with its size."""
    run = read_run(outcome.run_dir)
    return [
        {
            "model": f"{row['name']} ({row['arch']})" if row["arch"] else row["name"],
            "parameters": row["size"],
            "final": results.noted(f"{row['final']:.4f}", row["final_round"], last=run.last_round),
            "best": f"{row['best']:.4f}",
        }
        for row in results.model_rows(run)
    ]


def comparison(outcome: Comparison) -> None:
    """Print the models of the first seed (of more than a few methods, the server models but for the first), then all seeds."""
    seed = outcome.results[0].summary["seed"]
    runs = [result for result in outcome.results if result.summary["seed"] == seed]
    federated = [run for run in runs if not run.summary.get("reference")]
    whole = len(federated) if len(federated) <= FEW_METHODS else 1
    rows = [_sent(run, row) for i, run in enumerate(federated) for row in model_table(run)[: None if i < whole else 1]]
    possible = [_sent(run, row) for run in runs if run not in federated for row in model_table(run)[:1]]
    table(f"Test accuracy, seed {seed}", rows or possible, possible if rows else (), references.HEADING)
    head, body = results.table(outcome.rows)
    count = sum(not row["reference"] for row in outcome.rows) or len(body)
    cells = [dict(zip(head, row, strict=True)) for row in body]
    table("Comparison", cells[:count], cells[count:], references.HEADING)
    for label, group in results.grouped([read_run(result.run_dir) for result in outcome.results]).items():
        if text := references.spread_at_clients(label, group):
            output.write(text)
    for note in outcome.notes:
        output.write(note)
    output.write(f"report  {outcome.report}")


def _sent(outcome: session.Result, row: dict[str, Any]) -> dict[str, Any]:
    total = outcome.traffic["params_up"] + outcome.traffic["params_down"]
    sent = "–" if outcome.summary.get("reference") else si(total)
    return {"method": results.short_name(str(outcome.summary["method"])), **row, "parameters sent": sent}


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
    means = [statistics.fmean(values) for values in zip(*((c.bound, c.test_error) for c in found.cohorts), strict=True)]
    output.write(
        f"bound of the weighted ensemble {means[0]:.3f}, its test error {means[1]:.3f}, mean of {len(found.cohorts)} cohorts"
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
