"""Reports: one self-contained HTML page and its figures, made from run folders alone."""

from __future__ import annotations

import math
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedet.errors import FedetError
from fedet.models.text import notice
from fedet.reporting import plots, results
from fedet.reporting.plots import Curve
from fedet.reporting.results import Plain, RunRecord, comparison_rows, read_run, si
from fedet.storage.files import replacing, write_text

__all__ = ["RunRecord", "comparison_rows", "read_run", "write_comparison", "write_run"]

MOST_FAILURES = 200
STOPPED = {
    "rounds": "all rounds done",
    "budget_params": "stopped: parameter budget spent",
    "budget_seconds": "stopped: time budget spent",
    "target_accuracy": "stopped: target accuracy reached",
    "patience": "stopped: no more progress",
}


def write_run(folder: str | os.PathLike[str]) -> Path:
    """Write report.html and plots/ into a run folder, of an unfinished run as far as it got."""
    run = read_run(folder)
    numbers, led = results.summary(run), results.leaders(run)
    figures = _publish(_run_figures(run, led), run.folder)
    context = {
        "title": f"{run.method} on {_data(run)}, seed {run.seed}",
        "run": run,
        "stopped": STOPPED.get(str(run.result.get("stopped")), str(run.result.get("stopped"))),
        "planned": run.config.get("run", {}).get("rounds"),
        "numbers": numbers,
        "saving": _saving(numbers),
        "sentence": _sentence(run),
        "notices": _notices([run]),
        "models": _models(run),
        "holdings": _holdings(run.split),
        "led": _led(run, led) if led else None,
        **_failures(run),
        "commands": _commands([run]) or ["fedet run config.toml"],
        "versions": {key: _plain(value) for key, value in run.env.items() if key not in ("command", "pid")},
    }
    return _render("report.html.j2", run.folder, {**context, **figures})


def write_comparison(folder: str | os.PathLike[str], runs: Sequence[RunRecord]) -> Path:
    """Write report.html, plots/, table.csv and table.tex on several runs; those that differ only by seed make one row."""
    if not runs:
        raise FedetError("there is nothing to compare: give at least one run folder")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, groups = comparison_rows(runs), results.grouped(runs)
    figures = _publish(_comparison_figures(rows, groups), folder)
    write_text(folder / "table.csv", results.to_csv(rows))
    write_text(folder / "table.tex", results.to_tex(rows))
    head, body = results.table(rows)
    best = max((row["best_accuracy"] for row in rows if row["best_accuracy"] is not None), default=None)
    context = {
        "title": f"Comparison on {', '.join(sorted({_data(run) for run in runs}))}",
        "head": head,
        "body": [(row["best_accuracy"] == best, cells) for row, cells in zip(rows, body, strict=True)],
        "several_seeds": any(row["n"] > 1 for row in rows),
        "unfinished": sum(not run.finished for run in runs),
        "notices": _notices(runs),
        "equal": _equal(runs),
        "links": {label: [(run.seed, _link(run, folder)) for run in group] for label, group in groups.items()},
        "commands": _commands(runs),
    }
    return _render("comparison.html.j2", folder, {**context, **figures})


def _run_figures(run: RunRecord, led: tuple[NDArray[Any], list[int], NDArray[Any]] | None) -> dict[str, Figure]:
    out = {}
    if len(results.evaluated(run)) > 1:  # of one evaluation the table says all
        main = _names(run)[0]
        out["accuracy_rounds"] = plots.accuracy(_run_curves(run, "round"), "round", main)
        out["accuracy_params"] = plots.accuracy(_run_curves(run, "params_total"), "params", main)
    if run.split.get("label_counts") is not None:
        out["distribution"] = plots.distribution(run.split["label_counts"], _archs(run.split))
    if led:
        out["confidence"] = plots.confidence(led[0], led[1], range(led[0].shape[1]))
    if run.metrics:
        up, down = ([m.get(key, 0) for m in run.metrics] for key in ("params_up", "params_down"))
        out["traffic"] = plots.traffic([m["round"] for m in run.metrics], up, down)
    return out


def _comparison_figures(rows: Sequence[Plain], groups: dict[str, list[RunRecord]]) -> dict[str, Figure]:
    scored = [row for row in rows if row["best_accuracy"] is not None]
    if not scored:
        return {}
    kinds: tuple[tuple[str, Literal["round", "params"]], ...] = (("round", "round"), ("params_total", "params"))
    out = {}
    for key, x in kinds:
        out[f"accuracy_{'rounds' if x == 'round' else x}"] = plots.accuracy(
            [_mean_curve(label, group, key) for label, group in groups.items()], x
        )
    columns = ([row[key] for row in scored] for key in ("label", "best_accuracy", "best_accuracy_std"))
    return out | {"best": plots.bars(*columns)}


