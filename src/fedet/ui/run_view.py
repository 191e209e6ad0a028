"""What the page of a run shows, as plain data: charts, the cohort, the experts of a round, failures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedet.reporting import comparisons, curves, results, words
from fedet.reporting.breakdown import MOST_CLASSES, by_class, by_client, is_number
from fedet.reporting.curves import Curve, Level
from fedet.reporting.references import MAJORITY
from fedet.reporting.run_data import RunData
from fedet.storage.metrics import Record
from fedet.ui.charts import SENT, SENT_NOTE, Chart

MOST_FAILURES = 100
STAGES = {"clients": "clients train", "server": "server trains", "evaluate": "evaluation", "other": "other"}


def view(run: RunData, siblings: Sequence[RunData], number: int | None) -> Record:
    """All that the page shows; `siblings` are the runs of the same comparison, and the round is the last one by default."""
    chosen = _round(run, number)
    return {
        "title": words.title(run),
        "sentence": words.sentence(run),
        "notices": words.notices([run]),
        "numbers": results.summary(run),
        "planned": run.config.get("run", {}).get("rounds"),
        "stopped": words.STOPPED.get(str(run.result.get("stopped")), str(run.result.get("stopped"))),
        "models": results.model_rows(run),
        "charts": _charts(run, _levels(run, siblings)),
        "round": chosen.get("round"),
        "rounds": [m["round"] for m in run.metrics],
        "cohort": _cohort(run, chosen),
        "experts": _experts(run, chosen),
        "classes": by_class(run),
        "at_clients": by_client(run),
        **_failures(run),
    }


def _charts(run: RunData, levels: Sequence[Level]) -> list[Chart]:
    by_round = curves.run_curves(run, "round")
    rounds = Chart(
        "accuracy",
        "Accuracy",
        by_round,
        levels=levels,
        emphasis=True,
        late=True,
        note="Test accuracy of each model after each evaluated round.",
    )
    params = Chart(
        "params",
        "Accuracy against parameters sent",
        curves.run_curves(run, "params_total"),
        x=SENT,
        levels=levels,
        emphasis=True,
        note=SENT_NOTE,
    )
    found = [rounds, params] if run.last_round and any(m["params_total"] for m in run.metrics) else [rounds]
    return [chart for chart in [*found, *_gaps(run), *_disagreement(run), *_times(run)] if chart.curves]


def _levels(run: RunData, siblings: Sequence[RunData]) -> list[Level]:
    """The references of the same comparison and seed, and the largest class."""
    same = [other for other in siblings if other.seed == run.seed and other.reference and other.folder != run.folder]
    found = comparisons.levels(results.comparison_rows(same)) if same else []
    majority = run.result.get("majority")
    if majority is not None and not any(level.label == MAJORITY for level in found):
        found.append(Level(MAJORITY, float(majority)))
    return found


def _gaps(run: RunData) -> list[Chart]:
    """How far the server model is behind what it learns from."""
    points = results.model_points(run)
    main = next(iter(points), None)
    if main is None or "consensus" not in points or main == "consensus":
        return []
    student, teachers = points[main], points["consensus"]
    small = [points[name] for name in points if name not in (main, "consensus")]
    ahead = {n: teachers[n] - student[n] for n in teachers if n in student}
    models = {n: statistics.fmean(p[n] for p in small) - student[n] for n in ahead if small and all(n in p for p in small)}
    pairs = {"consensus − server": ahead, "mean small model − server": models}
    found = [Curve(name, list(gap), list(gap.values())) for name, gap in pairs.items() if gap]
    note = "Accuracy of the teachers minus that of the server model, in points: below 0 the server is ahead of them."
    return [Chart("gap", "Gap between student and teachers", found, unit="points", note=note)]


def _disagreement(run: RunData) -> list[Chart]:
    notes = {m["round"]: m["notes"] for m in run.metrics if isinstance(m.get("notes"), dict)}
    found = []
    for key, label in (("mass", "weight against the consensus"), ("agreement", "examples on which all agree")):
        values = {n: note[key] for n, note in notes.items() if is_number(note.get(key))}
        found.append(Curve(label, list(values), list(values.values())))
    note = "How much of the clients' weight voted for another label than the consensus did, and how often nobody did."
    return [Chart("disagreement", "Disagreement among the clients", [curve for curve in found if curve.xs], note=note)]


def _times(run: RunData) -> list[Chart]:
    """The parts of each round's time; what no stage accounts for is `other`."""
    rows: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for m in run.metrics:
        seconds = {key: float(value) for key, value in m.get("seconds", {}).items() if is_number(value)}
        for stage in STAGES:
            rows[stage].append(seconds.get(stage, 0.0))
        rows["other"][-1] = max(0.0, seconds.get("round", 0.0) - sum(rows[stage][-1] for stage in STAGES if stage != "other"))
    numbers = [m["round"] for m in run.metrics]
    found = [
        Curve(label, numbers, rows[stage]) for stage, label in STAGES.items() if any(value > 0.005 for value in rows[stage])
    ]
    return [Chart("time", "Time of a round", found, unit="seconds", stacked=True, note="Where the seconds of each round went.")]


