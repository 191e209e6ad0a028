"""How a method's server model compares with its teachers, with the ceiling of hard labels, and with what was possible."""

from __future__ import annotations

from collections.abc import Sequence

from fedet.reporting.statistics import late
from fedet.study.cells import Cell, Grid
from fedet.study.plan import METHOD, column_names
from fedet.study.records import Record
from fedet.study.tables import NOT_RUN, Table, column_label, label, percent

TEACHERS = "consensus"
OF_TEACHERS = 0.97
"""The share of its teachers' accuracy that the server model should reach."""


def ceilings(grid: Grid, method: str) -> Table:
    """One row per column of the plan: the method beside its teachers and the references, over the seeds that it has."""
    plan, names = grid.plan, column_names(grid.plan)
    head = [", ".join(label(plan, name, None) for name in names), "seeds", "best", "late"]
    head += ["consensus, late", "late / consensus", "best small model, late"]
    others = [other for other in ("public-labels", "central", "fedavg", "fedet") if other != method]
    head += [f"{label(plan, METHOD, other)}, best" for other in others]
    body = []
    for column in grid.columns:
        cells = {str(cell.example.coordinates[METHOD]): cell for cell in grid.column(column)}
        own = list(cells[method].scored.values()) if method in cells else []
        place = column_label(plan, column)
        body.append([place, str(len(own)), *_own(own), *(_best(cells.get(other)) for other in others)])
    return Table(head, body)


def goals(grid: Grid, method: str) -> Table:
    """One row per column of the plan: what the method should reach, by how many points and with how many seeds it does."""
    plan, names = grid.plan, column_names(grid.plan)
    others = ("public-labels", "fedavg")
    head = [", ".join(label(plan, name, None) for name in names), f"late: {OF_TEACHERS} of the consensus"]
    head += ["late: the best small model", *(f"best: {label(plan, METHOD, other)}" for other in others)]
    body = []
    for column in grid.columns:
        cells = {str(cell.example.coordinates[METHOD]): cell.scored for cell in grid.column(column)}
        own = cells.get(method, {})
        margins = [[r.result["late"] - OF_TEACHERS * t for r in own.values() if (t := _late(r, TEACHERS))]]
        margins += [[r.result["late"] - small for r in own.values() if (small := _best_small(r))]]
        for other in others:
            theirs = cells.get(other, {})
            margins.append([own[seed].result["best"] - theirs[seed].result["best"] for seed in own if seed in theirs])
        body.append([column_label(plan, column), *map(_reached, margins)])
    return Table(head, body)


def _reached(margins: Sequence[float]) -> str:
    if not margins:
        return NOT_RUN
    mean, met = sum(margins) / len(margins), sum(margin >= 0 for margin in margins)
    return f"{100 * mean:+.2f} {'✓' if mean >= 0 else '✗'} ({met} of {len(margins)})"


def _best_small(record: Record) -> float | None:
    return max((_late(record, name) or 0.0 for name in _small(record)), default=None)


def _own(records: Sequence[Record]) -> list[str]:
    if not records:
        return [NOT_RUN, *["–"] * 4]
    teachers = [_late(record, TEACHERS) for record in records]
    ratios = [r.result["late"] / t for r, t in zip(records, teachers, strict=True) if t]
    small = [best for r in records if (best := _best_small(r)) is not None]
    return [
        percent([record.result["best"] for record in records]),
        percent([record.result["late"] for record in records]),
        percent(teachers),
        f"{sum(ratios) / len(ratios):.3f}" if ratios else "–",
        percent(small),
    ]


def _best(cell: Cell | None) -> str:
    return NOT_RUN if cell is None or not cell.scored else percent([record.result["best"] for record in cell.scored.values()])


def _small(record: Record) -> list[str]:
    """The small models of a run: all that are named after an architecture, except the server's."""
    return [
        name for name in record.curves["models"] if name in record.result["arch_params"] and name != record.result["server"]
    ]


def _late(record: Record, name: str) -> float | None:
    """Mean accuracy of one of the run's models over the last fifth of the rounds in which it was evaluated."""
    return late([value for value in record.curves["models"].get(name, []) if value is not None])
