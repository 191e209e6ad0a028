"""Plots as data for the browser: aligned columns, and how to draw them; each has the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedet.reporting.curves import Curve, Level
from fedet.reporting.results import si

Unit = Literal["percent", "points", "seconds", "number"]
SENT, SENT_NOTE = "parameters sent", "The same accuracies against all numbers sent so far, up and down."
MOST_ROWS = 60
"""A longer table shows evenly spaced rows and says so; the browser gets all points."""


@dataclass(frozen=True)
class Chart:
    """One plot: curves over a common axis and horizontal lines."""

    name: str
    title: str
    curves: Sequence[Curve]
    x: str = "round"
    unit: Unit = "percent"
    levels: Sequence[Level] = ()
    stacked: bool = False
    emphasis: bool = False
    """Whether the first curve is thicker than the others."""
    late: bool = False
    """Whether there is a button for the second half."""
    note: str = ""

    @property
    def xs(self) -> list[float]:
        """The places at which any curve has a value, ascending."""
        return sorted({float(x) for curve in self.curves for x in curve.xs})

    def plot(self) -> dict[str, Any]:
        """What the browser draws."""
        xs = self.xs
        series = [
            {
                "label": curve.label,
                "colour": i % 8 + 1,
                "dash": i // 8,
                "values": _column(curve, xs),
            }
            for i, curve in enumerate(self.curves)
        ]
        lines = [{"label": level.label, "value": level.y} for level in self.levels if math.isfinite(level.y)]
        return {
            "x": xs, "x_label": self.x, "unit": self.unit, "series": series, "levels": lines,
            "stacked": self.stacked, "emphasis": self.emphasis,
        }  # fmt: skip

    def table(self) -> tuple[list[str], list[list[str]], str]:
        """The numbers as text: a header, rows, and which rows there are if not all."""
        xs = self.xs
        step = max(1, math.ceil(len(xs) / MOST_ROWS))
        shown = [i for i in range(len(xs)) if (len(xs) - 1 - i) % step == 0]
        columns = [_column(curve, xs) for curve in self.curves]
        head = [self.x, *(curve.label for curve in self.curves)]
        body = [[_place(xs[i], self.x), *(text(column[i], self.unit) for column in columns)] for i in shown]
        left_out = f"Every {_ordinal(step)} of {len(xs)} rows, counted back from the last." if step > 1 else ""
        return head, body, left_out


def text(value: float | None, unit: Unit) -> str:
    """A value of a plot in words."""
    if value is None:
        return "–"
    forms = {
        "percent": f"{100 * value:.2f}%",
        "points": f"{100 * value:+.2f}",
        "seconds": f"{value:.2f} s",
        "number": f"{value:.3f}",
    }
    return forms[unit]


def _column(curve: Curve, xs: Sequence[float]) -> list[float | None]:
    known = {float(x): y for x, y in zip(curve.xs, curve.ys, strict=True)}
    found = [known.get(x) for x in xs]
    return [value if value is not None and math.isfinite(value) else None for value in found]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _place(x: float, label: str) -> str:
    return f"{x:g}" if label == "round" else si(x)
