"""Figures of a run or a comparison: data in, a matplotlib Figure out; the same data always gives the same file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from fedet.reporting.curves import Curve, Level
from fedet.reporting.results import si

MOST_CLIENTS, MOST_LEADERS = 200, 30
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87F00", "#3A93C8", "#7F7F7F", "#000000")
"""Okabe and Ito's, without yellow, and with orange and sky blue so dark that they can be seen on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1.2, 1.5)), (0, (1.8, 1.2)))
INK, GREY, FAINT, EDGE = "#22262b", "#6b737c", "#d9dde2", "#8a929b"
WIDTH, NARROW = 9.0, 4.4
"""Inches; a page shows the narrow variant of a figure where the wide one would be too small to read."""
STYLE: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedet",
}


@matplotlib.rc_context(STYLE)
def accuracy(
    curves: Sequence[Curve],
    x: Literal["round", "params"] = "round",
    bold: str | None = None,
    levels: Sequence[Level] = (),
    *,
    late: bool = False,
    width: float = WIDTH,
) -> Figure:
    """Accuracy against rounds or parameters sent; the curve named `bold`, if any, is emphasised.

    With `late`, a second panel shows the second half on a scale of its own, if there is enough of it.
    """
    curves = [Curve(*curve) for curve in curves]
    middle = _middle(curves) if late else None
    narrow = width < WIDTH
    figure, panels = _figure(4.2 if not narrow else 3.4 if middle is None else 5.6, 1 if middle is None else 2, width)
    for axes in panels:
        _draw_curves(axes, curves, bold, width)
        _amounts(axes, x)
        axes.grid(True)
    if middle is not None:
        _zoom(panels[1], curves, middle)
        panels[1].set_title("second half")
    for axes in panels:
        low, high = axes.get_ylim()
        shown = [level for level in levels if axes is panels[0] or low <= level.y <= high]
        for level in shown:
            axes.axhline(level.y, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=2)
        _shares(axes)
        if axes is panels[-1] and not narrow:  # a narrow figure has no room for names, its caption does
            _label_levels(axes, shown)
    if middle is not None and not narrow:
        _label_levels(panels[0], [level for level in levels if level not in shown], inside=True)
        panels[1].set_ylabel("")
    if curves:
        columns = _columns([_text(curve.label, width) for curve in curves], width)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=2.6)
    return figure


