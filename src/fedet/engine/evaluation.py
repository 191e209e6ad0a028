"""Evaluate a round's models, in worker processes if there are any while the run continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import REMOTE_STATE, ClientStates, Method, Weights, described, not_named_tensors
from fedet.engine import breakdown
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Record
from fedet.trust import attacks

NamedModel = tuple[str, Weights]
"""A model: its architecture and weights."""
Wait = Callable[[], Tensor]
"""A function that waits for a model's logits."""


@dataclass(frozen=True)
class RoundModels:
    """The models that can be evaluated after a round: the method's, those at the participants, and the ensemble."""

    experiment: Experiment
    state: Any
    number: int
    ensemble: Sequence[NamedModel]
    participants: ClientStates
    store: ClientStore

    def by_name(self, clients: ClientStates | None = None) -> dict[str, Sequence[NamedModel]]:
        """All models of the method, grouped by name: the server's, and those at these clients (default: the participants)."""
        states = self.participants if clients is None else clients
        method, env = self.experiment.method, self.experiment.env
        server_models = method.models(self.state, env)
        _check(f"'{type(method).__name__}.models'", server_models)
        found: dict[str, Sequence[NamedModel]] = {name: [model] for name, model in server_models.items()}
        return found | dict(method.client_models(self.state, env, states) if states else {})

    def output(self) -> NamedModel | None:
        """The method's output; if it includes a part of a client's model, with the first participant's.

        None if all models are kept at clients: none of them stands for the others.
        """
        if self.experiment.method.models_at_clients:
            return None
        return next(iter(self.by_name(self.participants[:1]).values()))[0]

    def everyone(self) -> ClientStates:
        """All clients that have a state, with it."""
        return client_states(self.experiment, self.store, [k for k in self.store.clients() if self.store.get(k)])


def client_states(experiment: Experiment, store: ClientStore, clients: Sequence[int]) -> ClientStates:
    """These clients' states if the method has models at its clients, without states on a client's own disk."""
    if type(experiment.method).client_models is Method.client_models:
        return []
    states = [(experiment.clients[k], store.get(k)) for k in clients]
    return [(client, own) for client, own in states if REMOTE_STATE not in own]


def _check(who: str, models: Any) -> None:
    """Raise an error for models that are none: whatever the method gave."""
    how = "such as {'server': (env.large, state)}"
    if not isinstance(models, Mapping):
        raise FedetError(f"{who} returned {described(models)}: return a dict of (architecture, weights) by name, {how}")
    for name, model in models.items():
        if not (isinstance(model, tuple | list) and len(model) == 2 and isinstance(model[0], str)):
            raise FedetError(f"{who} has {described(model)} as '{name}': it must be (architecture, weights), {how}")
        if problem := not_named_tensors("weights", model[1]):
            raise FedetError(f"{who}: the model '{name}' {problem}")


class Due(NamedTuple):
    """Which models are evaluated after a round."""

    output: bool
    every_model: bool
    all_clients: bool


def due(experiment: Experiment, number: int, last: bool) -> Due:
    """The output is evaluated every `eval_every` rounds, all models and the ensemble every `eval_all_every`.

    The models at all clients are evaluated every `eval_stored_every` rounds. After the `last` round everything is evaluated,
    so that all final values are from the same round.
    """
    if experiment.method.models_at_clients:
        return Due(last, last, last)
    run = experiment.config.run
    output = last or number % run.eval_every == 0
    stored = run.eval_stored_every > 0 and (last or number % run.eval_stored_every == 0)
    return Due(output, output and (last or number % run.eval_all_every == 0), output and stored)


def start(models: RoundModels, what: Due) -> Callable[[], Record] | None:
    """Start evaluating a round's models; returns a function that waits for the scores, or None if nothing is due."""
    if not what.output:
        return None
    everyone = models.everyone() if what.all_clients else []
    named = models.by_name(everyone if models.experiment.method.models_at_clients else None)
    return _start(models, list(named.items()), what.every_model, everyone) if named else None


