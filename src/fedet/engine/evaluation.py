"""Evaluate a round's models, in worker processes if there are any while the run continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import REMOTE_STATE, ClientInfo, ClientStates, Method, Weights, described, not_named_tensors
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
Part = Literal["test", "val"]
T = TypeVar("T")


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
        _check(method, server_models)
        found: dict[str, Sequence[NamedModel]] = {name: [model] for name, model in server_models.items()}
        return found | dict(method.client_models(self.state, env, states) if states else {})

    def output(self) -> NamedModel | None:
        """The method's output; if it includes a part of a client's model, with the first participant's.

        None if all models are kept at clients: none of them stands for the others.
        """
        if self.experiment.method.models_at_clients:
            return None
        return next(iter(self.by_name(self.participants[:1]).values()))[0]

    def all_clients(self) -> Iterator[ClientStates]:
        """All clients that have a state, with it, as many at a time as a round has: those fit in memory."""
        clients, size = self.store.clients(), self.experiment.config.run.cohort
        for first in range(0, len(clients), size):
            if found := client_states(self.experiment, self.store, clients[first : first + size]):
                yield found


def client_states(experiment: Experiment, store: ClientStore, clients: Sequence[int]) -> ClientStates:
    """These clients' states if the method has models at its clients, without states on a client's own disk."""
    if type(experiment.method).client_models is Method.client_models:
        return []
    states = [(experiment.clients[k], store.get(k)) for k in clients]
    return [(client, own) for client, own in states if REMOTE_STATE not in own]


def _check(method: Any, models: Any) -> None:
    """Raise an error for models that are none: whatever the method gave."""
    who, how = f"'{type(method).__name__}.models'", "such as {'server': (env.large, state)}"
    if not isinstance(models, Mapping):
        raise FedetError(f"{who} returned {described(models)}: return a dict of (architecture, weights) by name, {how}")
    if not models and not method.models_at_clients:
        raise FedetError(f"{who} returned no model: return one, {how}, or set models_at_clients = True")
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
    if models.experiment.method.models_at_clients:
        scores = _kept_by_clients(models)
        return (lambda: scores) if scores else None
    stored = _stored(*_at_all_clients(models, _scorer(models.experiment, "test"))) if what.all_clients else {}
    return _start(models, list(models.by_name().items()), what.every_model, stored)


def _start(
    models: RoundModels, named: Sequence[tuple[str, Sequence[NamedModel]]], every: bool, stored: Record
) -> Callable[[], Record]:
    experiment, data = models.experiment, models.experiment.data
    val = [_logits(experiment, model, "val") for model in named[0][1]] if data.val is not None else []
    evaluated = {name: [_logits(experiment, m, "test") for m in group] for name, group in named[: None if every else 1]}
    ensemble = [_logits(experiment, model, "test") for model in models.ensemble] if every else []
    if every:  # these logits are used twice
        evaluated[named[0][0]] = [cache(wait) for wait in evaluated[named[0][0]]]
    back_door = _backdoor_success(experiment, named[0][1])

    def finish() -> Record:
        scores = stored | ({"backdoor": float(np.mean(back_door))} if back_door else {})
        if every:
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
        return {"accuracy": main.accuracy, "loss": main.loss, **scores, "models": accuracies}

    return finish


def _kept_by_clients(models: RoundModels) -> Record:
    """The scores where all models are kept at clients; empty if there are none yet."""
    experiment = models.experiment
    found, clients = _at_all_clients(models, _scorer(experiment, "test"))
    if not found:
        return {}
    main = _mean(next(iter(found.values())))
    scores: Record = {"accuracy": main.accuracy, "loss": main.loss, **_stored(found, clients)}
    if experiment.data.val is not None:
        scores["val_accuracy"] = _mean(next(iter(_at_all_clients(models, _scorer(experiment, "val"))[0].values()))).accuracy
    if experiment.config.run.attack:
        back_door = next(iter(_at_all_clients(models, lambda group: _backdoor_success(experiment, group))[0].values()))
        scores |= {"backdoor": float(np.mean(back_door))} if back_door else {}
    return scores | {"models": {name: _mean(group).accuracy for name, group in found.items()}}


def _backdoor_success(experiment: Experiment, models: Sequence[NamedModel]) -> list[float]:
    """How often each takes a test image with the trigger for the attackers' class; empty without such an attack.

    It is computed at once, in this process and on one thread, so that it is the same with and without workers.
    """
    attack, data = experiment.config.run.attack, attacks.triggered(experiment)
    if attack is None or data is None or not len(data):
        return []
    with runtime.limit_threads(1):
        logits = [train.predict(experiment.env.build(*model, "backdoor"), data) for model in models]
    return [float((one.argmax(dim=-1) == attack.target).double().mean()) for one in logits]


def _at_all_clients(
    models: RoundModels, score: Callable[[Sequence[NamedModel]], list[T]]
) -> tuple[dict[str, list[T]], list[ClientInfo]]:
    """The scores of the models at all clients, by name, and these clients."""
    experiment, clients = models.experiment, []
    found: dict[str, list[T]] = {}
    for states in models.all_clients():
        clients += [client for client, _ in states]
        for name, group in experiment.method.client_models(models.state, experiment.env, states).items():
            found.setdefault(name, []).extend(score(group))
    return found, clients


def _scorer(experiment: Experiment, part: Part) -> Callable[[Sequence[NamedModel]], list[train.Score]]:
    """What scores models on a part of the data."""
    examples = experiment.data.test if part == "test" else experiment.data.val
    assert examples is not None
    return lambda models: _scores([_logits(experiment, model, part) for model in models], examples.labels)


def _logits(experiment: Experiment, model: NamedModel, part: Part) -> Wait:
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


def _stored(found: Mapping[str, Sequence[train.Score]], clients: Sequence[ClientInfo]) -> Record:
    """The entry on the models at all clients; empty if there are none."""
    return {"stored": {name: _spread(scores, clients) for name, scores in found.items()}} if found else {}


def _spread(scores: Sequence[train.Score], clients: Sequence[ClientInfo]) -> Record:
    """The accuracies of the models at these clients: mean, best, mean of the worst tenth, mean weighted by examples."""
    found = [s.accuracy for s in scores]
    worst = sorted(found)[: max(1, len(found) // 10)]
    spread = {"clients": len(found), "mean": float(np.mean(found)), "best": max(found), "worst_tenth": float(np.mean(worst))}
    if len(clients) == len(found):  # a method may have more or fewer models than clients
        spread["weighted"] = float(np.average(found, weights=[client.num_examples for client in clients]))
    return spread