def _draw_curves(axes: Axes, curves: Sequence[Curve], bold: str | None, width: float) -> None:
    for i, curve in enumerate(curves):
        colour, main = COLOURS[i % len(COLOURS)], bold is None or curve.label == bold
        style: dict[str, Any] = {"linewidth": 2.6 if curve.label == bold else 1.8 if main else 1.5, "zorder": 4 if main else 3}
        if len(curve.xs) == 1:
            style |= {"marker": "o", "markersize": 5}
        dash = DASHES[(i // len(COLOURS)) % len(DASHES)] if bold is None else DASHES[0 if main else 1 + (i - 1) % 3]
        axes.plot(curve.xs, curve.ys, color=colour, linestyle=dash, label=_text(curve.label, width), **style)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.xs, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)


def _middle(curves: Sequence[Curve]) -> float | None:
    """Where the second half of the axis begins; None if no curve has five points there."""
    xs = [x for curve in curves for x in curve.xs]
    middle = (min(xs) + max(xs)) / 2 if xs else 0.0
    return middle if any(sum(x >= middle for x in curve.xs) >= 5 for curve in curves) else None


def _zoom(axes: Axes, curves: Sequence[Curve], start: float) -> None:
    """Show what is from here on, on a scale that fits it."""
    parts = [(curve.xs, values) for curve in curves for values in (curve.ys, curve.low, curve.high) if values is not None]
    ys = [y for xs, values in parts for x, y in zip(xs, values, strict=True) if x >= start]
    low, high = min(ys), max(ys)
    pad = max(0.08 * (high - low), 0.005)
    axes.set_xlim(start, max(x for curve in curves for x in curve.xs))
    axes.set_ylim(low - pad, high + pad)


@matplotlib.rc_context(STYLE)
def points(labels: Sequence[str], means: Sequence[float], errors: Sequence[float | None], *, width: float = WIDTH) -> Figure:
    """Best accuracy of each method, with the standard deviation over seeds where there is one."""
    figure, (axes,) = _figure(0.9 + 0.36 * len(labels), 1, width)
    for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        axes.errorbar(mean, place, xerr=error, fmt="o", color=colour, markersize=7, capsize=4, linewidth=1.8)
        axes.annotate(f"{100 * mean:.1f}", (mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set_yticks(range(len(labels)), [_text(label, width) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.8)
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(5 if width < WIDTH else 9))
    axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    axes.set_xlabel("best accuracy")
    axes.grid(True, axis="x")
    return figure


@matplotlib.rc_context(STYLE)
def distribution(
    label_counts: ArrayLike, archs: Sequence[str] | None = None, title: str | None = None, *, width: float = WIDTH
) -> Figure:
    """The clients' data: a circle per client and label, its area the number of examples, its colour the architecture."""
    counts = np.asarray(label_counts)[:MOST_CLIENTS]
    clients, labels = counts.shape
    height = float(np.clip(1.3 + 0.24 * labels, 3.0, 8.5))
    figure, (axes,) = _figure(height, 1, width)
    across, up = 72 * (width - (2.4 if width == WIDTH else 1.0)) / max(clients, 1), 72 * (height - 1.1) / max(labels, 1)
    most = max(int(counts.max(initial=1)), 1)
    area = min(1.9 * (across * up) ** 0.5, 1.8 * up, 44) ** 2 / most  # the largest circles touch their neighbours
    who, what = np.nonzero(counts)
    names = sorted(set(map(str, archs[:clients]))) if archs is not None else []
    shade = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    face = [shade[str(archs[int(k)])] for k in who] if archs is not None else COLOURS[0]
    axes.scatter(
        who, what, s=area * counts[who, what], c=face, alpha=0.62, linewidths=0, rasterized=len(who) > 1500, clip_on=False
    )
    axes.set(xlim=(-0.9, clients - 0.1), ylim=(-0.9, labels - 0.1), xlabel="client", ylabel="label")
    _whole(axes, clients, labels)
    axes.grid(True, linewidth=0.5)
    if width == WIDTH:
        _circle_legends(axes, shade, most, area)
    elif shade:
        dots = [_dot(colour, 7) for colour in shade.values()]
        names = [_text(name, width) for name in shade]
        figure.legend(dots, names, loc="outside lower left", ncols=_columns(names, width))
    cut = (
        f"the first {MOST_CLIENTS} of {len(np.asarray(label_counts)):,} clients"
        if len(np.asarray(label_counts)) > clients
        else ""
    )
    axes.set_title(": ".join(part for part in (title, cut) if part))
    return figure


@matplotlib.rc_context(STYLE)
def confidence(
    matrix: ArrayLike,
    clients: Sequence[int],
    labels: Sequence[str | int],
    even: float,
    archs: Sequence[str] | None = None,
    *,
    width: float = WIDTH,
) -> Figure:
    """Mean weight in the consensus per client (row) and class (column), relative to an equal share.

    Orange is more than an equal share, blue is less, and grey means that the consensus never chose the class.
    """
    values = np.ma.masked_invalid(np.asarray(matrix, dtype=float)[:MOST_LEADERS])
    shown = list(clients[:MOST_LEADERS])
    figure, (axes,) = _figure(1.3 + 0.19 * max(len(shown), 6), 1, width)
    never = np.ma.masked_where(~np.ma.getmaskarray(values), np.zeros(values.shape))
    image = axes.pcolormesh(np.ma.log2(np.ma.maximum(values, even / 64) / even), cmap=_AROUND, vmin=-1, vmax=1)
    for cells in (image, axes.pcolormesh(never, cmap=ListedColormap([FAINT]))):
        cells.set(edgecolor="white", linewidth=0.6 if len(labels) <= 30 else 0.15)
    step = max(1, -(-len(labels) // (25 if width == WIDTH else 10)))
    axes.set_xticks(np.arange(0, len(labels), step) + 0.5, [_text(str(name)) for name in labels[::step]])
    names = [_text(f"{k}  {archs[k]}", width) if archs is not None and k < len(archs) else str(k) for k in shown]
    axes.set_yticks(np.arange(len(shown)) + 0.5, names, fontsize=8.5 if width == WIDTH else 7.5)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="class of the consensus label", ylabel="client, strongest first")
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=28, ticks=_OCTAVES)
    bar.ax.set_yticklabels([f"{2**octave * even:.3f}" for octave in _OCTAVES])
    bar.set_label("mean weight" if width < WIDTH else f"mean weight; an equal share is {even:.2f}")
    bar.outline.set_visible(False)
    return figure


_AROUND = LinearSegmentedColormap.from_list("around", [(0, 0.447, 0.698, 0.9), (0.5, 0.5, 0.5, 0.04), (0.835, 0.369, 0, 0.9)])
"""Blue, nothing, orange; the background shows through, so that it suits a light and a dark page."""


_OCTAVES = (-1, -0.5, 0, 0.5, 1)


@matplotlib.rc_context(STYLE)
def bound(clients: Sequence[dict[str, Any]], width: float = WIDTH) -> Figure:
    """The clients' weights against their bounds, coloured by architecture; larger circles have more examples."""
    figure, (axes,) = _figure(4.2, width=width)
    for i, arch in enumerate(sorted({c["arch"] for c in clients})):
        own = [c for c in clients if c["arch"] == arch]
        sizes = [12 + 2 * c["examples"] ** 0.5 for c in own]
        place = [c["total"] for c in own], [c["weight"] for c in own]
        axes.scatter(*place, s=sizes, color=COLOURS[i % len(COLOURS)], alpha=0.75, linewidths=0, label=_text(arch, width))
    axes.axhline(1, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=1)
    axes.set(xlabel="the client's bound on the error (Theorem 1)", ylabel="weight in the consensus (1: mean)")
    axes.set_ylim(bottom=0)
    axes.grid(True)
    figure.legend(loc="outside upper left", ncols=3 if width == WIDTH else 1)
    return figure


@matplotlib.rc_context(STYLE)
def audit(attacks: Sequence[dict[str, Any]], width: float = WIDTH) -> Figure:
    """The attacks' true against false positive rates, on logarithmic axes: what counts is how many are found almost surely."""
    figure, (axes,) = _figure(4.2, width=width)
    for i, a in enumerate(attacks):
        points = [(x, y) for x, y in a["roc"] if x > 0 and y > 0]
        label = _text(f"{a['target']}, {a['attack']}: AUC {a['auc']:.2f}", width)
        axes.plot([x for x, _ in points], [y for _, y in points], color=COLOURS[i % len(COLOURS)], label=label)
    low = min((x for a in attacks for x, _ in a["roc"] if x > 0), default=0.001)
    axes.plot([low, 1], [low, 1], color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(low, 1), xlabel="false positives", ylabel="true positives")
    axes.grid(True)
    figure.legend(loc="outside upper left", ncols=2 if width == WIDTH else 1)
    return figure


class NotebookFigure(Figure):
    """A figure that a notebook shows; of matplotlib's own it shows those that pyplot made."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def _figure(height: float, panels: int = 1, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """A figure whose panels are side by side, or one below the other if it is narrow."""
    figure = NotebookFigure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    rows, columns = (1, panels) if width == WIDTH else (panels, 1)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def _text(label: str, width: float = WIDTH) -> str:
    """Make a label safe and short: matplotlib hides those that begin with an underscore, control characters break the SVG."""
    clean = "".join(c if c.isprintable() else " " for c in label)
    most = 80 if width == WIDTH else 26
    clean = clean if len(clean) <= most else f"{clean[: most // 2]}…{clean[1 - most // 2 :]}"
    return f" {clean}" if clean.startswith("_") else clean


def _percent(value: float, _: int | None) -> str:
    return f"{round(100 * value, 4):g}%"  # matplotlib's own has 90.0% where the axis is short


def _shares(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 1.005))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.set_ylabel("test accuracy")


def _amounts(axes: Axes, x: str) -> None:
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel("round")
    else:
        ends = [float(np.max(line.get_xdata())) for line in axes.lines if np.size(line.get_xdata())]
        if ends and max(ends) > 10 * min(ends) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        axes.set_xlabel("parameters sent, up and down")


def _label_levels(axes: Axes, levels: Sequence[Level], inside: bool = False) -> None:
    """Name each level at the right edge, or inside of it just above the line; labels that would overlap are moved apart."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    ys = [level.y for level in sorted(levels, key=lambda level: level.y)]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + gap)
    ys = [y - max(0.0, ys[-1] - high) for y in ys]
    for i in reversed(range(len(ys) - 1)):
        ys[i] = min(ys[i], ys[i + 1] - gap)
    across = axes.get_yaxis_transform()  # x as a fraction of the width
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    for level, y in zip(sorted(levels, key=lambda level: level.y), ys, strict=True):
        if inside:
            text = f"{_text(level.label)} {100 * level.y:.1f}%"
            axes.text(0.985, y, text, transform=across, va="bottom", ha="right", color=GREY, fontsize=9)
            continue
        axes.annotate(
            f"{_text(level.label)} {100 * level.y:.1f}%", (1, level.y), (1.015, y), xycoords=across, textcoords=across,
            va="center", color=GREY, fontsize=9, arrowprops=line, annotation_clip=False,
        )  # fmt: skip


def _whole(axes: Axes, clients: int, labels: int) -> None:
    for axis, count in ((axes.xaxis, clients), (axes.yaxis, labels)):
        if count <= 12:
            axis.set_ticks(range(count))
        else:
            axis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10]))


