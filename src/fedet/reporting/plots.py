"""Figures of a run or a comparison: data in, a matplotlib Figure out; the same data always gives the same file."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import ArrayLike

from fedet.reporting.results import si
from fedet.storage.files import replacing

MOST_CLIENTS, MOST_LEADERS = 200, 30
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")  # Okabe and Ito's, no yellow
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1.2, 1.5)), (0, (1.8, 1.2)))
INK, GREY, FAINT = "#22262b", "#6b737c", "#d9dde2"
WIDTH = 9.0
STYLE: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": "#8a929b",
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


@matplotlib.rc_context(STYLE)
def accuracy(
    curves: Sequence[Curve],
    x: Literal["round", "params"] = "round",
    bold: str | None = None,
    levels: Sequence[Level] = (),
) -> Figure:
    """Accuracy against rounds or parameters sent; the curve named `bold`, if any, is emphasised."""
    figure, (axes,) = _figure(4.2)
    for i, curve in enumerate(Curve(*c) for c in curves):
        colour, main = COLOURS[i % len(COLOURS)], bold is None or curve.label == bold
        style: dict[str, Any] = {"linewidth": 2.6 if curve.label == bold else 1.8 if main else 1.5, "zorder": 4 if main else 3}
        if len(curve.xs) == 1:
            style |= {"marker": "o", "markersize": 5}
        dash = DASHES[(i // len(COLOURS)) % len(DASHES)] if bold is None else DASHES[0 if main else 1 + (i - 1) % 3]
        axes.plot(curve.xs, curve.ys, color=colour, linestyle=dash, label=_text(curve.label), **style)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.xs, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    _amounts(axes, x)
    for level in levels:
        axes.axhline(level.y, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=2)
    _shares(axes)
    _label_levels(axes, levels)
    axes.grid(True)
    if curves:
        figure.legend(loc="outside upper left", ncols=_columns([c[0] for c in curves]), handlelength=2.6)
    return figure


@matplotlib.rc_context(STYLE)
def bars(labels: Sequence[str], means: Sequence[float], errors: Sequence[float | None]) -> Figure:
    """Best accuracy of each method, with the standard deviation over seeds where there is one."""
    figure, (axes,) = _figure(0.9 + 0.38 * len(labels))
    places = np.arange(len(labels))
    axes.barh(places, means, color=[COLOURS[i % len(COLOURS)] for i in places], height=0.62, alpha=0.85)
    for place, mean, error in zip(places, means, errors, strict=True):
        if error is not None:
            axes.errorbar(mean, place, xerr=error, color=INK, capsize=3, linewidth=1.2)
        axes.annotate(
            f"{100 * mean:.1f}", (mean + (error or 0), place), (6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(places, [_text(label) for label in labels])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([m + (e or 0) for m, e in zip(means, errors, strict=True)], default=1) or 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_xlabel("best accuracy")
    axes.grid(True, axis="x")
    return figure


@matplotlib.rc_context(STYLE)
def distribution(label_counts: ArrayLike, archs: Sequence[str] | None = None, title: str | None = None) -> Figure:
    """The clients' data: a circle per client and label, its area the number of examples, its colour the architecture."""
    counts = np.asarray(label_counts)[:MOST_CLIENTS]
    clients, labels = counts.shape
    height = float(np.clip(1.3 + 0.24 * labels, 3.0, 8.5))
    figure, (axes,) = _figure(height)
    across, up = 72 * (WIDTH - 2.4) / max(clients, 1), 72 * (height - 1.1) / max(labels, 1)
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
    _circle_legends(axes, shade, most, area)
    cut = (
        f"the first {MOST_CLIENTS} of {len(np.asarray(label_counts)):,} clients"
        if len(np.asarray(label_counts)) > clients
        else ""
    )
    axes.set_title(": ".join(part for part in (title, cut) if part))
    return figure


@matplotlib.rc_context(STYLE)
def confidence(matrix: ArrayLike, clients: Sequence[int], labels: Sequence[str | int]) -> Figure:
    """Mean weight in the consensus per client (row) and class (column); grey where the consensus never chose the class."""
    values = np.ma.masked_invalid(np.asarray(matrix, dtype=float)[:MOST_LEADERS])
    shown = list(clients[:MOST_LEADERS])
    figure, (axes,) = _figure(1.3 + 0.19 * max(len(shown), 6))
    axes.set_facecolor("#ececec")
    image = axes.pcolormesh(values, cmap="Blues", vmin=0, vmax=max(float(values.max()), 1e-9) if values.count() else 1)
    image.set(edgecolor="white", linewidth=0.6 if len(labels) <= 30 else 0.15)
    step = max(1, -(-len(labels) // 25))
    axes.set_xticks(np.arange(0, len(labels), step) + 0.5, [_text(str(name)) for name in labels[::step]])
    axes.set_yticks(np.arange(len(shown)) + 0.5, [str(k) for k in shown], fontsize=8.5)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="class of the consensus label", ylabel="client, strongest first")
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=28, label="mean weight")
    bar.outline.set_visible(False)
    return figure


