"""Testing a round's models: started where there are processes for it, finished when the scores are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import REMOTE_STATE, ClientStates, Method, Weights
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Record

NamedModel = tuple[str, Weights]
"""A model: its architecture and weights."""
Wait = Callable[[], Tensor]
"""Waits for a model's logits."""


@dataclass(frozen=True)
class RoundModels:
    """All that can be tested after a round: the method's models, those at the round's participants, and the ensemble."""

    experiment: Experiment
    state: Any
    number: int
    ensemble: Sequence[NamedModel]
    participants: ClientStates
    store: ClientStore

    def by_name(self) -> dict[str, Sequence[NamedModel]]:
        """Every model worth testing; of those at clients, all of one name together."""
        return self._by_name(self.participants)

    def output(self) -> NamedModel:
        """The method's output; where it takes a client's part to make one, with the first participant's."""
        return next(iter(self._by_name(self.participants[:1]).values()))[0]

    def _by_name(self, states: ClientStates) -> dict[str, Sequence[NamedModel]]:
        method, env = self.experiment.method, self.experiment.env
        of_server: dict[str, Sequence[NamedModel]] = {name: [m] for name, m in method.models(self.state, env).items()}
        return of_server | dict(method.client_models(self.state, env, states) if states else {})


def client_states(experiment: Experiment, store: ClientStore, clients: Sequence[int]) -> ClientStates:
    """What these clients keep, for a method that has models at its clients; without those that keep it on their own disk."""
    if type(experiment.method).client_models is Method.client_models:
        return []
    states = [(experiment.clients[k], store.get(k)) for k in clients]
    return [(client, own) for client, own in states if REMOTE_STATE not in own]


class Due(NamedTuple):
    """What is tested after a round."""

    output: bool
    every_model: bool
    all_clients: bool


def due(experiment: Experiment, number: int, last: bool) -> Due:
    """Test the output every `eval_every` rounds, with all models and the ensemble every `eval_all_every`.

    The models at all clients are tested every `eval_stored_every` rounds. After the `last` round everything is tested, so
    that final values are of one round.
    """
    run = experiment.config.run
    output = last or number % run.eval_every == 0
    stored = run.eval_stored_every > 0 and (last or number % run.eval_stored_every == 0)
    return Due(output, output and (last or number % run.eval_all_every == 0), output and stored)


def start(models: RoundModels, what: Due) -> Callable[[], Record] | None:
    """Start to test a round's models; returns what waits for the scores, or None if nothing is due."""
    return _start(models, what.every_model, what.all_clients) if what.output else None


def _start(models: RoundModels, every: bool, stored: bool) -> Callable[[], Record]:
    experiment, data = models.experiment, models.experiment.data
    named = list(models.by_name().items())
    val = [_logits(experiment, model, "val") for model in named[0][1]] if data.val is not None else []
    tested = {name: [_logits(experiment, m, "test") for m in group] for name, group in named[: None if every else 1]}
    ensemble = [_logits(experiment, model, "test") for model in models.ensemble] if every else []
    at_all_clients = _at_all_clients(models) if stored else {}

    def finish() -> Record:
        scores: Record = {}
        if val and data.val is not None:
            scores["val_accuracy"] = _mean_score(val, data.val.labels).accuracy
        found = {}
        for done, (name, logits) in enumerate(tested.items()):
            experiment.env.progress("evaluate", done, len(tested))
            found[name] = _mean_score(logits, data.test.labels)
        main = next(iter(found.values()))
        accuracies = {name: score.accuracy for name, score in found.items()}
        if ensemble:
            probs = experiment.method.ensemble_probs(torch.stack([wait() for wait in ensemble]))
            accuracies[experiment.method.ensemble_name] = train.score(probs, data.test.labels).accuracy
        if at_all_clients:
            scores["stored"] = {name: _spread(waits, data.test.labels) for name, waits in at_all_clients.items()}
        return {"accuracy": main.accuracy, "loss": main.loss, **scores, "models": accuracies}

    return finish


def _at_all_clients(models: RoundModels) -> dict[str, list[Wait]]:
    experiment = models.experiment
    states = client_states(experiment, models.store, models.store.clients())
    groups = experiment.method.client_models(models.state, experiment.env, states) if states else {}
    return {name: [_logits(experiment, model, "test") for model in group] for name, group in groups.items()}


def _logits(experiment: Experiment, model: NamedModel, part: Literal["test", "val"]) -> Wait:
    """Have a model's logits computed by workers, from now on, or here, when they are asked for; on one thread either way."""
    if experiment.env.predictor:
        return experiment.env.predictor.predict(*model, part)
    examples = experiment.data.test if part == "test" else experiment.data.val

    def here() -> Tensor:
        assert examples is not None
        with runtime.limit_threads(1):
            return train.predict(experiment.env.build(*model), examples)

    return here


def _mean_score(logits: Sequence[Wait], labels: Tensor) -> train.Score:
    scores = [train.score(wait(), labels) for wait in logits]
    return train.Score(float(np.mean([s.accuracy for s in scores])), float(np.mean([s.loss for s in scores])))


def _spread(logits: Sequence[Wait], labels: Tensor) -> Record:
    found = [train.score(wait(), labels).accuracy for wait in logits]
    return {"clients": len(found), "mean": float(np.mean(found)), "best": max(found)}
