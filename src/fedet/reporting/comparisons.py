"""What several runs say together: who was best and by how much, under which conditions, and what was equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedet.reporting import results, statistics, words
from fedet.reporting.curves import Level
from fedet.reporting.results import si
from fedet.reporting.run_data import RunData
from fedet.reporting.statistics import Difference
from fedet.storage.metrics import Record


class Pair(NamedTuple):
    """The best method minus another one, in accuracy."""

    best: str
    other: str
    difference: Difference

    @property
    def cells(self) -> list[str]:
        """The row of a table: methods, seeds, difference and interval in points, verdict."""
        found = self.difference
        interval = "–" if found.half_width is None else f"± {100 * found.half_width:.2f}"
        verdict = "one seed: no interval" if found.half_width is None else "clear" if found.certain else "not clear"
        return [f"{self.best} − {self.other}", str(found.n), f"{100 * found.mean:+.2f}", interval, verdict]


PAIR_HEAD = ("difference", "seeds", "points", "95% interval", "verdict")


def differences(rows: Sequence[Record], groups: Mapping[str, Sequence[RunData]]) -> list[Pair]:
    """The method with the best mean minus each other one, paired by seed, in best accuracy."""
    federated = [row for row in rows if not row["reference"] and row["best_accuracy"] is not None]
    if len(federated) < 2:
        return []
    scores = {row["label"]: _by_seed(groups[row["label"]]) for row in federated}
    best = max(federated, key=lambda row: float(row["best_accuracy"]))["label"]
    pairs = [(other, statistics.paired(scores[best], scores[other])) for other in scores if other != best]
    return [Pair(best, other, found) for other, found in pairs if found is not None]


def _by_seed(group: Sequence[RunData]) -> dict[int, float]:
    found = {run.seed: results.summary(run)["best_accuracy"] for run in group}
    return {seed: value for seed, value in found.items() if value is not None}


def levels(rows: Sequence[Record]) -> list[Level]:
    """The references and the largest class, as horizontal lines."""
    return [Level(row["label"], row["best_accuracy"]) for row in rows if row["reference"] and row["best_accuracy"] is not None]


def sentence(rows: Sequence[Record], pairs: Sequence[Pair]) -> str:
    """The outcome in one or two sentences."""
    scored = [row for row in rows if not row["reference"] and row["best_accuracy"] is not None]
    if not scored:
        return "No method has been evaluated yet."
    best, *others = sorted(scored, key=lambda row: -float(row["best_accuracy"]))
    mean = f" (mean over {best['n']} seeds)" if best["n"] > 1 else ""
    text = f"{words.proper(best['label'])} reached the best accuracy, {words.percent(best['best_accuracy'])}{mean}"
    text += "".join(f", before {words.proper(row['label'])} with {words.percent(row['best_accuracy'])}" for row in others[:1])
    text += "".join(f" and {words.proper(row['label'])} with {words.percent(row['best_accuracy'])}" for row in others[1:2])
    central = next((level for level in levels(rows) if level.label.split(" (")[0] == "central"), None)
    if central:
        text += f"; all data in one place gave {words.percent(central.y)}"
    return f"{text}. {_certainty(pairs)}".strip()


def _certainty(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return ""
    if all(pair.difference.half_width is None for pair in pairs):
        return "This is one seed, so small differences may be chance."
    clear = [pair.other for pair in pairs if pair.difference.certain]
    if len(clear) == len(pairs):
        return "The paired differences are clear of zero."
    if not clear and all(pair.difference.wins == pair.difference.n > 1 for pair in pairs):
        n = min(pair.difference.n for pair in pairs)
        return f"It was ahead with every seed, but {n} are too few for a 95% interval that is clear of zero."
    if not clear:
        return "No paired difference is clear of zero: with other seeds the order may change."
    unclear = [pair.other for pair in pairs if not pair.difference.certain]
    return f"Paired by seed, the difference to {_listed(clear)} is clear of zero, that to {_listed(unclear)} is not."


def _listed(names: Sequence[str]) -> str:
    names = [words.proper(name) for name in names]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def conditions(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """The set-up as (what, value): what the runs have in common, and every value where they differ."""
    federated = [run for run in runs if not run.reference] or list(runs)
    sizes: dict[str, int] = {}
    for run in runs:
        sizes |= run.result.get("arch_params") or {}
    facts = {
        "data": [words.data_text(run) for run in runs],
        "clients": [words.clients_text(run) for run in federated],
        "client models": [", ".join(_sized(arch, sizes) for arch in words.client_archs(run)) for run in federated],
        "server model": [_sized(words.server_arch(run), sizes) for run in federated],
        "rounds": [_rounds(run) for run in federated],
        "seeds": [", ".join(map(str, sorted({run.seed for run in runs})))],
    }
    return [
        (name, "; ".join(dict.fromkeys(value for value in values if value))) for name, values in facts.items() if any(values)
    ]


def _rounds(run: RunData) -> str:
    """How many rounds the run has done; if they are not those it was to do, how many these were and why it ended."""
    done, planned = run.last_round, run.config.get("run", {}).get("rounds", "?")
    if done == planned:
        return f"{done}"
    why = words.STOPPED.get(str(run.result.get("stopped"))) if run.finished else None
    return f"{words.method_name(run.method)} {done} of {planned}" + (f" ({why})" if why else "")


def _sized(arch: str, sizes: Mapping[str, int]) -> str:
    return f"{arch} ({si(sizes[arch])} parameters)" if arch in sizes else arch


def equal(runs: Sequence[RunData]) -> list[tuple[bool, str]]:
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