def _start(
    models: RoundModels, named: Sequence[tuple[str, Sequence[NamedModel]]], every: bool, everyone: ClientStates
) -> Callable[[], Record]:
    experiment, data = models.experiment, models.experiment.data
    val = [_logits(experiment, model, "val") for model in named[0][1]] if data.val is not None else []
    evaluated = {name: [_logits(experiment, m, "test") for m in group] for name, group in named[: None if every else 1]}
    ensemble = [_logits(experiment, model, "test") for model in models.ensemble] if every else []
    detailed = every and not experiment.method.models_at_clients
    if detailed:  # these logits are used twice
        evaluated[named[0][0]] = [cache(wait) for wait in evaluated[named[0][0]]]
    back_door = _backdoor_success(experiment, named[0][1])
    at_all_clients = {} if experiment.method.models_at_clients else _at_all_clients(models, everyone)

    def finish() -> Record:
        scores: Record = {} if back_door is None else {"backdoor": back_door}
        if detailed:
            output = torch.stack([wait() for wait in evaluated[named[0][0]]])
            scores |= breakdown.of_output(experiment, output.argmax(dim=-1))
        if val and data.val is not None:
            scores["val_accuracy"] = _mean(_scores(val, data.val.labels)).accuracy
        found = {}
        for done, (name, logits) in enumerate(evaluated.items()):
            experiment.env.progress("evaluate", done, len(evaluated))
            found[name] = _scores(logits, data.test.labels)
        main = _mean(next(iter(found.values())))
        accuracies = {name: _mean(group).accuracy for name, group in found.items()}
        if ensemble:
            probs = experiment.method.ensemble_probs(torch.stack([wait() for wait in ensemble]))
            accuracies[experiment.method.ensemble_name] = train.score(probs, data.test.labels).accuracy
        kept = {name: _scores(waits, data.test.labels) for name, waits in at_all_clients.items()}
        if kept or experiment.method.models_at_clients:
            scores["stored"] = {name: _spread(group, everyone) for name, group in (kept or found).items()}
        return {"accuracy": main.accuracy, "loss": main.loss, **scores, "models": accuracies}

    return finish


def _backdoor_success(experiment: Experiment, models: Sequence[NamedModel]) -> float | None:
    """How often these models take a test image with the trigger for the attackers' class; None without such an attack.

    It is computed at once, in this process and on one thread, so that it is the same with and without workers.
    """
    attack, data = experiment.config.run.attack, attacks.triggered(experiment)
    if attack is None or data is None or not len(data):
        return None
    with runtime.limit_threads(1):
        logits = [train.predict(experiment.env.build(*model, "backdoor"), data) for model in models]
    return float(np.mean([float((one.argmax(dim=-1) == attack.target).double().mean()) for one in logits]))


def _at_all_clients(models: RoundModels, everyone: ClientStates) -> dict[str, list[Wait]]:
    experiment = models.experiment
    groups = experiment.method.client_models(models.state, experiment.env, everyone) if everyone else {}
    return {name: [_logits(experiment, model, "test") for model in group] for name, group in groups.items()}


def _logits(experiment: Experiment, model: NamedModel, part: Literal["test", "val"]) -> Wait:
    """Start computing a model's logits in workers, or compute them here when needed; on one thread either way."""
    if experiment.env.predictor:
        return experiment.env.predictor.predict(*model, part)
    examples = experiment.data.test if part == "test" else experiment.data.val

    def compute() -> Tensor:
        assert examples is not None
        with runtime.limit_threads(1):
            return train.predict(experiment.env.build(*model), examples)

    return compute


def _scores(logits: Sequence[Wait], labels: Tensor) -> list[train.Score]:
    return [train.score(wait(), labels) for wait in logits]


def _mean(scores: Sequence[train.Score]) -> train.Score:
    return train.Score(float(np.mean([s.accuracy for s in scores])), float(np.mean([s.loss for s in scores])))


def _spread(scores: Sequence[train.Score], clients: ClientStates) -> Record:
    """The accuracies of the models at these clients: mean, best, mean of the worst tenth, mean weighted by examples."""
    found = [s.accuracy for s in scores]
    worst = sorted(found)[: max(1, len(found) // 10)]
    spread = {"clients": len(found), "mean": float(np.mean(found)), "best": max(found), "worst_tenth": float(np.mean(worst))}
    if len(clients) == len(found):  # a method may have more or fewer models than clients
        spread["weighted"] = float(np.average(found, weights=[client.num_examples for client, _ in clients]))
    return spread
