"""Reports: one self-contained HTML page with its figures, made from run folders alone."""

from __future__ import annotations

import functools
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
from fedet.reporting import plots, references, results
from fedet.reporting.plots import Curve, Level
from fedet.reporting.results import comparison_rows, noted, si
from fedet.reporting.run_data import RunData, read_run
from fedet.storage.files import replacing, write_text
from fedet.storage.metrics import Record

MOST_FAILURES = 200
STOPPED = {
    "rounds": "all rounds finished",
    "budget_params": "stopped: parameter budget reached",
    "budget_seconds": "stopped: time budget reached",
    "target_accuracy": "stopped: target accuracy reached",
    "patience": "stopped: no further progress",
}


def write_run(folder: str | os.PathLike[str]) -> Path:
    """Write report.html and plots/ into a run folder; the run need not be finished."""
    run = read_run(folder)
    numbers, led, found = results.summary(run), results.leaders(run), run.bound()
    audit = run.audit()
    drawn = {"bound": plots.bound(found["clients"])} if found else {}
    drawn |= {"audit": plots.audit(audit["attacks"])} if audit else {}
    figures = _publish(_run_figures(run, led) | drawn, run.folder)
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
        "at_clients": run.kept_by_clients is not None,
        "spreads": _spreads(run),
        "majority": run.result.get("majority"),
        "final_note": noted("", numbers["accuracy_round"], last=run.last_round).strip(" ()"),
        "holdings": _holdings(run.split),
        "led": _led(run, led) if led else None,
        "bound": found,
        "privacy": run.result.get("privacy") and {"epsilon": None, "client_epsilon": None} | run.result["privacy"],
        "audit": audit,
        **_failures(run),
        "commands": _commands([run], run.folder),
        "started_with": None if _repeats(run) else _command(run),
        "versions": {key: _plain(value) for key, value in run.env.items() if key not in ("command", "pid", "rounds")},
    }
    return _render("report.html.j2", run.folder, {**context, **figures})


def write_comparison(folder: str | os.PathLike[str], runs: Sequence[RunData], notes: Sequence[str] = ()) -> Path:
    """Write report.html, plots/, table.csv and table.tex on several runs; those that differ only by seed share a row."""
    if not runs:
        raise FedetError(f"{folder} has nothing to compare yet: none of its runs has started")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, groups = comparison_rows(runs), results.grouped(runs)
    figures = _publish(_comparison_figures(rows, groups), folder)
    write_text(folder / "table.csv", results.to_csv(rows))
    write_text(folder / "table.tex", results.to_tex(rows))
    head, body = results.table(rows)
    federated = sum(not row["reference"] for row in rows)
    best = max((row["best_accuracy"] for row in rows[:federated] if row["best_accuracy"] is not None), default=None)
    context = {
        "title": f"Comparison on {', '.join(sorted({_data(run) for run in runs}))}",
        "head": head,
        "body": [(row["best_accuracy"] == best, cells) for row, cells in zip(rows[:federated], body[:federated], strict=True)],
        "heading": references.HEADING,
        "possible": body[federated:],
        "meanings": references.meanings(rows),
        "spreads": [text for label, group in groups.items() if (text := references.spread_at_clients(label, group))],
        "notes": notes,
        "several_seeds": any(row["n"] > 1 for row in rows),
        "unfinished": sum(not run.finished for run in runs),
        "notices": _notices(runs),
        "equal": _equal(runs),
        "links": {label: [(run.seed, _link(run, folder)) for run in group] for label, group in groups.items()},
        "commands": _commands(runs, folder),
    }
    return _render("comparison.html.j2", folder, {**context, **figures})