def _run_curves(run: RunRecord, x: str) -> list[Curve]:
    rounds, curves = results.evaluated(run), []
    for name in _names(run):
        points = [(m[x], _scores(m)[name]) for m in rounds if math.isfinite(_scores(m).get(name, math.nan))]
        if points:
            curves.append(Curve(name, [p[0] for p in points], [p[1] for p in points]))
    return curves


def _mean_curve(label: str, group: Sequence[RunRecord], x: str) -> Curve:
    """Mean over seeds at the rounds that all of them evaluated, with one standard deviation to either side."""
    tables = [{m["round"]: m for m in results.evaluated(run)} for run in group]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    ys = np.array([[table[number]["accuracy"] for table in tables] for number in common]).reshape(-1, len(group))
    xs = [statistics.fmean(table[number][x] for table in tables) for number in common]
    mean = ys.mean(axis=1)
    if len(group) == 1:
        return Curve(label, xs, list(mean))
    std = ys.std(axis=1, ddof=1)
    return Curve(label, xs, list(mean), list(mean - std), list(mean + std))


def _scores(metrics: Plain) -> dict[str, float]:
    return metrics.get("models") or {"server": metrics["accuracy"]}


def _names(run: RunRecord) -> list[str]:
    """Every model that was ever evaluated, the method's output first."""
    return list(dict.fromkeys(name for m in results.evaluated(run) for name in _scores(m)))


def _models(run: RunRecord) -> list[Plain]:
    sizes, large = run.result.get("arch_params") or {}, run.result.get("server")
    rows = []
    for i, curve in enumerate(_run_curves(run, "round")):
        arch = large if i == 0 and curve.label not in sizes else curve.label
        best = int(np.argmax(curve.ys))
        row = {"name": curve.label, "arch": arch if arch != curve.label else None, "size": sizes.get(arch), "main": i == 0}
        rows.append(row | {"final": curve.ys[-1], "best": curve.ys[best], "round": int(curve.xs[best])})
    return rows


def _sentence(run: RunRecord) -> str:
    data, models = run.config.get("data", {}), run.config.get("models", {})
    sizes, cohort = run.result.get("arch_params") or {}, run.config.get("run", {}).get("cohort")
    large = run.result.get("server") or _spec(models.get("server", "a large model"))
    size = f" ({si(sizes[large])} parameters)" if large in sizes else ""
    kind = str(data.get("partition") or "given").replace("dirichlet", "Dirichlet") + " split"
    alpha = f", α = {data['alpha']:g}" if data.get("partition") == "dirichlet" and "alpha" in data else ""
    clients = (data.get("clients") if data.get("clients") != "all" else 0) or len(run.split.get("sizes", [])) or "its"
    small = ", ".join(sorted(set(_archs(run.split) or map(_spec, models.get("clients", [])))))
    own = f"and train models of their own ({small})" if small else "and train models of their own"
    if _large_on_clients(run):
        own = "and train that same model"
    elif not sizes and len(_names(run)) < 2:
        own = "and train on it"  # too early to tell which model
    took_part = f"; {cohort} of them took part in each round" if cohort else ""
    return (
        f"The method {run.method} trained {large}{size} on the server with the help of {clients} clients. They hold the data "
        f"({_data(run)}, {kind}{alpha}), keep it to themselves, {own}{took_part}."
    )


def _notices(runs: Sequence[RunRecord]) -> list[str]:
    found = (notice(run.config.get("models") or {}) for run in runs)
    return list(dict.fromkeys(text for text in found if text))


def _large_on_clients(run: RunRecord) -> bool:
    large = (run.result.get("arch_params") or {}).get(run.result.get("server"))
    if not large:
        return False
    return any(m.get("cohort") and m.get("model_params_down") == large * len(m["cohort"]) for m in run.metrics)


def _saving(numbers: Plain) -> float | None:
    large, total = numbers["large_params"], numbers["params_total"]
    return large / total if large and total and abs(large / total - 1) > 0.02 else None


def _holdings(split: dict[str, NDArray[Any]]) -> Plain | None:
    if "label_counts" not in split:
        return None
    counts, archs = split["label_counts"], _archs(split) or []
    sizes = counts.sum(axis=1)
    return {
        "clients": len(counts), "labels": counts.shape[1], "examples": int(sizes.sum()),
        "least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max()),
        "kinds": float(np.median((counts > 0).sum(axis=1))),
        "archs": [(arch, archs.count(arch), int(sizes[np.array(archs) == arch].sum())) for arch in sorted(set(archs))],
    }  # fmt: skip


