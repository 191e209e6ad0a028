"""Testing a round's models: begun where there are processes for it, finished when the result is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedet import maths, runtime, train
from fedet.core import ClientStates, Round, Weights
from fedet.experiment import Experiment
from fedet.storage.metrics import Record

Named = tuple[str, Weights]
"""A model: its architecture and weights."""


def begin(
    experiment: Experiment, state: Any, r: Round, kept: ClientStates, stored: Callable[[], ClientStates]
) -> Callable[[], Record] | None:
    """Begin to test the method's models: the first every `eval_every` rounds, all and the ensemble every `eval_all_every`.

    Where the round's participants `kept` models, those of all clients, `stored`, are tested every `eval_stored_every` rounds.
    What waits for the scores is returned, or nothing if there are none.
    """
    how, data = experiment.config.run, experiment.data
    if r.number % how.eval_every and r.number != how.rounds:
        return None
    named = list(candidates(experiment, state, kept).items())
    every = r.number % how.eval_all_every == 0
    first = named[0][1]
    val = [_logits(experiment, model, "val") for model in first] if data.val is not None else []
    asked = {name: [_logits(experiment, model, "test") for model in models] for name, models in named[: None if every else 1]}
    ensemble = [_logits(experiment, model, "test") for model in r.teachers.values()] if every else []
    everyone = stored() if kept and how.eval_stored_every and r.number % how.eval_stored_every == 0 else []
    far = experiment.method.client_models(state, experiment.env, everyone) if everyone else {}
    afar = {name: [_logits(experiment, model, "test") for model in models] for name, models in far.items()}

    def finish() -> Record:
        scores: Record = {}
        if val and data.val is not None:
            scores["val_accuracy"] = _mean_score(val, data.val.labels).accuracy
        found = {}
        for done, (name, logits) in enumerate(asked.items()):
            experiment.env.progress("evaluate", done, len(asked))
            found[name] = _mean_score(logits, data.test.labels)
        main = next(iter(found.values()))
        by_name = {name: s.accuracy for name, s in found.items()}
        if ensemble:
            together = "ensemble" if hasattr(experiment.method, "combine") else "consensus"
            by_name[together] = train.score(combined(experiment, [wait() for wait in ensemble]), data.test.labels).accuracy
        if afar:
            scores["stored"] = {name: _spread(waits, data.test.labels) for name, waits in afar.items()}
        return {"accuracy": main.accuracy, "loss": main.loss, **scores, "models": by_name}

    return finish


def candidates(experiment: Experiment, state: Any, kept: ClientStates) -> dict[str, Sequence[Named]]:
    """Every model worth evaluating; where participants hold models of their own, those of one name are averaged over."""
    method, env = experiment.method, experiment.env
    of_clients = method.client_models(state, env, kept) if kept else {}
    of_server: dict[str, Sequence[Named]] = {name: [model] for name, model in method.models(state, env).items()}
    return of_server | dict(of_clients)


def combined(experiment: Experiment, logits: Sequence[Tensor]) -> Tensor:
    """What an ensemble with these logits says: its weighted consensus, or as the method combines."""
    ensemble_probs = getattr(experiment.method, "combine", lambda z: maths.consensus(torch.softmax(z, dim=-1)).probs)
    probs: Tensor = ensemble_probs(torch.stack(list(logits)))
    return probs


def _logits(experiment: Experiment, model: Named, part: Literal["test", "val"]) -> Callable[[], Tensor]:
    """Have a model's logits computed elsewhere, from now on, or here, when they are asked for; on one thread either way."""
    if experiment.env.predictor:
        return experiment.env.predictor.predict(*model, part)

    def here() -> Tensor:
        with runtime.limit_threads(1):
            return train.predict(experiment.env.build(*model), getattr(experiment.data, part))

    return here


def _mean_score(logits: Sequence[Callable[[], Tensor]], labels: Tensor) -> train.Score:
    scores = [train.score(wait(), labels) for wait in logits]
    return train.Score(*(float(np.mean([getattr(s, name) for s in scores])) for name in ("accuracy", "loss")))


def _spread(logits: Sequence[Callable[[], Tensor]], labels: Tensor) -> Record:
    found = [train.score(wait(), labels).accuracy for wait in logits]
    return {"clients": len(found), "mean": float(np.mean(found)), "best": max(found)}
