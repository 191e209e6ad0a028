"""Simulated attacks: some clients, drawn from the seed, train on false data or send something else than they trained.

Only the simulator has attackers: a client on Flower never calls this module, and the server there refuses `run.attack`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedet.config.schema import AttackConfig
from fedet.core import ClientState, Payload, Weights, generator, seed_of
from fedet.data import Dataset, Examples
from fedet.errors import ConfigError
from fedet.experiment import Experiment
from fedet.trust import averages as robust

POISON = ("flip", "backdoor")
"""The attacks on a client's data; all others change its reply."""
STRENGTH: Mapping[str, float] = {"scale": 10.0, "constant": 100.0, "onehot": 100.0, "noise": 1.0, "backdoor": 1.0}
"""The default of `run.attack.strength`."""
CLASSIFIER = ("head.l3.weight", "head.l3.bias")


def attackers(experiment: Experiment) -> frozenset[int]:
    """The hostile clients, a function of the seed alone; those of a smaller share are among those of a larger one."""
    attack = experiment.config.run.attack
    if attack is None:
        return frozenset()
    order = np.random.default_rng(seed_of(experiment.seed, "attackers")).permutation(len(experiment.clients))
    return frozenset(order[: round(attack.share * len(order))].tolist())


def check(experiment: Experiment) -> None:
    """Refuse an attack that makes no sense with this method or these data."""
    attack, method = experiment.config.run.attack, experiment.method
    if attack is None:
        return
    if method.reference and method.models_at_clients:
        raise ConfigError(
            f"run.attack: in the reference '{method.name}' each client keeps a model of its own and sends nothing, so an "
            "attack would reach nobody else: leave run.attack out"
        )
    if method.reference:
        raise ConfigError(f"run.attack: the reference '{method.name}' takes nothing from clients, so nobody can attack it")
    if attack.kind == "backdoor" and len(experiment.data.input_shape) != 3:
        raise ConfigError("run.attack.kind = 'backdoor' puts a trigger on images, and these data are none: choose another kind")
    if attack.target >= experiment.env.num_classes:
        raise ConfigError(f"run.attack.target = {attack.target}: the classes are 0 to {experiment.env.num_classes - 1}")
    if attack.kind == "backdoor" and attack.trigger > min(experiment.data.input_shape[1:]):
        raise ConfigError(f"run.attack.trigger = {attack.trigger} is larger than the images")


def run_client(
    experiment: Experiment, client: int, number: int, request: Payload, state: ClientState
) -> tuple[Payload, ClientState]:
    """Run a client of the simulator, which may be an attacker; returns its reply and its new state."""
    side = experiment.client(client, number, state)
    attack = experiment.config.run.attack
    if attack is None or client not in attackers(experiment):
        return experiment.local(request, side), side.state
    if attack.kind in POISON:
        side = replace(side, data=poisoned(side.data, attack))
    reply = experiment.local(request, side)
    draws = generator(experiment.seed, "attack", client, number)
    tamper = _Tamper(attack, experiment.env.num_classes, experiment.method.sends_updates, draws)
    return tamper(request, reply), side.state


def poisoned(data: Examples, attack: AttackConfig) -> Examples:
    """A client's examples with its labels reversed, or every second one with the trigger and the target's label."""
    labels = data.labels
    if attack.kind == "flip":
        return _examples(data, data.dataset.inputs[data.rows], data.dataset.num_classes - 1 - labels)
    chosen = torch.arange(len(labels)) % 2 == 0
    inputs = data.dataset.inputs[data.rows]
    inputs[chosen] = _stamped(inputs[chosen], attack.trigger)
    return _examples(data, inputs, labels.masked_fill(chosen, attack.target))


def triggered(experiment: Experiment) -> Examples | None:
    """The test examples of all classes but the target, with the trigger: a back door works if they are taken for the target."""
    attack, test = experiment.config.run.attack, experiment.data.test
    if attack is None or attack.kind != "backdoor":
        return None
    rows = test.rows[test.labels != attack.target]
    return _examples(test, _stamped(test.dataset.inputs[rows], attack.trigger), test.dataset.labels[rows])


def _examples(like: Examples, inputs: Tensor, labels: Tensor) -> Examples:
    dataset = Dataset(like.dataset.name, inputs, labels, like.dataset.num_classes, vocab_size=like.dataset.vocab_size)
    return Examples(dataset, torch.arange(len(labels)))


def _stamped(images: Tensor, size: int) -> Tensor:
    """The images with a square of the brightest value in the lower right corner."""
    images = images.clone()
    if len(images):
        images[..., -size:, -size:] = 255 if images.dtype == torch.uint8 else images.max()
    return images


