"""The loops over batches: training, prediction and evaluation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedet import maths, runtime
from fedet.core import Allocator, Env, Round, Weights, generator, seed_of
from fedet.data import Examples
from fedet.data.resident import resident
from fedet.models import Net, channels_last
from fedet.privacy import DPSGD
from fedet.runtime import keep_freed_memory

TOKENS = 8192
"""Word pieces per batch when a text model predicts; batch composition changes floating-point rounding."""

CHUNK = 2000
"""Rows that are predicted together; with fixed chunks, several processes that share the work form the same batches as one."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Training:
    """How a model is trained: `steps` mini-batches with a new optimiser."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    batch: Annotated[int, Field(ge=1)] = 64
    steps: Annotated[int, Field(ge=0)] = 30
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0
    schedule: Literal["constant", "cosine"] = "constant"


class InputSource(Protocol):
    """Data whose inputs can be read by index."""

    def __len__(self) -> int: ...

    def inputs(self, index: Tensor) -> Tensor:
        """A batch, ready for a model."""
        ...


class PublicInputs(Protocol):
    """Public inputs as rounds see them: `Public` itself, or `MixedViews` of it."""

    def __len__(self) -> int: ...

    def subset(self, round: int, rows: Tensor, allocate: Allocator = torch.empty) -> InputSource:
        """A round's inputs at these rows (ascending), addressed by their position among all; the latest ones are cached."""
        ...


Loss = Callable[[Any, Any, Tensor], Tensor]
"""The mean loss of a model on the rows `index` of the data."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation."""

    accuracy: float
    loss: float


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device; a copy to a GPU is asynchronous."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if tensor.is_cpu and device.type == "cuda" else tensor.to(device)


def forward(model: Net, data: InputSource, index: Tensor) -> Tensor:
    """The model's logits for these rows of the data."""
    logits: Tensor = model(to_device(data.inputs(index), model.device))
    return logits


def cross_entropy(model: Net, data: Any, index: Tensor) -> Tensor:
    """Cross-entropy to the labels, the default loss."""
    inputs, labels = data.batch(index)
    return F.cross_entropy(model(to_device(inputs, model.device)), to_device(labels, model.device))


def calibrated(labels: Tensor, strength: float, mix: float = 0.0) -> Loss:
    """Cross-entropy of logits to which `maths.label_offset` of these labels is added.

    With `mix`, each input is mixed with another one of its batch, in shares from Beta(mix, mix), and both labels count.
    """

    def loss(model: Net, data: Any, index: Tensor) -> Tensor:
        inputs, wanted = data.batch(index)
        if mix:
            partner, share = _pairs(len(index), mix)
            inputs = torch.lerp(inputs[partner], inputs, share.view(-1, *[1] * (inputs.dim() - 1)))
        logits = model(to_device(inputs, model.device))
        offset = maths.label_offset(torch.bincount(labels, minlength=logits.shape[-1]), strength)
        logits, wanted = logits + to_device(offset, model.device), to_device(wanted, model.device)
        if mix:
            return maths.mixup_loss(logits, wanted, wanted[partner], to_device(share, model.device))
        return F.cross_entropy(logits, wanted)

    return loss


def _pairs(n: int, beta: float) -> tuple[Tensor, Tensor]:
    """For each of n inputs another one, and its own share from Beta(beta, beta); from torch's generator, which `fit` seeds."""
    return torch.randperm(n), torch.distributions.Beta(beta, beta).sample((n,))


def fit(
    model: Net,
    data: InputSource,
    settings: Training,
    *,
    seed: int,
    loss: Loss | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[int], bool] | None = None,
) -> float:
    """Train in place on `settings.steps` batches, by default on cross-entropy, and return the mean loss.

    It may be NaN, because clients' replies are checked on arrival. `stop` is called after each step and can end the training.
    """
    keep_freed_memory()
    loss = loss or cross_entropy
    model.train()
    dp = _dp(data, settings, seed)
    backward, indices = (dp.backward, dp.batches(settings.steps)) if dp else (_backward, _indices(len(data), settings, seed))
    data = resident(data, settings.steps * settings.batch, last=channels_last(model))
    parameters: list[Tensor] = list(model.parameters())
    is_text = _lengths(model) is not None
    update = _sgd(parameters, settings) if settings.optimiser == "sgd" else _adam(parameters, settings, fused=is_text)
    total, steps_done = torch.zeros((), dtype=torch.float64, device=model.device), 0
    with private_rng(seed_of(seed, "noise")):
        for step, index in enumerate(indices):
            for parameter in parameters:
                parameter.grad = None
            value = backward(loss, model, data, index)
            if settings.clip:
                torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            update(settings.lr * (_cosine(step / settings.steps) if settings.schedule == "cosine" else 1.0))
            total += value.detach()  # no synchronisation with a GPU
            steps_done = step + 1
            if progress:
                progress(step + 1, settings.steps)
            if stop and stop(step + 1):
                break
    return float(total) / max(steps_done, 1)


