"""Figures of many small panels with the same axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from fedet.reporting.curves import Curve
from fedet.reporting.plots import COLOURS, DASHES, GREY, STYLE, WIDTH

ACROSS = 4
"""Panels side by side."""


class Effect(NamedTuple):
    """A change, what it gives with each seed in points, their mean, and half the width of its interval if it has one."""

    label: str
    seeds: Sequence[float]
    mean: float
    half_width: float | None


class Panel(NamedTuple):
    """One small panel: its curves, and by their labels the places on the x axis where runs ended."""

    title: str
    curves: Sequence[Curve]
    ended: Mapping[str, Sequence[float]]


@matplotlib.rc_context(STYLE)
def by_share(panels: Sequence[Panel], labels: Sequence[str]) -> Figure:
    """Accuracy against the share of attackers, with a band of one standard deviation on each side.

    A cross at the bottom is a run that ended. `labels` decides the colours.
    """
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(WIDTH * max(across, 2) / ACROSS, 0.7 + 2.0 * down), dpi=100, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_visible(False)
        else:
            _draw(axes, panel, labels)
    _axes(figure.axes[0], panels)
    figure.supxlabel("share of attackers", fontsize=STYLE["font.size"])
    figure.supylabel("test accuracy", fontsize=STYLE["font.size"])
    figure.legend([_line(i, label) for i, label in enumerate(labels)], labels, loc="outside upper left", ncols=len(labels))
    return figure


@matplotlib.rc_context(STYLE)
def effects(groups: Sequence[tuple[str, Sequence[Effect]]]) -> Figure:
    """What changes give, the best at the top: a panel per group, with the name of what is changed above it.

    Small points are single seeds. Intervals that exclude zero are coloured; a hollow point has no interval.
    """
    rows = [max(len(changes), 3) for _, changes in groups]
    figure = Figure(figsize=(WIDTH, 0.5 + 0.6 * len(groups) + 0.24 * sum(rows)), dpi=100, layout="constrained")
    columns = figure.subplots(len(groups), 1, squeeze=False, height_ratios=rows)
    for (title, changes), axes in zip(groups, columns[:, 0], strict=True):
        ordered = sorted(changes, key=lambda change: -change.mean)
        for place, change in enumerate(ordered):
            _draw_effect(axes, place, change)
        axes.axvline(0, color=GREY, linestyle=DASHES[1], linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(ordered)), [change.label for change in ordered])
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.grid(True, axis="x")
        axes.set_title(title)
    columns[-1, 0].set_xlabel("difference in points, with its 95 % interval")
    return figure


def _draw_effect(axes: Axes, place: int, change: Effect) -> None:
    certain = change.half_width is not None and abs(change.mean) > change.half_width
    colour = COLOURS[change.mean < 0] if certain else GREY
    face = colour if change.half_width is not None else "white"
    axes.plot(change.seeds, [place] * len(change.seeds), color=colour, linestyle="", marker="o", markersize=3, alpha=0.5)
    width = change.half_width
    axes.errorbar(
        change.mean, place, xerr=width, fmt="o", color=colour, markerfacecolor=face, markersize=6, capsize=3, linewidth=1.3
    )


def _draw(axes: Axes, panel: Panel, labels: Sequence[str]) -> None:
    axes.set_title(panel.title)
    axes.grid(True)
    axes.tick_params(labelbottom=True, labelsize=8.5)  # below each panel: the one under it may be missing
    for curve in panel.curves:
        number = labels.index(curve.label)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(curve.xs, curve.ys, color=colour, linestyle=DASHES[number % len(DASHES)], marker="o", markersize=4)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.xs, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
        if ended := panel.ended.get(curve.label):
            axes.plot(ended, [0.0] * len(ended), color=colour, linestyle="", marker="x", clip_on=False)


def _axes(axes: Axes, panels: Sequence[Panel]) -> None:
    """Set the axes that all panels share: ticks where there are points."""
    drawn = [x for panel in panels for curve in panel.curves for x in curve.xs]
    ended = [x for panel in panels for xs in panel.ended.values() for x in xs]
    axes.set_xticks(sorted({*drawn, *ended}))
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _line(number: int, label: str) -> Line2D:
    style = DASHES[number % len(DASHES)]
    return Line2D([], [], color=COLOURS[number % len(COLOURS)], linestyle=style, marker="o", markersize=4, label=label)
