"""The curves and lines of accuracy plots, for reports and for `fedet ui`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedet.reporting import results
from fedet.reporting.run_data import RunData


class Curve(NamedTuple):
    """One line of an accuracy plot, with an optional band around it."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Level(NamedTuple):
    """A horizontal line of an accuracy plot: what was possible."""

    label: str
    y: float


def run_curves(run: RunData, x: str) -> list[Curve]:
    """The accuracy of every model of a run against one of the numbers of a round; the method's output comes first."""
    place = {m["round"]: m[x] for m in run.metrics}
    return [
        Curve(name, [place[number] for number in points], list(points.values()))
        for name, points in results.model_points(run).items()
    ]


def mean_curve(label: str, group: Sequence[RunData], x: str) -> Curve:
    """Mean over seeds in the rounds that all of them evaluated, with a band of one standard deviation on each side."""
    tables = [{m["round"]: m for m in results.evaluated(run)} for run in group]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    ys = np.array([[table[number]["accuracy"] for table in tables] for number in common]).reshape(-1, len(group))
    xs = [statistics.fmean(table[number][x] for table in tables) for number in common]
    mean = ys.mean(axis=1)
    if len(group) == 1:
        return Curve(label, xs, list(mean))
    std = ys.std(axis=1, ddof=1)
    return Curve(label, xs, list(mean), list(mean - std), list(mean + std))
