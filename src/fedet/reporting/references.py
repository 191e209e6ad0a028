"""References in tables and figures: what they are, and the rows that need no run of their own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedet.reporting.run_data import RunData
from fedet.storage.metrics import Record

HEADING = "what was possible"
MAJORITY = "majority"
MEANING = {
    "central": "the server model trained on all clients' data together, with as many samples as the clients train on",
    "public-labels": "the server model trained on the public data with their true labels",
    "local": "clients that train alone, each its own model on its own data: the mean over clients",
    MAJORITY: "always predicting the largest class of the test data",
}


def majority_rows(runs: Sequence[RunData], like: Record) -> list[Record]:
    """A row like the given one for each data set: the share of the largest class in its test part."""
    shares: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.result.get("majority") is not None:
            name = str(run.config.get("data", {}).get("name"))
            shares.setdefault(name, {})[run.seed] = float(run.result["majority"])
    return [
        {key: 0 if key.startswith("reached_") else None for key in like}
        | {"label": MAJORITY if len(shares) == 1 else f"{MAJORITY} ({name})", "n": len(found), "seeds": sorted(found)}
        | {"final_rounds": [], "unfinished": 0, "reference": True}
        | _accuracies(list(found.values()))
        for name, found in shares.items()
    ]


def meanings(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """The references of the package among these rows, and what they are."""
    labels = [row["label"].split(" (")[0] for row in rows if row["reference"]]
    return [(name, text) for name, text in MEANING.items() if name in labels]


def spread_at_clients(label: str, group: Sequence[RunData]) -> str | None:
    """How the accuracies of the models that clients keep are spread, as a sentence; None if these runs don't say.

    Only for runs whose accuracy is a mean over clients.
    """
    found = [stored for run in group if (stored := run.kept_by_clients) is not None]
    if not found:
        return None
    parts = (("weighted", "weighted by examples"), ("worst_tenth", "the worst tenth"), ("best", "the best"))
    values = {key: [s[key] for s in found if s.get(key) is not None] for key, _ in parts}
    texts = [f"{text} {100 * statistics.fmean(values[key]):.2f}%" for key, text in parts if values[key]]
    counts = sorted({s["clients"] for s in found})
    clients = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{label}: mean over {clients} clients; {', '.join(texts)}"


def _accuracies(values: list[float]) -> Record:
    mean, std = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    return {"best_accuracy": mean, "best_accuracy_std": std, "final_accuracy": mean, "final_accuracy_std": std}