@matplotlib.rc_context(STYLE)
def traffic(rounds: Sequence[int], up: Sequence[float], down: Sequence[float]) -> Figure:
    """Parameters sent up and down, per round and cumulative."""
    figure, panels = _figure(3.4, 2)
    for axes, title in zip(panels, ("per round", "cumulative"), strict=True):
        for colour, dash, label, sent in (
            (COLOURS[0], "-", "down, to the clients", down),
            (COLOURS[1], "--", "up, to the server", up),
        ):
            marker = "o" if len(rounds) == 1 else None
            shown = np.cumsum(sent) if title == "cumulative" else sent
            axes.plot(rounds, shown, color=colour, linestyle=dash, label=label, linewidth=1.8, marker=marker)
        axes.set_title(title)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        _amounts(axes, "round")
        axes.grid(True)
    panels[0].set_ylabel("parameters")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, handlelength=2.6)
    return figure


def save(figure: Figure, folder: str | os.PathLike[str], name: str) -> str:
    """Write `name`.png and `name`.svg into the folder, each atomically, and return the SVG's text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        if engine := figure.get_layout_engine():  # once, because each savefig would repeat the layout and an extra drawing
            engine.execute(figure)
            figure.set_layout_engine(None)
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    text = svg(figure)
    for path, content in ((folder / f"{name}.png", png.getvalue()), (folder / f"{name}.svg", text.encode())):
        with replacing(path) as draft:
            draft.write_bytes(content)
    return text


def inline_svg(text: str) -> str:
    """A figure's SVG as an element of a page, with unique ids and a style sheet that applies to nothing else on the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text, count=2)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
    own = "f" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest() + "-"
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{own}", text)
    return text.replace("*{stroke", f"#{own}figure_1 *{{stroke", 1)


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG file; the same figure always gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, dpi=120)
    return out.getvalue()


@matplotlib.rc_context(STYLE)
def bound(clients: Sequence[dict[str, Any]]) -> Figure:
    """The clients' weights against their bounds, coloured by architecture; larger circles have more examples."""
    figure, (axes,) = _figure(4.2)
    for i, arch in enumerate(sorted({c["arch"] for c in clients})):
        own = [c for c in clients if c["arch"] == arch]
        sizes = [12 + 2 * c["examples"] ** 0.5 for c in own]
        place = [c["total"] for c in own], [c["weight"] for c in own]
        axes.scatter(*place, s=sizes, color=COLOURS[i % len(COLOURS)], alpha=0.75, linewidths=0, label=_text(arch))
    axes.axhline(1, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=1)
    axes.set(xlabel="the client's bound on the error (Theorem 1)", ylabel="weight in the consensus (1: mean)")
    axes.set_ylim(bottom=0)
    axes.grid(True)
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@matplotlib.rc_context(STYLE)
def audit(attacks: Sequence[dict[str, Any]]) -> Figure:
    """The attacks' true against false positive rates, on logarithmic axes: what counts is how many are found almost surely."""
    figure, (axes,) = _figure(4.2)
    for i, a in enumerate(attacks):
        points = [(x, y) for x, y in a["roc"] if x > 0 and y > 0]
        label = _text(f"{a['target']}, {a['attack']}: AUC {a['auc']:.2f}")
        axes.plot([x for x, _ in points], [y for _, y in points], color=COLOURS[i % len(COLOURS)], label=label)
    low = min((x for a in attacks for x, _ in a["roc"] if x > 0), default=0.001)
    axes.plot([low, 1], [low, 1], color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(low, 1), xlabel="false positives", ylabel="true positives")
    axes.grid(True)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _figure(height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, panels, i + 1) for i in range(panels)]


def _text(label: str) -> str:
    """Make a label safe: matplotlib hides labels that begin with an underscore, and control characters would break the SVG."""
    clean = "".join(c if c.isprintable() else " " for c in label)
    return f" {clean}" if clean.startswith("_") else clean


def _shares(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 1.005))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
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


def _label_levels(axes: Axes, levels: Sequence[Level]) -> None:
    """Name each level at the right edge; labels that would overlap are moved apart."""
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


def _columns(labels: Sequence[str]) -> int:
    """The number of legend columns: as many as fit the figure's width, then as few as the same number of rows needs."""
    if sum(0.75 + 0.078 * len(label) for label in labels) < WIDTH - 0.3:
        return len(labels)
    fit = max(1, int((WIDTH - 0.3) / (0.6 + 0.078 * max(map(len, labels)))))
    rows = -(-len(labels) // fit)
    return -(-len(labels) // rows)


def _circle_legends(axes: Axes, shade: dict[str, str], most: int, area: float) -> None:
    def dot(colour: str, size: float) -> Line2D:
        return Line2D([], [], linestyle="", marker="o", color=colour, alpha=0.62, markersize=size, markeredgewidth=0)

    largest = float(np.sqrt(area * _round_number(most))) / STYLE["legend.fontsize"]
    sizes = sorted({_round_number(most * part) for part in (1, 0.3, 0.08)})
    circles = axes.legend(
        [dot("#555b62", float(np.sqrt(area * size))) for size in sizes],
        [f"{size:,}" for size in sizes],
        title="examples", loc="upper left", bbox_to_anchor=(1.01, 1.02), alignment="left", borderpad=0.6,
        labelspacing=max(0.6, 0.55 * largest), handlelength=max(1.6, largest),
    )  # fmt: skip
    if shade:
        axes.add_artist(circles)
        axes.legend(
            [dot(colour, 8) for colour in shade.values()], [_text(name) for name in shade],
            title="architecture", loc="lower left", bbox_to_anchor=(1.01, -0.02), alignment="left", handletextpad=0.3,
        )  # fmt: skip


def _round_number(value: float) -> int:
    power = 10 ** int(np.floor(np.log10(max(value, 1))))
    return int(max(m * power for m in (1, 2, 5) if m * power <= max(value, 1)))
