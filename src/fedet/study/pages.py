"""The page of a study: tables and curves in one HTML file, with CSV and LaTeX beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from fedet.reporting import figure_files, plots
from fedet.reporting.curves import Curve, Level
from fedet.reporting.references import HEADING
from fedet.storage.files import write_json, write_text
from fedet.study import effects, setups, tables
from fedet.study.cells import Cell, Grid, Place, is_reference
from fedet.study.plan import Plan, PlannedRun

MOST_CURVES = 12
"""With more rows than that a figure of curves can't be read."""
XAxis = Literal["round", "params"]
TEMPLATES = (Path(__file__).with_name("templates"), Path(plots.__file__).with_name("templates"))


def write(grid: Grid, folder: Path, errors: dict[str, str] | None = None) -> Path:
    """Write study.html, table.csv, table.tex, plots/ and study.json into a folder; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.csv", tables.to_csv(grid))
    write_text(folder / "table.tex", tables.to_tex(grid))
    changes = effects.applies(grid)
    table, failed = effects.table(grid) if changes else tables.main(grid), _failed(grid) | (errors or {})
    runs, missing = sum(len(cell.runs) for cell in grid.cells.values()), sum(cell.missing for cell in grid.cells.values())
    found = figures(grid) if len(grid.rows) <= MOST_CURVES else []
    drawn = [(name, column, _saved(figure, folder, name)) for name, column, figure in found]
    effect_figures = effects.figures(grid) if changes else []
    named = [(f"effects-{number}", title, figure) for number, (title, figure) in enumerate(effect_figures, start=1)]
    page = environment().get_template("study.html.j2").render(
        title=grid.plan.title,
        plan=grid.plan,
        main=table,
        details=tables.details(grid),
        differences=None if changes else tables.differences(grid),
        against=tables.against(grid),
        effects=[(name, title, _saved(figure, folder, name)) for name, title, figure in named],
        figures=drawn,
        failed=failed,
        runs=runs,
        missing=missing,
    )  # fmt: skip
    write_text(folder / "study.html", page)
    told = {"title": grid.plan.title, "runs": runs, "finished": runs - missing, "failed": failed}
    write_json(folder / "study.json", told | {"head": table.head, "body": table.body})
    return folder / "study.html"


def write_setups(plan: Plan, runs: Sequence[PlannedRun], records: Path, folder: Path) -> Path:
    """Write the page of a plan that trains nothing: the sizes of models, or the clients' data."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = setups.distributions(plan, runs, records) if plan.kind == "data" else []
    names = [f"data-{number}" for number in range(1, len(drawn) + 1)]
    figures = [(name, title, _saved(figure, folder, name)) for name, (title, figure) in zip(names, drawn, strict=True)]
    table = setups.sizes(plan, runs, records) if plan.kind == "sizes" else None
    page = environment().get_template("setup.html.j2").render(title=plan.title, plan=plan, main=table, figures=figures)
    write_text(folder / "study.html", page)
    return folder / "study.html"


def curves(grid: Grid, column: Place, x: XAxis = "round") -> Figure | None:
    """Test accuracy, one curve per row of the table, with references as horizontal lines; None if there is none yet."""
    named = [(tables.row_label(grid.plan, cell.row), cell) for cell in grid.column(column)]
    found = [curve for name, cell in named if not is_reference(cell, grid.plan) and (curve := _curve(name, cell, x))]
    levels = [
        Level(name, statistics.fmean(max(r.curves["accuracy"]) for r in cell.scored.values()))
        for name, cell in named
        if is_reference(cell, grid.plan) and cell.scored
    ]
    return plots.accuracy(found, x, levels=levels) if found else None


def _curve(name: str, cell: Cell, x: XAxis) -> Curve | None:
    """Mean over seeds in the rounds that all of them evaluated, with a band of one standard deviation on each side."""
    records = list(cell.scored.values())
    points = [dict(zip(r.curves["round"], r.curves["accuracy"], strict=True)) for r in records]
    common = sorted(set.intersection(*(set(seed) for seed in points))) if points else []
    if not common:
        return None
    sent = [dict(zip(r.curves["round"], r.curves["params_total"], strict=True)) for r in records]
    xs = common if x == "round" else [statistics.fmean(seed[number] for seed in sent) for number in common]
    groups = [[seed[number] for seed in points] for number in common]
    means = [statistics.fmean(group) for group in groups]
    if len(points) < 2:
        return Curve(name, xs, means)
    stds = [statistics.stdev(group) for group in groups]
    return Curve(name, xs, means, _shift(means, stds, -1), _shift(means, stds, 1))


def _shift(means: Sequence[float], stds: Sequence[float], sign: int) -> list[float]:
    return [mean + sign * std for mean, std in zip(means, stds, strict=True)]


def figures(grid: Grid, x: XAxis = "round") -> list[tuple[str, str, Figure]]:
    """The curves of every column that has any: a name, the column in words, and the figure."""
    out = []
    for number, column in enumerate(grid.columns, start=1):
        figure = curves(grid, column, x)
        if figure is not None:
            out.append((f"curves-{number}", tables.column_label(grid.plan, column), figure))
    return out


def _saved(figure: Figure, folder: Path, name: str) -> Markup:
    """Write a figure into the page's folder; returns it as an element of the page."""
    return Markup(figure_files.inline_svg(figure_files.save(figure, folder / "plots", name)))


def _failed(grid: Grid) -> dict[str, str]:
    records = [record for cell in grid.cells.values() for record in cell.records.values()]
    return {record.key: record.failed for record in records if record.failed is not None}


def environment() -> Environment:
    """The templates of studies, which build on those of reports."""
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    found = Environment(loader=FileSystemLoader(TEMPLATES), keep_trailing_newline=True, **options)
    found.globals["heading"] = HEADING
    return found