def _columns(labels: Sequence[str], width: float = WIDTH) -> int:
    """The number of legend columns: as many as fit the figure's width, then as few as the same number of rows needs."""
    if sum(0.75 + 0.078 * len(label) for label in labels) < width - 0.3:
        return len(labels)
    fit = max(1, int((width - 0.3) / (0.6 + 0.078 * max(map(len, labels)))))
    rows = -(-len(labels) // fit)
    return -(-len(labels) // rows)


def _dot(colour: str, size: float) -> Line2D:
    return Line2D([], [], linestyle="", marker="o", color=colour, alpha=0.62, markersize=size, markeredgewidth=0)


def _circle_legends(axes: Axes, shade: dict[str, str], most: int, area: float) -> None:
    largest = float(np.sqrt(area * _round_number(most))) / STYLE["legend.fontsize"]
    sizes = sorted({_round_number(most * part) for part in (1, 0.3, 0.08)})
    circles = axes.legend(
        [_dot(GREY, float(np.sqrt(area * size))) for size in sizes],
        [f"{size:,}" for size in sizes],
        title="examples", loc="upper left", bbox_to_anchor=(1.01, 1.02), alignment="left", borderpad=0.6,
        labelspacing=max(0.6, 0.55 * largest), handlelength=max(1.6, largest),
    )  # fmt: skip
    if shade:
        axes.add_artist(circles)
        axes.legend(
            [_dot(colour, 8) for colour in shade.values()], [_text(name) for name in shade],
            title="architecture", loc="lower left", bbox_to_anchor=(1.01, -0.02), alignment="left", handletextpad=0.3,
        )  # fmt: skip


def _round_number(value: float) -> int:
    power = 10 ** int(np.floor(np.log10(max(value, 1))))
    return int(max(m * power for m in (1, 2, 5) if m * power <= max(value, 1)))
