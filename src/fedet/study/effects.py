"""What each change of a plan's variants gives: its runs minus those of the setting that it changes, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from fedet.reporting import panels
from fedet.reporting.panels import Effect
from fedet.reporting.statistics import Difference, paired
from fedet.study.cells import Cell, Grid, Place, values
from fedet.study.plan import GRID, VARIANT
from fedet.study.tables import Table, column_label, row_label, text


@dataclass(frozen=True)
class Group:
    """The changes of one setting, in one column of the table."""

    column: Place
    base: Cell
    changes: list[tuple[Cell, Difference]]


def applies(grid: Grid) -> bool:
    """Whether the rows of the plan are changes of a setting."""
    return grid.plan.rows == [VARIANT] and grid.plan.metric != "c_acc"


def groups(grid: Grid) -> list[Group]:
    """For every column and each of the plan's grids, those of its variants that share a seed with what they change."""
    found = []
    for column in grid.columns:
        for number in range(len(grid.plan.grids)):
            cells = [cell for cell in grid.column(column) if cell.example.coordinates[GRID] == number]
            base = _base(grid, column, cells)
            if base is not None:
                changes = list(_changes(grid, base, cells))
                found += [Group(column, base, changes)] if changes else []
    return found


def table(grid: Grid) -> Table:
    """A row per variant: in every column its metric, and the difference from what it changes with its 95 % interval."""
    found = {id(cell): difference for group in groups(grid) for cell, difference in group.changes}
    bases = {id(group.base) for group in groups(grid)}
    head = ["variant"]
    for column in grid.columns:
        head += [column_label(grid.plan, column), "difference, 95 % interval"]
    body = []
    for row in grid.rows:
        cells = [row_label(grid.plan, row)]
        for column in grid.columns:
            cell = grid.cells.get((row, column))
            cells.append("" if cell is None else text(cell, grid.plan))
            cells.append("–" if id(cell) in bases else _difference(found.get(id(cell))))
        body.append(cells)
    return Table(head, body)


def figures(grid: Grid) -> list[tuple[str, Figure]]:
    """A figure per column, with a panel for each setting that is changed: differences in points with their intervals."""
    out = []
    for column in grid.columns:
        own = [group for group in groups(grid) if group.column == column]
        if own:
            shown = [(_title(group, grid), [_effect(cell, group.base, d, grid) for cell, d in group.changes]) for group in own]
            out.append((f"{column_label(grid.plan, column)}: what each change gives", panels.effects(shown)))
    return out


def _base(grid: Grid, column: Place, cells: list[Cell]) -> Cell | None:
    """What a grid's variants change: the plan's `against`, or else the grid's first variant."""
    if grid.plan.against is not None:
        return grid.cells.get(((grid.plan.against,), column))
    return cells[0] if cells else None


def _changes(grid: Grid, base: Cell, cells: list[Cell]) -> Iterator[tuple[Cell, Difference]]:
    for cell in cells:
        found = paired(values(cell, grid.plan), values(base, grid.plan)) if cell is not base else None
        if found is not None:
            yield cell, found


def _title(group: Group, grid: Grid) -> str:
    return f"{row_label(grid.plan, group.base.row)}: {text(group.base, grid.plan)}"


def _effect(cell: Cell, base: Cell, found: Difference, grid: Grid) -> Effect:
    ours, others = values(cell, grid.plan), values(base, grid.plan)
    seeds = [100 * (ours[seed] - others[seed]) for seed in ours if seed in others]
    half_width = None if found.half_width is None else 100 * found.half_width
    return Effect(row_label(grid.plan, cell.row), seeds, 100 * found.mean, half_width)


def _difference(found: Difference | None) -> str:
    """The mean and half width of the interval in points, marked where it excludes zero."""
    if found is None:
        return ""
    if found.half_width is None:
        return f"{100 * found.mean:+.2f}"
    sign = ("▲" if found.mean > 0 else "▼") if found.certain else ""
    return f"{100 * found.mean:+.2f} ± {100 * found.half_width:.2f} {sign}".strip()