def _run_figures(run: RunData, led: tuple[NDArray[Any], list[int], NDArray[Any]] | None) -> dict[str, Figure]:
    out = {}
    sends = any(m["params_total"] for m in run.metrics)
    if len(results.evaluated(run)) > 1:  # for a single evaluation the table is enough
        main = next(iter(results.model_points(run)))
        out["accuracy_rounds"] = plots.accuracy(_run_curves(run, "round"), "round", main)
    if sends and len(results.evaluated(run)) > 1:
        out["accuracy_params"] = plots.accuracy(_run_curves(run, "params_total"), "params", main)
    if run.split.get("label_counts") is not None:
        out["distribution"] = plots.distribution(run.split["label_counts"], _archs(run.split))
    if led:
        out["confidence"] = plots.confidence(led[0], led[1], range(led[0].shape[1]))
    if sends:
        up, down = ([m.get(key, 0) for m in run.metrics] for key in ("params_up", "params_down"))
        out["traffic"] = plots.traffic([m["round"] for m in run.metrics], up, down)
    return out


def _comparison_figures(rows: Sequence[Record], groups: dict[str, list[RunData]]) -> dict[str, Figure]:
    scored = [row for row in rows if row["best_accuracy"] is not None and not row["reference"]]
    if not scored:
        return {}
    federated = {label: group for label, group in groups.items() if not group[0].reference}
    levels = [Level(row["label"], row["best_accuracy"]) for row in rows if row["label"] in groups.keys() - federated.keys()]
    kinds: tuple[tuple[str, Literal["round", "params"]], ...] = (("round", "round"), ("params_total", "params"))
    out = {}
    for key, x in kinds:
        out[f"accuracy_{'rounds' if x == 'round' else x}"] = plots.accuracy(
            [_mean_curve(label, group, key) for label, group in federated.items()],
            x,
            levels=[level for level in levels if level.y is not None],
        )
    columns = ([row[key] for row in scored] for key in ("label", "best_accuracy", "best_accuracy_std"))
    return out | {"best": plots.bars(*columns)}


def _run_curves(run: RunData, x: str) -> list[Curve]:
    place = {m["round"]: m[x] for m in run.metrics}
    return [
        Curve(name, [place[number] for number in points], list(points.values()))
        for name, points in results.model_points(run).items()
    ]


def _mean_curve(label: str, group: Sequence[RunData], x: str) -> Curve:
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


def _models(run: RunData) -> list[Record]:
    """The rows of the table of models, with the round next to an accuracy that is not from the last round."""
    return [
        row | {"final_text": noted(_percent(row["final"], 2), row["final_round"], last=run.last_round)}
        for row in results.model_rows(run)
    ]


def _spreads(run: RunData) -> dict[str, Record]:
    """The accuracies of the models that all clients keep, from the last round in which they were evaluated, by name."""
    return next((m["stored"] for m in reversed(run.metrics) if m.get("stored")), {})


def _sentence(run: RunData) -> str:
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
    elif not sizes and len(results.model_points(run)) < 2:
        own = "and train on it"  # too early to tell which model
    took_part = f"; {cohort} of them took part in each round" if cohort else ""
    if run.reference:
        what = references.MEANING.get(run.method, "")
        return (
            f"This is a reference, not a federated method. It shows what was possible{f': {what}' if what else ''}. The data "
            f"({_data(run)}, {kind}{alpha}) and the {clients} clients are those of a federated run with the same seed."
        )
    return (
        f"The method {run.method} trained {large}{size} on the server with the help of {clients} clients. The clients have the "
        f"data ({_data(run)}, {kind}{alpha}), keep it to themselves {own}{took_part}."
    )


def _notices(runs: Sequence[RunData]) -> list[str]:
    found = (text for run in runs for text in (notice(run.config.get("models") or {}), *run.result.get("warnings", [])))
    return list(dict.fromkeys(text for text in found if text))


def _large_on_clients(run: RunData) -> bool:
    large = (run.result.get("arch_params") or {}).get(run.result.get("server"))
    if not large:
        return False
    return any(m.get("cohort") and m.get("model_params_down") == large * len(m["cohort"]) for m in run.metrics)


def _saving(numbers: Record) -> float | None:
    large, total = numbers["large_params"], numbers["params_total"]
    return large / total if large and total and abs(large / total - 1) > 0.02 else None


def _holdings(split: dict[str, NDArray[Any]]) -> Record | None:
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