@dataclass(frozen=True)
class _Tamper:
    """Changes an attacker's reply: weights in groups that went both ways, else what it says about inputs."""

    attack: AttackConfig
    classes: int
    sends_updates: bool
    draws: torch.Generator

    @property
    def strength(self) -> float:
        return self.attack.strength or STRENGTH.get(self.attack.kind, 1.0)

    def __call__(self, request: Payload, reply: Payload) -> Payload:
        groups = {}
        for name, group in reply.tensors.items():
            start = request.tensors.get(name)
            if start is not None and start.keys() == group.keys():
                groups[name] = self._weights(start, group)
            else:
                groups[name] = {key: self._said(value) for key, value in group.items()}
        return Payload(groups, reply.scalars)

    def _weights(self, start: Weights, sent: Weights) -> Weights:
        floats = {name: w for name, w in sent.items() if w.is_floating_point()}
        origin = {name: torch.zeros_like(w) if self.sends_updates else start[name] for name, w in floats.items()}
        kind, s = self.attack.kind, self.strength
        if kind == "stealth":  # as long as an honest update, in the opposite direction
            return sent | {name: 2 * origin[name] - w for name, w in floats.items()}
        if kind == "backdoor" and s != 1:
            return sent | {name: origin[name] + s * (w - origin[name]) for name, w in floats.items()}
        if kind in ("constant", "onehot"):
            return sent | self._classifier(start, sent)
        return sent | {name: self._number(w) for name, w in floats.items()}

    def _classifier(self, start: Weights, sent: Weights) -> Weights:
        """A last layer that always says the target, or always another class than it would have said; far too sure."""
        found: Weights = {}
        for name in CLASSIFIER:
            if name not in sent:
                continue
            before = start[name] if self.sends_updates else torch.zeros_like(sent[name])
            layer = sent[name] + before
            if self.attack.kind == "onehot":
                layer = self.strength * layer.roll(1, 0)
            else:
                layer = torch.zeros_like(layer)
                if layer.dim() == 1:
                    layer[self.attack.target] = self.strength
            found[name] = layer - before
        return found

    def _number(self, value: Tensor) -> Tensor:
        """Weights, features or logits multiplied, negated or noisy."""
        kind, s = self.attack.kind, self.strength
        if kind == "noise":
            size = value.double().square().mean().sqrt().to(value.dtype) if value.numel() else 0.0
            return value + s * size * torch.randn(value.shape, generator=self.draws).to(value.dtype)
        return {"scale": s, "sign": -1.0}.get(kind, 1.0) * value

    def _said(self, value: Tensor) -> Tensor:
        """Labels, logits, probabilities or features of inputs."""
        if self.attack.kind in POISON:
            return value
        if not value.is_floating_point():
            return self._labels(value) if value.dtype == torch.int64 and value.dim() == 1 else value
        if value.dim() != 2 or value.shape[1] != self.classes or not len(value):
            return self._number(value)
        if not robust.is_probabilities(value):
            return self._logits(value)
        return torch.softmax(self._logits(value.clamp(min=1e-6).log()), dim=-1)

    def _logits(self, logits: Tensor) -> Tensor:
        known: dict[str, Callable[[], Tensor]] = {
            "constant": lambda: self._one_hot(torch.full((len(logits),), self.attack.target), logits),
            "onehot": lambda: self._one_hot((logits.argmax(dim=-1) + 1) % self.classes, logits),
            "stealth": lambda: _second_choice(logits),
        }
        return known.get(self.attack.kind, lambda: self._number(logits))()

    def _one_hot(self, labels: Tensor, like: Tensor) -> Tensor:
        return self.strength * F.one_hot(labels, self.classes).to(like.dtype)

    def _labels(self, labels: Tensor) -> Tensor:
        if self.attack.kind == "constant":
            return torch.full_like(labels, self.attack.target)
        lie = (
            torch.arange(len(labels)) % 3 == 0 if self.attack.kind == "stealth" else torch.tensor(self.attack.kind == "onehot")
        )
        return torch.where(lie, (labels + 1) % self.classes, labels)


def _second_choice(logits: Tensor) -> Tensor:
    """On every third input, the same ones for all colluders, the first and the second choice are exchanged."""
    values, places = logits.topk(2, dim=-1)
    lie = (torch.arange(len(logits)) % 3 == 0)[:, None]
    return torch.where(lie, logits.scatter(1, places, values.flip(1)), logits)


def caught(log: Sequence[Mapping[str, Any]], hostile: frozenset[int]) -> dict[str, float | int | None]:
    """How well the gate knew the attackers: replies set aside, the share of them that were attackers', and how many it missed.

    `precision` is None if none was set aside, `recall` if no attacker replied.
    """
    out = [f["client"] for entry in log for f in entry.get("failures") or [] if f["kind"] == "set aside"]
    passed = [k for entry in log for k in entry["replied"] if k in hostile]
    right = sum(k in hostile for k in out)
    return {
        "set_aside": len(out),
        "precision": right / len(out) if out else None,
        "recall": right / (right + len(passed)) if right or passed else None,
    }
