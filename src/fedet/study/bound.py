"""The terms of the paper's generalisation bound (Theorem 1) for a run's clients, next to their weights in the consensus.

Clients' models are not stored, so the state of the last checkpoint plays further rounds, which change nothing in the run's
folder: their cohorts train, and the server weights them. Of the four terms two are exact and two are upper bounds:
the discrepancy is that of the labels (the partition is pure label skew), and nu_k is the error of the server model W on the
client's examples and on the test data. It is the paper's bound, not a certificate: `maths.generalisation_bound` says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedet import maths, runtime, train
from fedet.core import Weights
from fedet.errors import ConfigError
from fedet.experiment import Experiment, Progress
from fedet.reporting.statistics import t_probability
from fedet.storage.files import write_json
from fedet.study import replay
from fedet.study.replay import Replay

TERMS = ("empirical", "sample_size", "discrepancy", "joint")


@dataclass(frozen=True)
class ClientBound:
    """The bound for one client alone, term by term, and its weight: 1 is the cohort's mean."""

    client: int
    arch: str
    examples: int
    weight: float
    empirical: float
    sample_size: float
    discrepancy: float
    joint: float

    @property
    def total(self) -> float:
        """The bound."""
        return self.empirical + self.sample_size + self.discrepancy + self.joint


@dataclass(frozen=True)
class CohortBound:
    """The bound of a cohort's weighted ensemble, also with the constant of the theorem's lemma, and its test error."""

    bound: float
    with_lemma: float
    test_error: float


@dataclass(frozen=True)
class BoundOfRun:
    """What `fedet bound` found."""

    round: int
    delta: float
    clients: list[ClientBound]
    cohorts: list[CohortBound]

    def correlations(self) -> dict[str, tuple[float, float] | None]:
        """Spearman's rank correlation of the clients' weights with the bound and with each term, and its p-value."""
        weights = [c.weight for c in self.clients]
        return {name: spearman(weights, [getattr(c, name) for c in self.clients]) for name in ("total", *TERMS)}


def of_run(run_dir: Path, cohorts: int = 5, delta: float = 0.05, progress: Progress | None = None) -> BoundOfRun:
    """Compute the terms for the clients of the next cohorts of a run, and write them to bound.json in its folder."""
    if not 0 < delta <= 0.5:
        raise ConfigError(
            f"--delta must be above 0 and at most 0.5, not {delta:g}: the theorem's constant is too small above it"
        )
    run = replay.of_run(run_dir, progress)
    with runtime.limit_threads(run.experiment.config.run.threads):
        probes = [_probe(run, run.snapshot.round + 1 + i, delta) for i in range(cohorts)]
    found = BoundOfRun(
        run.snapshot.round, delta, _merged([c for clients, _ in probes for c in clients]), [b for _, b in probes]
    )
    write_json(run.folder.path / "bound.json", as_record(found))
    return found


def as_record(found: BoundOfRun) -> dict[str, object]:
    """Plain data for bound.json."""
    clients = [asdict(c) | {"total": c.total} for c in found.clients]
    correlations = {name: pair and {"rho": pair[0], "p": pair[1]} for name, pair in found.correlations().items()}
    return asdict(found) | {"clients": clients, "correlations": correlations}


def spearman(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """Spearman's rank correlation and its two-sided p-value from Student's t; None if one side is constant or n < 3."""
    n = len(xs)
    if n < 3 or len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    rho = float(np.corrcoef(_ranks(xs), _ranks(ys))[0, 1])
    if abs(rho) >= 1 - 1e-12:
        return math.copysign(1.0, rho), 0.0
    return rho, 1 - t_probability(abs(rho) * math.sqrt((n - 2) / (1 - rho**2)), n - 2)


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ranks from 1; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    return np.array([(array < v).sum() + ((array == v).sum() + 1) / 2 for v in array])


def _probe(run: Replay, number: int, delta: float) -> tuple[list[ClientBound], CohortBound]:
    """Let one more cohort train from this state; returns the terms per client, and the ensemble's bound."""
    experiment, state, (r, _) = run.experiment, run.snapshot.state, run.round(number)
    experiment.method.round(state, r, experiment.env)
    noted = r.notes.get("confidence")
    if noted is None or not r.teachers:
        raise ConfigError(
            f"method '{experiment.method.name}' has no weighted consensus of clients: the bound is for Fed-ET and Fed-ET+"
        )
    labels = torch.tensor(noted["labels"], dtype=torch.float64)
    alpha = torch.tensor(noted["alpha"], dtype=torch.float64) @ labels / labels.sum()
    server = next(iter(experiment.method.models(state, experiment.env).values()))
    clients = [
        _terms(experiment, k, model, server, float(a) * len(alpha), delta)
        for (k, model), a in zip(r.teachers.items(), alpha, strict=True)
    ]
    columns = {term: torch.tensor([getattr(c, term) for c in clients]) for term in TERMS}
    sizes = torch.tensor([c.examples for c in clients])
    bound = maths.generalisation_bound(alpha, columns["empirical"], sizes, columns["discrepancy"], columns["joint"], delta)
    with_lemma = bound.total - bound.sample_size + maths.sample_size_term(alpha, sizes, delta, "lemma")
    return clients, CohortBound(bound.total, with_lemma, _ensemble_error(experiment, list(r.teachers.values())))


def _terms(
    experiment: Experiment, k: int, model: tuple[str, Weights], server: tuple[str, Weights], weight: float, delta: float
) -> ClientBound:
    data, own = experiment.data, experiment.data.client(k)
    classes = data.num_classes
    shares = [torch.bincount(labels, minlength=classes).double() / len(labels) for labels in (own.labels, data.test.labels)]
    return ClientBound(
        client=k,
        arch=model[0],
        examples=len(own),
        weight=weight,
        empirical=_error(experiment, model, own),
        sample_size=maths.sample_size_term(torch.ones(1), torch.tensor([len(own)]), delta),
        discrepancy=float(maths.label_discrepancy(*shares)),
        joint=_error(experiment, server, own) + _error(experiment, server, data.test),
    )


def _error(experiment: Experiment, model: tuple[str, Weights], examples: object) -> float:
    return 1 - train.evaluate(experiment.env.build(*model), examples).accuracy


def _ensemble_error(experiment: Experiment, teachers: Sequence[tuple[str, Weights]]) -> float:
    test = experiment.data.test
    logits = torch.stack([train.predict(experiment.env.build(*model), test) for model in teachers])
    return 1 - train.score(experiment.method.ensemble_probs(logits), test.labels).accuracy


def _merged(clients: Sequence[ClientBound]) -> list[ClientBound]:
    """One entry per client, the mean over the cohorts that it was in."""
    by_id: dict[int, list[ClientBound]] = {}
    for c in clients:
        by_id.setdefault(c.client, []).append(c)
    return [_mean(group) for _, group in sorted(by_id.items())]


def _mean(group: Sequence[ClientBound]) -> ClientBound:
    means: Any = {name: float(np.mean([getattr(c, name) for c in group])) for name in ("weight", *TERMS)}
    return replace(group[0], **means)