def _backward(loss: Loss, model: Net, data: Any, index: Tensor) -> Tensor:
    """Set the model's gradients to those of the loss, which is returned."""
    value = loss(model, data, index)
    value.backward()  # type: ignore[no-untyped-call]
    return value


def _dp(data: Any, settings: Training, seed: int) -> DPSGD | None:
    """How to train on examples that are to be kept private; None for all other data."""
    privacy = data.privacy if isinstance(data, Examples) else None
    return DPSGD.of(privacy, len(data), settings.batch, seed) if privacy and privacy.clip and len(data) else None


def _indices(size: int, settings: Training, seed: int) -> Iterator[Tensor]:
    return batches(size, settings.batch, settings.steps, generator(seed, "batches"))


def batches(size: int, batch: int, steps: int, g: torch.Generator) -> Iterator[Tensor]:
    """Batches of indices without repeats within a pass; a new pass starts when no full batch is left."""
    batch = min(batch, size)
    order, start = torch.empty(0, dtype=torch.int64), 0
    for _ in range(steps):
        if start + batch > len(order):
            order, start = torch.randperm(size, generator=g), 0
        yield order[start : start + batch]
        start += batch


def rows_used(size: int, settings: Training, seed: int) -> tuple[Tensor, Tensor]:
    """The rows that `fit` visits with this seed, ascending, and for each row of the data its position among them (or -1)."""
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *_indices(size, settings, seed)])
    rows = torch.as_tensor(rows.unique())  # type: ignore[no-untyped-call]
    return rows, torch.full((size,), -1).index_put((rows,), torch.arange(len(rows)))


def rows_of(data: Examples, settings: Training, seed: int) -> tuple[Tensor, Tensor]:
    """As `rows_used` for a client's own examples: all of them if training is private."""
    every = torch.arange(len(data))
    return (every, every) if _dp(data, settings, seed) else rows_used(len(data), settings, seed)


@dataclass(frozen=True)
class DistillationInputs:
    """The public inputs that one round's distillation visits, with the round's augmentation."""

    public: PublicInputs
    number: int
    rows: Tensor
    """Ascending."""
    place: Tensor
    """For each public input its position among `rows`, or -1."""

    @property
    def view(self) -> InputSource:
        """The inputs, by their position among all public inputs."""
        return self.public.subset(self.number, self.rows)


def distillation_inputs(env: Env, r: Round, settings: Training, public: PublicInputs | None = None) -> DistillationInputs:
    """The inputs that `fit` visits with these settings and `distillation_seed(r)`; call this before the exchange.

    Workers, if there are any, can then compute the replies' predictions on these inputs while other clients are training.
    """
    public = env.public if public is None else public
    assert public is not None
    rows, place = rows_used(len(public), settings, distillation_seed(r))
    if env.predictor and len(rows):
        env.predictor.prefetch(r.number, rows, lambda allocate: public.subset(r.number, rows, allocate).inputs(rows))
    return DistillationInputs(public, r.number, rows, place)


def distillation_seed(r: Round) -> int:
    """The seed of a round's distillation."""
    return seed_of(r.seed, "distil")


def ensemble_logits(env: Env, models: Iterable[tuple[str, Weights]], inputs: DistillationInputs) -> Tensor:
    """Logits of several models, each (architecture, weights), on the same rows: (models, rows, classes).

    Logits that workers have prefetched are used; the others are computed here, on one thread as in a worker.
    """
    models, logits = list(models), []
    with runtime.limit_threads(1):
        for done, (arch, weights) in enumerate(models):
            env.progress("teachers", done, len(models))
            prefetched = env.predictor.prefetched(inputs.number, inputs.rows, arch, weights) if env.predictor else None
            logits.append(predict(env.build(arch, weights), inputs.view, inputs.rows) if prefetched is None else prefetched)
    return torch.stack(logits)


def gradient(model: Net, data: InputSource, chunk: int = 250) -> dict[str, Tensor]:
    """The gradient of the mean loss over all of the data."""
    model.zero_grad(set_to_none=True)
    for part in torch.split(torch.arange(len(data)), chunk):
        (cross_entropy(model, data, part) * (len(part) / len(data))).backward()  # type: ignore[no-untyped-call]
    found = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.named_parameters()}
    return {name: g.detach().to("cpu", copy=True) for name, g in found.items()}


