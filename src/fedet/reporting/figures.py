"""Which figures reports have, and of what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fedet.reporting import comparisons, curves, figure_files, plots, references, results, words
from fedet.reporting.curves import Level
from fedet.reporting.figure_files import Draw
from fedet.reporting.results import Leaders
from fedet.reporting.run_data import RunData
from fedet.storage.metrics import Record


def of_run(run: RunData, led: Leaders | None, found: Record | None, audit: Record | None) -> dict[str, Markup]:
    """The figures of a run, by name, as elements of a page; their files are in its plots/."""
    out: dict[str, Draw] = {}
    main, levels = next(iter(results.model_points(run)), None), _majority(run)
    if len(results.evaluated(run)) > 1:  # for a single evaluation the table is enough
        by_round = curves.run_curves(run, "round")
        out["accuracy_rounds"] = lambda width: plots.accuracy(by_round, "round", main, levels, late=True, width=width)
        if any(m["params_total"] for m in run.metrics):
            by_params = curves.run_curves(run, "params_total")
            out["accuracy_params"] = lambda width: plots.accuracy(by_params, "params", main, levels, width=width)
    if run.split.get("label_counts") is not None:
        counts, archs = run.split["label_counts"], words.archs(run.split)
        out["distribution"] = lambda width: plots.distribution(counts, archs, width=width)
    if led:
        weights, order, labels = led
        even, models = results.equal_share(run), words.archs(run.split)
        out["confidence"] = lambda width: plots.confidence(weights, order, range(len(labels)), even, models, width=width)
    if found:
        out["bound"] = lambda width: plots.bound(found["clients"], width=width)
    if audit:
        out["audit"] = lambda width: plots.audit(audit["attacks"], width=width)
    return _publish(out, run.folder)


def of_comparison(rows: Sequence[Record], groups: dict[str, list[RunData]], folder: Path) -> dict[str, Markup]:
    """The figures of a comparison, by name, as elements of a page; their files are in the plots/ of its folder."""
    scored = [row for row in rows if row["best_accuracy"] is not None and not row["reference"]]
    if not scored:
        return {}
    federated = {label: group for label, group in groups.items() if not group[0].reference}
    levels = comparisons.levels(rows)
    by_round, by_params = ([curves.mean_curve(*item, key) for item in federated.items()] for key in ("round", "params_total"))
    labels, means, deviations = ([row[key] for row in scored] for key in ("label", "best_accuracy", "best_accuracy_std"))
    draw: dict[str, Draw] = {
        "accuracy_rounds": lambda width: plots.accuracy(by_round, "round", levels=levels, late=True, width=width),
        "accuracy_params": lambda width: plots.accuracy(by_params, "params", levels=levels, width=width),
        "best": lambda width: plots.points(labels, means, deviations, width=width),
    }
    return _publish(draw, folder)


def _majority(run: RunData) -> list[Level]:
    share = run.result.get("majority")
    return [] if share is None else [Level(references.MAJORITY, float(share))]


def _publish(figures: dict[str, Draw], folder: Path) -> dict[str, Markup]:
    return {name: Markup(figure_files.publish(draw, folder / "plots", name)) for name, draw in figures.items()}
