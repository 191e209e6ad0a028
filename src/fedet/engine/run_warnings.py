"""What a run warns about: data, models and results that are probably not what the user meant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fedet.data import FederatedData
from fedet.experiment import Experiment
from fedet.storage.metrics import Record

LISTED = 5
"""How many classes a warning lists."""
ROUNDS = 10
"""After fewer rounds it is no surprise if a model has learned nothing."""


def before(experiment: Experiment) -> list[str]:
    """Warnings about the data and the models of an experiment."""
    data = [] if experiment.config.flower.own_data else [*_about_labels(experiment.data)]
    return [*data, *_about_sizes(experiment), *_about_defences(experiment)]


def after(experiment: Experiment, metrics: Sequence[Record]) -> list[str]:
    """Warnings at the end of a run: about rounds that were lost, and models no better than always predicting one class."""
    return [*_about_lost_rounds(metrics), *_about_models(experiment, metrics)]


def _about_lost_rounds(metrics: Sequence[Record]) -> Iterator[str]:
    lost = [entry for entry in metrics if entry["lost"]]
    if lost and 2 * len(lost) >= len(metrics):
        yield f"{len(lost)} of {len(metrics)} rounds were lost, and the state did not change in them: {why_lost(lost)}"


def why_lost(entries: Sequence[Record]) -> str:
    """Why these rounds were lost: the most frequent reason, and a suspect, or else one example of the most frequent failure."""
    reasons = [entry["why_lost"] for entry in entries if "why_lost" in entry]
    reason = Counter(reasons).most_common(1)[0][0] if reasons else "no client replied"
    failures = [failure for entry in entries for failure in entry["failures"]]
    if not failures:
        return reason
    suspects = [failure for failure in failures if failure["kind"] == "suspect"]
    kind, _ = Counter(failure["kind"] for failure in suspects or failures).most_common(1)[0]
    example = next(failure for failure in failures if failure["kind"] == kind)
    return f"{reason}; {kind}, client {example['client']}: {example['why']}"


def _about_models(experiment: Experiment, metrics: Sequence[Record]) -> list[str]:
    share = experiment.data.majority
    if share is None or share == 1 or len(metrics) < ROUNDS:
        return []
    noise = 2 * math.sqrt(share * (1 - share) / len(experiment.data.test))  # two standard deviations
    return [
        f"after {len(metrics)} rounds the model '{name}' is no better than chance: its accuracy is {accuracy:.3f}, and the "
        f"most frequent class has {share:.3f} of the test examples; check the learning rates and the numbers of steps"
        for name, accuracy in metrics[-1].get("models", {}).items()
        if name != experiment.method.ensemble_name and accuracy <= share + noise
    ]


def _about_labels(data: FederatedData) -> Iterator[str]:
    present = np.unique(data.dataset.labels.numpy())
    missing = data.num_classes - len(present)
    if len(present) == 1:
        yield f"all examples of {data.dataset.name} have the label {present[0]}: there is nothing to learn"
    elif missing and data.num_classes == present[-1] + 1:
        yield (
            f"{missing:,} of the labels 0 to {present[-1]:,} never occur in {data.dataset.name}, and the models have "
            f"{data.num_classes:,} outputs: number the classes from 0 without gaps"
        )
    nobody = np.setdiff1d(present, np.unique(data.dataset.labels.numpy()[data.parts.rows]))
    if len(nobody):
        classes = ", ".join(map(str, nobody[:LISTED])) + (f" and {len(nobody) - LISTED} more" if len(nobody) > LISTED else "")
        yield f"no client has examples of class {classes}: no model can learn to recognise it from the clients"


def _about_defences(experiment: Experiment) -> Iterator[str]:
    method, settings = experiment.method, experiment.config.run
    if method.reference and (settings.robust or settings.ban_after):
        does = "lets each client train alone" if method.models_at_clients else "asks clients for nothing"
        yield f"run.robust and run.ban_after change nothing here: the reference '{method.name}' {does}, so no reply is judged"


def _about_sizes(experiment: Experiment) -> Iterator[str]:
    env, method = experiment.env, experiment.method
    server, client = env.model_cache.num_params(env.large), env.model_cache.num_params(env.largest)
    if method.traits.larger_server and server < client:
        yield (
            f"the server's model '{env.large}' has {server:,} parameters, fewer than the clients' '{env.largest}' with "
            f"{client:,}: method '{method.name}' is meant for a server model that is larger than the clients'"
        )