def _led(run: RunRecord, led: tuple[NDArray[Any], list[int], NDArray[Any]]) -> Plain:
    matrix, order, count = led
    held = run.split.get("label_counts")
    held = held[order] if held is not None and len(held) > max(order) and held.shape[1] == matrix.shape[1] else None
    rows = []
    for label in np.flatnonzero(count > 0):
        k = int(np.nanargmax(matrix[:, label]))
        rows.append(
            (int(label), int(count[label]), order[k], float(matrix[k, label]), None if held is None else int(held[k, label]))
        )
    cohort = statistics.fmean(
        len(m["notes"]["confidence"]["clients"]) for m in run.metrics if (m.get("notes") or {}).get("confidence")
    )
    return {"rows": rows, "clients": len(order), "even": 1 / cohort, "correlation": _correlation(matrix, held)}


def _correlation(matrix: NDArray[Any], held: NDArray[Any] | None) -> float | None:
    if held is None:
        return None
    known = np.isfinite(matrix)
    x, y = matrix[known], (held / np.maximum(held.sum(axis=1, keepdims=True), 1))[known]
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 and y.std() > 0 else None


def _failures(run: RunRecord) -> Plain:
    rows = [{"round": m["round"], **failure} for m in run.metrics for failure in m.get("failures") or []]
    return {
        "failures": rows[:MOST_FAILURES],
        "failures_in_all": len(rows),
        "kinds": Counter(str(row.get("kind")) for row in rows).most_common(),
        "lost": [m["round"] for m in run.metrics if m.get("lost")],
    }


def _equal(runs: Sequence[RunRecord]) -> list[tuple[bool, str]]:
    """What the runs of one seed had in common, looked up in their folders; (whether it was equal, the sentence)."""
    by_seed: dict[int, list[RunRecord]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    pairs = [(group[0], other) for group in by_seed.values() for other in group[1:]]
    if not pairs:
        return []

    def all_pairs(same: Callable[[RunRecord, RunRecord], bool]) -> bool:
        return all(same(a, b) for a, b in pairs)

    return [
        (
            all_pairs(_same_split),
            "who holds which examples, the public and the test data, and which architecture each client has",
        ),
        (all_pairs(_same_cohorts), "which clients were asked in each round, as far as the runs have rounds in common"),
        (
            all_pairs(lambda a, b: a.config.get("models") == b.config.get("models")),
            "the architectures, and so their initial weights, which follow from architecture and seed",
        ),
    ]


def _same_split(a: RunRecord, b: RunRecord) -> bool:
    return bool(a.split) and a.split.keys() == b.split.keys() and all(np.array_equal(a.split[k], b.split[k]) for k in a.split)


def _same_cohorts(a: RunRecord, b: RunRecord) -> bool:
    other = {m["round"]: m.get("cohort") for m in b.metrics}
    return all(m.get("cohort") == other[m["round"]] for m in a.metrics if m["round"] in other)


def _archs(split: dict[str, NDArray[Any]]) -> list[str] | None:
    return [str(arch) for arch in split["archs"]] if "archs" in split else None


def _data(run: RunRecord) -> str:
    return str(run.config.get("data", {}).get("name") or run.result.get("data") or "unnamed data")


def _spec(spec: Any) -> str:
    return str(spec.get("label") or spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _commands(runs: Sequence[RunRecord]) -> list[str]:
    found = (run.env.get("command") for run in runs)
    return list(dict.fromkeys(shlex.join(map(str, c)) if isinstance(c, list) else str(c) for c in found if c))


def _link(run: RunRecord, folder: Path) -> str:
    return quote(Path(os.path.relpath(run.folder / "report.html", folder)).as_posix())


def _publish(figures: dict[str, Figure], folder: Path) -> dict[str, dict[str, Markup]]:
    drawn = {name: plots.save(figure, folder / "plots", name) for name, figure in figures.items()}
    return {"figures": {name: Markup(plots.inline_svg(text)) for name, text in drawn.items()}}


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _bytes(value: float) -> str:
    return f"{si(value)}B" if value >= 1000 else f"{value:.0f} B"


def _render(template: str, folder: Path, context: Plain) -> Path:
    env = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= {"percent": _percent, "si": si, "duration": _duration, "bytes": _bytes}
    path = folder / "report.html"
    with replacing(path) as draft:
        draft.write_bytes(env.get_template(template).render(context).encode())
    return path