def predict(
    model: Net,
    data: InputSource,
    index: Tensor | None = None,
    chunk: int = 250,
    output: Callable[[Any, Any, Tensor], Tensor] = forward,
) -> Tensor:
    """Logits (or another `output` of the model) for these rows, all by default, in eval mode and without gradients."""
    keep_freed_memory()
    model.eval()
    rows = torch.arange(len(data)) if index is None else index
    return torch.cat([_predict(model, data, piece, chunk, output) for piece in torch.split(rows, CHUNK)])


def _predict(model: Net, data: InputSource, rows: Tensor, chunk: int, output: Callable[[Any, Any, Tensor], Tensor]) -> Tensor:
    order = _by_length(model, data, rows)
    with torch.no_grad():  # in inference mode a user's module that caches a tensor could not be trained afterwards
        chunks = torch.split(rows, chunk) if order is None else [rows[part] for part in order]
        parts = [output(model, data, part).cpu() for part in chunks]
    outputs = torch.cat(parts).clone()
    return outputs if order is None else torch.empty_like(outputs).index_copy(0, torch.cat(order), outputs)


def _by_length(model: Net, data: InputSource, rows: Tensor) -> list[Tensor] | None:
    """For a text model, chunks of inputs of similar length, at most about `TOKENS` word pieces each; None for others."""
    lengths = _lengths(model)
    if lengths is None or not len(rows):
        return None
    counts = lengths(data.inputs(rows))
    order, ends = counts.argsort(stable=True), [0]
    for position, longest in enumerate(counts[order].tolist()):  # ascending: the last one is the longest
        if position > ends[-1] and (position + 1 - ends[-1]) * longest > TOKENS:
            ends.append(position)
    return [order[first:last] for first, last in pairwise([*ends, len(order)])]


def _lengths(model: Any) -> Callable[[Tensor], Tensor] | None:
    """A text model's function for the lengths of its inputs; None for an image model."""
    found: Callable[[Tensor], Tensor] | None = getattr(getattr(model, "body", None), "lengths", None)
    return found


def score(logits: Tensor, labels: Tensor) -> Score:
    """Accuracy and mean cross-entropy of these logits."""
    hits = int((logits.argmax(dim=-1) == labels).sum())
    return Score(hits / len(labels), float(F.cross_entropy(logits.double(), labels)))


def evaluate(model: Net, data: Any) -> Score:
    """Score a model on labelled examples."""
    return score(predict(model, data), data.labels)


@contextlib.contextmanager
def private_rng(seed: int) -> Iterator[None]:
    """Seed the global generator, which dropout uses, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _sgd(parameters: list[Tensor], settings: Training) -> Callable[[float], None]:
    """SGD in a few foreach calls, with the bits of `torch.optim.SGD`, which takes seconds to import and does more per step."""
    velocities: dict[int, Tensor] = {}

    @torch.no_grad()
    def update(rate: float) -> None:
        gradients = [(i, p.grad) for i, p in enumerate(parameters) if p.grad is not None]
        changed, step = [parameters[i] for i, _ in gradients], [gradient for _, gradient in gradients]
        if settings.weight_decay:
            torch._foreach_add_(step, changed, alpha=settings.weight_decay)
        if settings.momentum:
            step = _with_momentum(velocities, gradients, settings.momentum)
        torch._foreach_add_(changed, step, alpha=-rate)

    return update


def _with_momentum(velocities: dict[int, Tensor], gradients: list[tuple[int, Tensor]], momentum: float) -> list[Tensor]:
    """Update the velocity of each parameter, known by its position, that has a gradient now; returns these velocities."""
    moving = [(velocities[i], gradient) for i, gradient in gradients if i in velocities]
    if moving:
        old, new = map(list, zip(*moving, strict=True))
        torch._foreach_mul_(old, momentum)
        torch._foreach_add_(old, new)
    velocities |= {i: gradient.clone() for i, gradient in gradients if i not in velocities}
    return [velocities[i] for i, _ in gradients]


def _adam(parameters: list[Tensor], settings: Training, fused: bool) -> Callable[[float], None]:
    """Adam or AdamW; `fused` makes one pass over the weights, which is faster for text models, most of which is embedding."""
    kind = torch.optim.Adam if settings.optimiser == "adam" else torch.optim.AdamW
    optimiser = kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay, foreach=not fused, fused=fused)

    def update(rate: float) -> None:
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()

    return update
