"""Differential privacy at the clients: DP-SGD, noise on whole updates, and what either costs by Opacus' accountant.

Two mechanisms, which can be combined. DP-SGD (Abadi et al., CCS 2016) protects single examples: every step draws each of the
client's examples with the same probability (Poisson sampling, which the accountant assumes), clips the gradient of each to the
norm C and adds Gaussian noise of standard deviation `noise` * C to their sum. Whatever is computed from the trained model, in
the same round or a later one, costs nothing more. Noise on updates protects a client as a whole: the difference between the
model it received and the one it sends is clipped to a norm, and noise is added before it is sent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import secrets
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedet.config.schema import PrivacyConfig
from fedet.core import Payload, Weights, generator
from fedet.errors import ConfigError
from fedet.models import kernels

MOST_GRADIENTS = 1 << 25
"""Numbers in the gradients of single examples that are in memory at the same time: 128 MB."""


Loss = Callable[[Any, Any, Tensor], Tensor]


@dataclass(frozen=True)
class DPSGD:
    """The steps of one client's private training."""

    settings: PrivacyConfig
    size: int
    batch: int
    g: torch.Generator

    @classmethod
    def of(cls, settings: PrivacyConfig, size: int, batch: int, seed: int) -> DPSGD:
        """For `size` examples and batches of `batch` in the mean; sampling and noise are drawn from the seed."""
        return cls(settings, size, min(batch, size), _generator(settings, seed, "dp"))

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Positions of the examples that were drawn, of none at times."""
        for _ in range(steps):
            if (taken := _counter.get()) is not None:
                taken.add(self.batch)
            yield (torch.rand(self.size, generator=self.g) < self.batch / self.size).nonzero().squeeze(-1)

    def backward(self, loss: Loss, model: Any, data: Any, index: Tensor) -> Tensor:
        """Set the model's gradients to the noisy mean of the examples' clipped ones; returns the mean loss of the examples."""
        total, sums = torch.zeros((), device=model.device), [torch.zeros_like(p) for p in model.parameters()]
        for part in torch.split(index, max(1, MOST_GRADIENTS // sum(p.numel() for p in model.parameters()))):
            if not len(part):
                continue
            gradients, losses = example_gradients(loss, model, data, part)
            total += losses.sum()
            for whole, clipped in zip(sums, clip_each(gradients, self.settings.clip), strict=True):
                whole += clipped
        for parameter, whole in zip(model.parameters(), sums, strict=True):
            parameter.grad = (whole + self._noise(whole)) / self.batch  # not by how many were drawn: that number is private
        return total / max(len(index), 1)

    def _noise(self, like: Tensor) -> Tensor:
        return gaussian(like, self.settings.noise * self.settings.clip, self.g)


class _Example:
    """One example that is being differentiated, as data of a single row whatever its index."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self.labels = x.unsqueeze(0), y.unsqueeze(0)

    def __len__(self) -> int:
        return 1

    def inputs(self, index: Tensor) -> Tensor:
        """The input."""
        return self._x

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The input and its label."""
        return self._x, self.labels


class _Objective(nn.Module):
    """A loss as a module, so that `functional_call` can put other tensors in place of the model's weights."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return self.loss(self.model, _Example(x, y), index.unsqueeze(0))