def _led(run: RunData, led: tuple[NDArray[Any], list[int], NDArray[Any]]) -> Record:
    matrix, order, count = led
    held = run.split.get("label_counts")
    held = held[order] if held is not None and len(held) > max(order) and held.shape[1] == matrix.shape[1] else None
    rows = []
    for label in np.flatnonzero(count > 0):
        k = int(np.nanargmax(matrix[:, label]))
        rows.append(
            (int(label), int(count[label]), order[k], float(matrix[k, label]), None if held is None else int(held[k, label]))
        )
    cohort = statistics.fmean(len(note["clients"]) for note in results.confidences(run))
    return {"rows": rows, "clients": len(order), "even": 1 / cohort, "correlation": _correlation(matrix, held)}


def _correlation(matrix: NDArray[Any], held: NDArray[Any] | None) -> float | None:
    if held is None:
        return None
    known = np.isfinite(matrix)
    x, y = matrix[known], (held / np.maximum(held.sum(axis=1, keepdims=True), 1))[known]
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 and y.std() > 0 else None


def _failures(run: RunData) -> Record:
    rows = [{"round": m["round"], **failure} for m in run.metrics for failure in m.get("failures") or []]
    return {
        "failures": rows[:MOST_FAILURES],
        "failures_in_all": len(rows),
        "kinds": Counter(str(row.get("kind")) for row in rows).most_common(),
        "lost": [m["round"] for m in run.metrics if m.get("lost")],
    }


def _equal(runs: Sequence[RunData]) -> list[tuple[bool, str]]:
    """What the runs of each seed had in common, according to their folders, as (whether it was equal, what)."""
    by_seed: dict[int, list[RunData]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    pairs = [(group[0], other) for group in by_seed.values() for other in group[1:]]
    if not pairs:
        return []

    def all_pairs(same: Callable[[RunData, RunData], bool]) -> bool:
        return all(same(a, b) for a, b in pairs)

    return [
        (
            all_pairs(_same_split),
            "each client's examples and architecture, the public data and the test data",
        ),
        (all_pairs(_same_cohorts), "the clients selected in each round that the runs have in common"),
        (
            all_pairs(lambda a, b: a.config.get("models") == b.config.get("models")),
            "the architectures and their initial weights, which depend on the architecture and the seed only",
        ),
    ]


def _same_split(a: RunData, b: RunData) -> bool:
    return bool(a.split) and a.split.keys() == b.split.keys() and all(np.array_equal(a.split[k], b.split[k]) for k in a.split)


def _same_cohorts(a: RunData, b: RunData) -> bool:
    other = {m["round"]: m.get("cohort") for m in b.metrics}
    return all(m.get("cohort") == other[m["round"]] for m in a.metrics if m["round"] in other)


def _archs(split: dict[str, NDArray[Any]]) -> list[str] | None:
    return [str(arch) for arch in split["archs"]] if "archs" in split else None


def _data(run: RunData) -> str:
    return str(run.config.get("data", {}).get("name") or run.result.get("data") or "unnamed data")


def _spec(spec: Any) -> str:
    return str(spec.get("label") or spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _commands(runs: Sequence[RunData], folder: Path) -> list[str]:
    """The commands that give these runs again, to be entered in this folder."""
    return list(dict.fromkeys((_repeats(run) and _command(run)) or _run_again(run, folder) for run in runs))


def _command(run: RunData) -> str | None:
    """The command that started the run, if it is known."""
    command = run.env.get("command")
    return shlex.join(command) if isinstance(command, list) else command


def _repeats(run: RunData) -> bool:
    """Whether that command gives this run again: not if it was made longer since, or if nobody wrote down how long it was."""
    return bool(_command(run)) and run.env.get("rounds") == run.config.get("run", {}).get("rounds")


def _run_again(run: RunData, folder: Path) -> str:
    """The run's own configuration, with all settings and the seed, gives it again."""
    return shlex.join(["fedet", "run", os.path.relpath(run.folder / "config.toml", folder)])


def _link(run: RunData, folder: Path) -> str:
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


def _render(template: str, folder: Path, context: Record) -> Path:
    path = folder / "report.html"
    with replacing(path) as draft:
        draft.write_bytes(_environment().get_template(template).render(context).encode())
    return path


@functools.cache
def _environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= {"percent": _percent, "si": si, "duration": _duration, "bytes": _bytes}
    return env