def _round(run: RunData, number: int | None) -> Record:
    found: Record = next((m for m in run.metrics if m["round"] == number), {})
    return found or (run.metrics[-1] if run.metrics else {})


def _cohort(run: RunData, chosen: Record) -> list[Record]:
    """The clients of a round with their architecture, size and label mix, and what became of their replies."""
    counts, archs, sizes = run.split.get("label_counts"), words.archs(run.split), run.result.get("arch_params") or {}
    failed = {f.get("client"): f"{f.get('kind')}: {f.get('why')}" for f in chosen.get("failures") or []}
    rows = []
    for client in chosen.get("cohort", []):
        arch = archs[client] if archs is not None and client < len(archs) else None
        mix = counts[client] if counts is not None and client < len(counts) else None
        replied = "replied" if client in chosen.get("replied", []) else failed.get(client, "no reply")
        rows.append(
            {"id": client, "arch": arch, "params": sizes.get(arch), "outcome": failed.get(client, replied), **_mix(mix)}
        )  # fmt: skip
    return rows


def _mix(counts: Any) -> Record:
    """A client's examples: how many, their shares by label, and the most frequent labels in words."""
    if counts is None or not counts.sum():
        return {"examples": None if counts is None else 0, "shares": [], "mostly": ""}
    shares = counts / counts.sum()
    top = [int(label) for label in np.argsort(-shares, kind="stable")[:3] if shares[label] > 0]
    return {
        "examples": int(counts.sum()),
        "shares": [float(share) for share in shares / shares.max()],
        "mostly": ", ".join(f"{label} ({100 * shares[label]:.0f}%)" for label in top),
    }


def _experts(run: RunData, chosen: Record) -> Record | None:
    """Who has how much weight on which class in this round; the expert of a class has the most.

    If there are too many classes for a table, those that the consensus chose most often are shown.
    """
    notes = results.confidences(replace(run, metrics=[chosen])) if chosen else []
    if not notes:
        return None
    (note,) = notes
    labels, alpha = np.asarray(note["labels"], float), np.asarray(note["alpha"], float)
    shown = sorted(map(int, np.argsort(-labels, kind="stable")[:MOST_CLASSES]))
    even, archs = 1 / len(note["clients"]), words.archs(run.split) or []
    leaders = {label: int(np.argmax(alpha[:, label])) for label in shown if labels[label] > 0}
    rows = [
        {
            "client": client,
            "arch": archs[client] if client < len(archs) else "",
            "cells": [_cell(alpha[i, label], even, leaders.get(label), i) for label in shown],
        }
        for i, client in enumerate(note["clients"])
    ]
    counts = [(label, int(labels[label])) for label in shown]
    return {"even": even, "labels": counts, "hidden": len(labels) - len(shown), "rows": rows}


def _cell(weight: float, even: float, leader: int | None, row: int) -> Record:
    """A weight with its shade: -4 to 4, half an octave each, around an equal share; None where the class was not chosen."""
    if leader is None:
        return {"weight": None, "shade": 0, "expert": False}
    octaves = math.log2(max(weight, 1e-9) / even)
    return {"weight": float(weight), "shade": max(-4, min(4, round(2 * octaves))), "expert": row == leader}


def _failures(run: RunData) -> Record:
    rows = [{"round": m["round"], **failure} for m in reversed(run.metrics) for failure in m.get("failures") or []]
    return {"failures": rows[:MOST_FAILURES], "failures_in_all": len(rows), **results.lost_rounds(run)}
