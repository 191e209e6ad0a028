"""The cells of a study's table: the records behind each of them, and the values they have in common with the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedet.methods import REFERENCES
from fedet.reporting.statistics import Spread, spread
from fedet.study.plan import BASE, METHOD, SEED, Plan, PlannedRun, column_names
from fedet.study.plan import Grid as PlanGrid
from fedet.study.records import Record

REFERENCE_NAMES = frozenset(cls.name for cls in REFERENCES)
Place = tuple[Any, ...]
"""The values of the coordinates that make up a row or a column."""


@dataclass
class Cell:
    """The runs of one row and one column, which differ by seed."""

    row: Place
    column: Place
    runs: dict[int, PlannedRun] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)

    @property
    def scored(self) -> dict[int, Record]:
        """The records with a result, by seed."""
        return {seed: record for seed, record in self.records.items() if record.failed is None}

    @property
    def failed(self) -> int:
        """How many runs failed."""
        return len(self.records) - len(self.scored)

    @property
    def missing(self) -> int:
        """How many runs have no record."""
        return len(self.runs) - len(self.records)

    @property
    def example(self) -> PlannedRun:
        """One of the runs."""
        return next(iter(self.runs.values()))


@dataclass(frozen=True)
class Grid:
    """All cells of a table; a combination that the plan does not have is missing."""

    plan: Plan
    rows: list[Place]
    columns: list[Place]
    cells: dict[tuple[Place, Place], Cell]

    def column(self, column: Place) -> list[Cell]:
        """The cells of a column, from the top."""
        return [self.cells[row, column] for row in self.rows if (row, column) in self.cells]

    def row(self, row: Place) -> list[Cell]:
        """The cells of a row, from the left."""
        return [self.cells[row, column] for column in self.columns if (row, column) in self.cells]

    @property
    def references(self) -> int:
        """How many rows at the end are references."""
        return sum(all(is_reference(cell, self.plan) for cell in self.row(row)) for row in self.rows)

    def measured(self) -> Grid:
        """The rows and columns in which there is a record."""
        found = [place for place, cell in self.cells.items() if cell.records]
        rows = [row for row in self.rows if any(row == other for other, _ in found)]
        columns = [column for column in self.columns if any(column == other for _, other in found)]
        kept = {(row, column): cell for (row, column), cell in self.cells.items() if row in rows and column in columns}
        return Grid(self.plan, rows, columns, kept)


def arrange(plan: Plan, runs: Sequence[PlannedRun], record_of: Callable[[str], Record | None]) -> Grid:
    """Arrange the plan's runs and the records they have in cells."""
    names = column_names(plan)
    cells: dict[tuple[Place, Place], Cell] = {}
    known: dict[str, Record | None] = {}
    for run in runs:
        row, column = _place(run, plan.rows), _place(run, names)
        cell = cells.setdefault((row, column), Cell(row, column))
        seed = int(run.coordinates[SEED])
        cell.runs[seed] = run
        if run.key not in known:
            known[run.key] = record_of(run.key)
        if (record := known[run.key]) is not None:
            cell.records[seed] = record
    listed = _in_plan_order(plan, cells)
    columns = [column for _, column in cells]
    return Grid(plan, listed, sorted(dict.fromkeys(columns), key=lambda c: _order(plan, names, c, columns)), cells)


def values(cell: Cell, plan: Plan) -> dict[int, float]:
    """The table's metric by seed; without the seeds whose run failed, or never reached the target of C_acc."""
    if plan.metric == "c_acc":
        level = target(cell, plan)
        found = {seed: record.c_acc(level) for seed, record in cell.scored.items()}
        return {seed: float(cost) for seed, cost in found.items() if cost is not None}
    scores = {seed: record.result[plan.metric] for seed, record in cell.scored.items()}
    return {seed: float(score) for seed, score in scores.items() if score is not None}


def complete(cell: Cell, plan: Plan) -> bool:
    """Whether all runs so far have a value: seeds that diverged or did not reach the target are missing in a mean."""
    return values(cell, plan).keys() == cell.records.keys()


def summary(cell: Cell, plan: Plan) -> Spread | None:
    """The metric's mean and deviation over the seeds."""
    return spread(list(values(cell, plan).values()))


def target(cell: Cell, plan: Plan) -> float:
    """The accuracy of C_acc in this cell: the plan's for its base, or the largest one that the configuration reports."""
    run = cell.example
    return plan.targets.get(str(run.coordinates[BASE]), max(run.config.run.report_accuracy, default=0.5))


def papers(cell: Cell, plan: Plan) -> list[float] | None:
    """The paper's value for this cell and its deviation, where the plan has them."""
    if plan.paper is None:
        return None
    at = cell.example.coordinates
    row = plan.paper.rows.get(str(at.get(plan.paper.row)))
    for column, value in zip(plan.paper.columns, row or [], strict=False):
        if value and all(at.get(name) == wanted for name, wanted in column.items()):
            return value
    return None


def is_reference(cell: Cell, plan: Plan) -> bool:
    """Whether the cell's method is a reference and not one of the methods that are compared."""
    name = cell.example.coordinates[METHOD]
    return name in REFERENCE_NAMES or any(name in grid.reference_names() for grid in plan.grids)


def _place(run: PlannedRun, names: Sequence[str]) -> Place:
    return tuple(_plain(run.coordinates.get(name)) for name in names)


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value


def _in_plan_order(plan: Plan, cells: Mapping[tuple[Place, Place], Cell]) -> list[Place]:
    """The rows as the plan lists them, references last."""
    rows = [row for row, _ in cells]
    compared = {row for (row, _), cell in cells.items() if not is_reference(cell, plan)}
    return sorted(dict.fromkeys(rows), key=lambda row: (row not in compared, *_order(plan, plan.rows, row, rows)))


def _order(plan: Plan, names: Sequence[str], place: Place, places: Sequence[Place]) -> list[int]:
    """Where the plan lists the values of a place; by default as they come."""
    out = []
    for position, (name, value) in enumerate(zip(names, place, strict=True)):
        listed = [_plain(v) for grid in plan.grids for v in _listed(grid, name)]
        found = list(dict.fromkeys([*listed, *(other[position] for other in places)]))
        out.append(found.index(value))
    return out


def _listed(grid: PlanGrid, name: str) -> list[Any]:
    if name == METHOD:
        return [*grid.method_names(), *grid.reference_names()]
    return list({"variant": list(grid.variants)}.get(name, grid.axes.get(name, [])))
