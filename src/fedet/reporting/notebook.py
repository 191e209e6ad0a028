"""Runs as Python and notebooks show them: a line or a table, a data frame, a figure."""

from __future__ import annotations

import html
import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedet.config import objects
from fedet.errors import FedetError
from fedet.reporting import results, words
from fedet.reporting.curves import Curve
from fedet.reporting.run_data import RunData, read_run
from fedet.storage.metrics import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_table(folder: Path) -> str:
    """A run's models with their size and their final and best accuracy, as HTML."""
    run = read_run(folder)
    rows = [
        [row["name"], f"{row['size']:,}" if row["size"] else "–", f"{row['final']:.4f}", f"{row['best']:.4f}"]
        for row in results.model_rows(run)
    ]
    what = f"{results.short_name(run.method)} on {objects.shown(str(run.config['data'].get('name')))}"
    caption = f"{what}, seed {run.seed}, {run.last_round} rounds"
    return html_table(caption, ["model", "parameters", "final", "best"], rows)


def run_line(summary: Record, folder: Path) -> str:
    """A run in one line: what it was, its accuracy, where it is."""
    what = f"{results.short_name(summary['method'])} on {objects.shown(str(summary['data']))}, seed {summary['seed']}"
    scores = f"accuracy {words.percent(summary['accuracy'])}, best {words.percent(summary['best_accuracy'])}"
    return f"{what}, {summary['rounds']} rounds: {scores}; in {folder}"


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def frame(metrics: Sequence[Record]) -> Any:
    """One row per round: numbers of the record, and those of its tables as `models.NAME`, `seconds.NAME`, `per_client.NAME`."""
    return _pandas().DataFrame([_flat(entry) for entry in metrics]).set_index("round")


def accuracy_plot(folder: Path) -> Figure:
    """The accuracy of every model of a run over its rounds."""
    from fedet.reporting import plots

    points = results.model_points(read_run(folder))
    curves = [Curve(name, list(values), list(values.values())) for name, values in points.items()]
    return plots.accuracy(curves, bold=next(iter(points), None))


def comparison_table(rows: Sequence[Record], caption: str) -> str:
    """The table of a comparison, as HTML."""
    return html_table(caption, *results.table(rows))


def comparison_text(rows: Sequence[Record], folder: Path) -> str:
    """The table of a comparison, as text."""
    head, body = results.table(rows)
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *body)]
    return "\n".join([*lines, f"in {folder}"])


def comparison_frame(rows: Sequence[Record]) -> Any:
    """One row per method or configuration."""
    return _pandas().DataFrame(rows).set_index("label")


def comparison_plot(runs: Sequence[RunData]) -> Figure:
    """The accuracy of each method's output over the rounds; of several seeds the mean, in a band from the worst to the best."""
    from fedet.reporting import plots

    curves = []
    for label, group in results.grouped(runs).items():
        tables = [{m["round"]: m["accuracy"] for m in results.evaluated(run)} for run in group]
        common = sorted(set.intersection(*map(set, tables)))
        values = [[table[number] for table in tables] for number in common]
        band = ([min(v) for v in values], [max(v) for v in values]) if len(group) > 1 else (None, None)
        curves.append(Curve(label, common, [statistics.fmean(v) for v in values], *band))
    return plots.accuracy(curves)


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise FedetError("to_pandas needs pandas: pip install 'fedet[notebook]'") from None


def _flat(entry: Record) -> Record:
    plain = {key: value for key, value in entry.items() if isinstance(value, int | float)}
    tables = {key: entry[key] for key in ("models", "seconds", "per_client") if entry.get(key)}
    inner = {f"{key}.{name}": value for key, table in tables.items() for name, value in table.items()}
    by_class = {f"per_class.{label}": value for label, value in enumerate(entry.get("per_class") or [])}
    return plain | {key: value for key, value in inner.items() if isinstance(value, int | float)} | by_class