def example_gradients(loss: Loss, model: Any, data: Any, index: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradient of each example's loss, per parameter of the model (examples, *shape), and the losses."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError("a model with batch normalisation has no gradients of single examples: use norm = 'group' or 'none'")
    objective = _Objective(model, loss)
    names = [name for name, _ in objective.named_parameters()]
    weights = {name: p.detach() for name, p in objective.named_parameters()}
    inputs, labels = (t.to(model.device) for t in data.batch(index))

    def one(weights: Weights, x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(objective, weights, (x, y, i))
        return value

    of_one = torch.func.grad_and_value(one)
    with kernels.plain():
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # which vmap can't do
            found = [of_one(weights, *row) for row in zip(inputs, labels, index, strict=True)]
            return [torch.stack([g[name] for g, _ in found]) for name in names], torch.stack([v for _, v in found])
        many = torch.func.vmap(of_one, in_dims=(None, 0, 0, 0), randomness="different")
        gradients, losses = many(weights, inputs, labels, index)
    return [gradients[name] for name in names], losses


def clip_each(gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
    """The sum over examples of their gradients, each clipped to this norm over all parameters; 0 means no clipping."""
    if not norm:
        return [g.sum(dim=0) for g in gradients]
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    scale = (norm / norms.clamp(min=1e-12)).clamp(max=1.0)
    return [torch.tensordot(scale, g, dims=1) for g in gradients]


def gaussian(like: Tensor, deviation: float, g: torch.Generator) -> Tensor:
    """Noise of this shape, drawn on the CPU, so that it is the same on every device."""
    return (torch.randn(like.shape, generator=g, dtype=like.dtype) * deviation).to(like.device)


def private_update(settings: PrivacyConfig, down: Payload, up: Payload, seed: int) -> Payload:
    """The reply with the model's change since the request clipped to `update_clip`, and noise added to it."""
    if not settings.update_clip:
        return up
    before, after = down.tensors["model"], up.tensors["model"]
    g = _generator(settings, seed, "update")
    change = {name: w - before[name] for name, w in after.items() if w.is_floating_point()}
    norm = float(torch.stack([c.double().norm() for c in change.values()]).norm())
    scale, deviation = min(1.0, settings.update_clip / max(norm, 1e-12)), settings.update_noise * settings.update_clip
    sent = {name: before[name] + scale * c + gaussian(c, deviation, g) for name, c in change.items()}
    # Integers, such as counters, are not weights: the received ones go back.
    return Payload({"model": {name: sent.get(name, before[name]) for name in after}})


def _generator(settings: PrivacyConfig, seed: int, purpose: str) -> torch.Generator:
    """Random numbers from the client's seed; with `secret`, from the operating system, so that nobody can repeat them."""
    return torch.Generator().manual_seed(secrets.randbits(63)) if settings.secret else generator(seed, purpose)


@functools.lru_cache(maxsize=65536)
def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Opacus' epsilon for so many steps of the Gaussian mechanism on samples of this rate, by Renyi accounting."""
    if not steps:
        return 0.0
    if not noise:
        return math.inf
    orders = _opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    convert = _opacus("accountants.analysis.rdp").get_privacy_spent
    with warnings.catch_warnings():  # at the first or last of its orders the epsilon still holds, it only could be smaller
        warnings.simplefilter("ignore")
        spent, _ = convert(orders=orders, rdp=steps * _one_step(noise, rate), delta=delta)
    return float(spent)


@functools.lru_cache(maxsize=65536)
def _one_step(noise: float, rate: float) -> Any:
    """The Renyi divergences of one step, which add up over steps; a quarter of a second each, so they are kept."""
    orders = _opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    return _opacus("accountants.analysis.rdp").compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


def check_installed() -> None:
    """Raise an error if Opacus is missing, before a run that needs it begins."""
    _opacus("accountants")


def _opacus(module: str) -> Any:
    try:
        return importlib.import_module(f"opacus.{module}")
    except ImportError:
        raise ConfigError("privacy.noise and privacy.update_noise need Opacus: pip install 'fedet[dp]'") from None


@dataclass(frozen=True)
class Spending:
    """What the clients of a run have spent: `batch` and `steps` are those of their training on private examples."""

    settings: PrivacyConfig
    sizes: Sequence[int]
    batch: int
    steps: int

    def of(self, client: int, participations: int) -> dict[str, float | None]:
        """The client's epsilons after this many participations, None for no guarantee; those of mechanisms in use only."""
        s, size = self.settings, self.sizes[client]
        out: dict[str, float] = {}
        if s.clip:
            rate = min(self.batch, size) / size
            out["epsilon"] = epsilon(s.noise, rate, participations * self.steps, s.delta)
        if s.update_clip:
            out["client_epsilon"] = epsilon(s.update_noise, 1.0, participations, s.delta)
        return {name: value if math.isfinite(value) else None for name, value in out.items()}

    def clients(self, participations: Mapping[int, int]) -> dict[int, dict[str, float | None]]:
        """Those of every client that was asked to train."""
        return {client: self.of(client, count) for client, count in sorted(participations.items())}

    def summary(self, participations: Mapping[int, int]) -> dict[str, Any]:
        """What a run's result says: epsilons per client, and their spread."""
        clients = self.clients(participations)
        named = {str(k): own for k, own in clients.items()}  # as JSON has it
        return {"delta": self.settings.delta, "secret": self.settings.secret, **spread(clients), "clients": named}


class Participations:
    """How often each client was asked to train, whatever became of its reply: it may have been sent.

    So rounds count that were lost, or never finished because the run was stopped. One that is played again has the same noise,
    which reveals nothing more, unless the noise is `secret`: then it is new noise, and counts again.
    """

    def __init__(self, secret: bool, asked: Iterable[Mapping[str, Any]], finished: Iterable[Mapping[str, Any]]) -> None:
        """From the folder's lines on who was asked, and the metrics of the rounds that were finished."""
        self.secret, self.total = secret, Counter[int]()
        self._rounds: dict[int, Counter[int]] = {}
        for line in asked:
            self.ask(line["round"], line["clients"])
        for entry in finished:
            self.finish(entry["round"], entry["cohort"])

    def ask(self, number: int, clients: Iterable[int]) -> None:
        """Count these clients of a round that is being played, perhaps again."""
        self._add(number, [k for k in clients if self.secret or not self._of(number)[k]])

    def finish(self, number: int, cohort: Iterable[int]) -> None:
        """Count a finished round's clients that were not counted when they were asked, as in folders of older versions."""
        self._add(number, [k for k in cohort if not self._of(number)[k]])

    def _of(self, number: int) -> Counter[int]:
        return self._rounds.setdefault(number, Counter())

    def _add(self, number: int, clients: Sequence[int]) -> None:
        self._of(number).update(clients)
        self.total.update(clients)


class StepsTaken:
    """Counts the private steps of one reply, of which the accountant knows only what the method's settings say."""

    def __init__(self) -> None:
        self.steps = self.largest = 0

    def add(self, batch: int) -> None:
        """Count a step with batches of this size in the mean."""
        self.steps, self.largest = self.steps + 1, max(self.largest, batch)


_counter: ContextVar[StepsTaken | None] = ContextVar("private steps", default=None)


@contextlib.contextmanager
def counted_steps() -> Iterator[StepsTaken]:
    """Count the private steps that are taken in the block."""
    token = _counter.set(taken := StepsTaken())
    try:
        yield taken
    finally:
        _counter.reset(token)


def spread(clients: Mapping[int, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """The largest and the median of each epsilon; None if a client has no guarantee."""
    out: dict[str, dict[str, float | None]] = {}
    for name in next(iter(clients.values()), {}):
        values = [own[name] for own in clients.values()]
        known = [v for v in values if v is not None]
        some = len(known) < len(values)
        out[name] = {"max": None, "median": None} if some else {"max": max(known), "median": statistics.median(known)}
    return out
