"""The results of a search: its page with a picture per method, a CSV file, and the best configuration of each method."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedet.reporting import figure_files, plots
from fedet.storage.files import write_text
from fedet.study import sweep as searching
from fedet.study.pages import environment
from fedet.study.sweep import Score, Sweep
from fedet.study.tables import NOT_RUN, Table


def write(sweep: Sweep, scores: Sequence[Score], folder: Path, title: str) -> dict[str, Path]:
    """Write sweep.html, trials.csv and best-METHOD.toml into a folder; returns the page and the configurations."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "trials.csv", to_csv(sweep, scores))
    figures = []
    for method in sweep.methods():
        figure = picture([found for found in scores if found.trial.method == method])
        if figure is not None:
            name = f"sweep-{_word(method)}"
            figures.append((name, method, Markup(figure_files.inline_svg(figure_files.save(figure, folder / "plots", name)))))
    page = environment().get_template("sweep.html.j2")
    text = page.render(title=title, main=table(sweep, scores), figures=figures, sweep=sweep)
    write_text(folder / "sweep.html", text)
    return {"report": folder / "sweep.html"} | _best(sweep, scores, folder)


def table(sweep: Sweep, scores: Sequence[Score]) -> Table:
    """One row per trial, each method's best first."""
    keys = _keys(scores)
    body, bold = [], set()
    for row, found in enumerate(scores):
        chosen = searching.best(scores, found.trial.method)
        if chosen == found.trial:
            bold.add((row, len(keys) + 2))
        setting = [_text(found.trial.setting.get(key)) for key in keys]
        body.append([found.trial.method, str(found.trial.number), *setting, _score(found), str(found.rounds)])
    head = ["method", "trial", *(key.removeprefix("method.") for key in keys), "validation accuracy, %", "rounds"]
    return Table(head, body, frozenset(bold))


def to_csv(sweep: Sweep, scores: Sequence[Score]) -> str:
    """The trials with all digits."""
    keys, out = _keys(scores), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "trial", *keys, "val_accuracy", "val_accuracy_std", "seeds", "rounds"])
    for found in scores:
        value = [found.value.mean, found.value.std, found.value.n] if found.value else ["", "", len(sweep.seeds)]
        setting = [found.trial.setting.get(key) for key in keys]
        writer.writerow([found.trial.method, found.trial.number, *setting, *value, found.rounds])
    return out.getvalue()


def picture(scores: Sequence[Score]) -> Figure | None:
    """A heat map for two keys, parallel coordinates for any other number; None if no trial has a score."""
    known = [found for found in scores if found.value is not None]
    if not known:
        return None
    keys = _keys(scores)
    return heat_map(known, *keys) if len(keys) == 2 else parallel_coordinates(known, keys)


@matplotlib.rc_context(plots.STYLE)
def heat_map(scores: Sequence[Score], across: str, up: str) -> Figure:
    """Validation accuracy by the values of two keys; a cell without a trial is grey."""
    xs, ys = _levels(scores, across), _levels(scores, up)
    grid = np.full((len(ys), len(xs)), np.nan)
    for found in scores:
        if found.value is not None:
            grid[ys.index(found.trial.setting[up]), xs.index(found.trial.setting[across])] = found.value.mean
    figure, axes = _figure(1.6 + 0.45 * len(ys))
    axes.set_facecolor("#ececec")
    image = axes.pcolormesh(np.ma.masked_invalid(grid), cmap="Blues")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            colour = "white" if value > middle else plots.INK
            axes.text(column + 0.5, row + 0.5, f"{100 * value:.1f}", ha="center", va="center", color=colour)
    axes.set_xticks(np.arange(len(xs)) + 0.5, [_text(x) for x in xs])
    axes.set_yticks(np.arange(len(ys)) + 0.5, [_text(y) for y in ys])
    axes.set(xlabel=across, ylabel=up)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, pad=0.015, label="validation accuracy").outline.set_visible(False)
    return figure


@matplotlib.rc_context(plots.STYLE)
def parallel_coordinates(scores: Sequence[Score], keys: Sequence[str]) -> Figure:
    """One line per trial through its values, the last axis being its validation accuracy; the best one is bold."""
    figure, axes = _figure(4.2)
    means = [found.value.mean for found in scores if found.value is not None]
    low, high = min(means), max(means)
    levels = {key: _levels(scores, key) for key in keys}
    order = sorted((found for found in scores if found.value is not None), key=lambda found: found.value.mean)  # type: ignore[union-attr]
    for found in order:
        assert found.value is not None
        share = (found.value.mean - low) / (high - low) if high > low else 1.0
        heights = [_height(levels[key].index(found.trial.setting[key]), len(levels[key])) for key in keys]
        best = found is order[-1]
        style: dict[str, Any] = {"linewidth": 2.6 if best else 1.4, "alpha": 1.0 if best else 0.75}
        axes.plot([*heights, share], color=matplotlib.colormaps["viridis"](share), **style)
    for position, key in enumerate(keys):
        for place, value in enumerate(levels[key]):
            height = _height(place, len(levels[key]))
            axes.annotate(_text(value), (position, height), (4, 3), textcoords="offset points", fontsize=8.5)
    for share, value in ((0.0, low), (1.0, high)):
        axes.annotate(f"{100 * value:.1f}%", (len(keys), share), (4, 3), textcoords="offset points", fontsize=8.5)
    axes.set_xticks(range(len(keys) + 1), [*(key.removeprefix("method.") for key in keys), "validation accuracy"])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(keys) + 0.35)
    axes.grid(True, axis="x")
    axes.spines[:].set_visible(False)
    return figure


def _figure(height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(plots.WIDTH, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _best(sweep: Sweep, scores: Sequence[Score], folder: Path) -> dict[str, Path]:
    out = {}
    for method in sweep.methods():
        chosen = searching.best(scores, method)
        if chosen is not None:
            out[method] = folder / f"best-{_word(method)}.toml"
            write_text(out[method], sweep.config(chosen).to_toml())
    return out


def _score(found: Score) -> str:
    if found.missing:
        return NOT_RUN
    if found.value is None:
        return "diverged"
    return f"{100 * found.value.mean:.2f}" + (f" ± {100 * found.value.std:.2f}" if found.value.std is not None else "")


def _keys(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(key for found in scores for key in found.trial.setting))


def _levels(scores: Sequence[Score], key: str) -> list[Any]:
    """The values of a key, in ascending order where they have one."""
    found = [score.trial.setting[key] for score in scores]
    unique = [value for place, value in enumerate(found) if value not in found[:place]]
    numbers = all(isinstance(value, int | float) for value in unique)
    return sorted(unique) if numbers else unique


def _height(place: int, count: int) -> float:
    return place / (count - 1) if count > 1 else 0.5


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _word(method: str) -> str:
    return method.rpartition(":")[2]
