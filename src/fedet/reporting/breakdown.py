"""Accuracy by class and by client, where a run's metrics have it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fedet.reporting.run_data import RunData

MOST_CLASSES = 40
"""Wider tables can't be read."""


class ByClass(NamedTuple):
    """The server model's accuracy on each class, and how often it took one (row) for another (column)."""

    round: int
    accuracies: list[float | None]
    confusion: list[list[float]] | None

    @property
    def shades(self) -> list[list[tuple[float, int]]]:
        """The confusions, each with a shade from 0 to 4 by its share of the row; none if the table would be too wide."""
        rows = self.confusion if self.confusion and len(self.confusion) <= MOST_CLASSES else []
        return [[(value, round(4 * value / max(sum(row), 1e-9))) for value in row] for row in rows]


class ByClient(NamedTuple):
    """The server model's accuracy on the clients' data: mean, mean of the worst tenth, deviation, and each client's."""

    round: int
    mean: float
    worst_tenth: float
    std: float
    accuracies: dict[str, float]

    @property
    def worst(self) -> list[tuple[str, float]]:
        """The clients with the lowest accuracies, at most ten."""
        return sorted(self.accuracies.items(), key=lambda item: item[1])[:10]


def by_class(run: RunData) -> ByClass | None:
    """From the last evaluation that has it; anything that is not a list of numbers is left out."""
    for m in reversed(run.metrics):
        found = m.get("per_class")
        if isinstance(found, list) and found and all(value is None or is_number(value) for value in found):
            return ByClass(m["round"], found, _square(m.get("confusion"), len(found)))
    return None


def by_client(run: RunData) -> ByClient | None:
    """From the last evaluation that has it."""
    for m in reversed(run.metrics):
        found = m.get("per_client")
        if isinstance(found, dict) and all(is_number(found.get(key)) for key in ("mean", "worst_tenth", "std")):
            each = found.get("accuracies")
            known = (
                {str(client): float(value) for client, value in each.items() if is_number(value)}
                if isinstance(each, dict)
                else {}
            )
            return ByClient(m["round"], found["mean"], found["worst_tenth"], found["std"], known)
    return None


def is_number(value: Any) -> bool:
    """Whether this is a finite number: what a file contains may be anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _square(table: Any, size: int) -> list[list[float]] | None:
    if not isinstance(table, list) or len(table) != size:
        return None
    fits = all(isinstance(row, list) and len(row) == size and all(is_number(v) and v >= 0 for v in row) for row in table)
    return table if fits else None
