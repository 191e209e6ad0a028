"""Tables and results on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedet.cli import output
from fedet.engine import session
from fedet.engine.comparison import Comparison
from fedet.models.text import notice
from fedet.reporting import results
from fedet.reporting.results import si
from fedet.reporting.run_data import read_run
from fedet.storage.run_folder import RunFolder


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of plain values as a table."""
    view = Table(title=title, title_justify="left", header_style="bold")
    for key in rows[0] if rows else ():
        right = all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
        view.add_column(key, justify="right" if right else "left", overflow="fold")
    for row in rows:
        view.add_row(*(_cell(value) for value in row.values()))
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(width=None if on_terminal else 160)  # a file or a pipe has no width to wrap at
    with console.capture() as rendered:
        console.print(view)
    output.write(rendered.get().removesuffix("\n"))


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
    """Print all models of the first run beside the others' server models, for the first seed; then the table over all seeds."""
    first, *others = outcome.results
    seed = first.summary["seed"]
    rows = [_sent(first, row) for row in model_table(first)]
    rows += [_sent(other, row) for other in others if other.summary["seed"] == seed for row in model_table(other)[:1]]
    table(f"Test accuracy, seed {seed}", rows)
    head, body = results.table(outcome.rows)
    table("Comparison", [dict(zip(head, cells, strict=True)) for cells in body])
    output.write(f"report  {outcome.report}")


def _sent(outcome: session.Result, row: dict[str, Any]) -> dict[str, Any]:
    total = outcome.traffic["params_up"] + outcome.traffic["params_down"]
    return {"method": outcome.summary["method"], **row, "parameters sent": si(total)}


def checks(outcomes: Sequence[Any]) -> None:
    """Print the outcomes of a method's checks."""
    table("Checks", [{"check": o.name, "ok": o.ok, "detail": o.detail} for o in outcomes])


def verification(outcomes: Sequence[tuple[str, bool, str]]) -> None:
    """Print the outcomes of a data set's verification."""
    table("Verification", [{"check": name, "ok": ok, "detail": detail} for name, ok, detail in outcomes])
