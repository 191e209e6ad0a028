"""Runs as notebooks show them: an HTML table, a data frame, a figure."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedet.errors import FedetError
from fedet.reporting import plots, results
from fedet.reporting.plots import Curve
from fedet.reporting.run_data import read_run
from fedet.storage.metrics import Record


def run_table(folder: Path) -> str:
    """A run's models with their size and their final and best accuracy, as HTML."""
    run = read_run(folder)
    rows = [
        [row["name"], f"{row['size']:,}" if row["size"] else "–", f"{row['final']:.4f}", f"{row['best']:.4f}"]
        for row in results.model_rows(run)
    ]
    caption = f"{run.method} on {run.config['data'].get('name')}, seed {run.seed}, {run.last_round} rounds"
    return html_table(caption, ["model", "parameters", "final", "best"], rows)


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def frame(metrics: Sequence[Record]) -> Any:
    """One row per round: numbers of the record, accuracies as `models.NAME`, times as `seconds.NAME`."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise FedetError("to_pandas needs pandas: pip install 'fedet[notebook]'") from None
    return pandas.DataFrame([_flat(entry) for entry in metrics]).set_index("round")


def accuracy_plot(folder: Path) -> Figure:
    """The accuracy of every model of a run over its rounds."""
    points = results.model_points(read_run(folder))
    curves = [Curve(name, list(values), list(values.values())) for name, values in points.items()]
    return plots.accuracy(curves, bold=next(iter(points), None))


def _flat(entry: Record) -> Record:
    plain = {key: value for key, value in entry.items() if isinstance(value, int | float)}
    tables = {key: entry[key] for key in ("models", "seconds") if key in entry}
    return plain | {f"{key}.{name}": value for key, table in tables.items() for name, value in table.items()}
