"""What the gate knows of a client's reply before it compares it with the others: sizes, and what it says on public inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import ClientInfo, Payload, Weights, generator, head_of
from fedet.data import Inputs
from fedet.experiment import Experiment
from fedet.trust import averages as robust

BATCH = 256
"""Public inputs on which models are judged."""
SAMPLE = 1 << 16
"""Weights of a body that are compared: the cosine between two such vectors is known to 1/256."""
FEWEST_INPUTS = 10
"""On fewer inputs, agreement is chance."""


@dataclass(frozen=True)
class Evidence:
    """What is measured of one reply, independently of all others."""

    sizes: dict[str, float]
    """Norms of updates by group, and the root mean square of other tensors by "group.name"."""
    started: dict[str, float]
    """Norms of what the client was sent, by group; an update is longer than that only if it undoes all that was learned."""
    said: Tensor | None
    """Its logits or probabilities (inputs, classes) on inputs that all clients of this exchange see."""
    head: Tensor | None
    """The update of the representation layer, which all architectures share, as a vector; None if it sends no model."""
    body: Tensor | None = None
    """That of the layers below it, or of some of their weights, which are others in every round."""
    arch: str = ""
    """Of the model that it sends: only clients with the same one have bodies that can be compared."""


def measure(
    experiment: Experiment,
    clients: Sequence[ClientInfo],
    number: int,
    requests: Mapping[int, Payload],
    replies: Mapping[int, Payload],
) -> dict[int, Evidence]:
    """The evidence of every reply to one exchange."""
    inputs, updates = _public_batch(experiment, number), experiment.method.sends_updates
    with runtime.limit_threads(1):  # as in every prediction, so that the bits do not depend on the threads
        return {
            k: Evidence(
                _sizes(requests[k], reply, updates),
                {
                    group: robust.norm(tensors)
                    for group, tensors in requests[k].tensors.items()
                    if _both_ways(requests[k], reply, group)
                },
                _said(experiment, clients[k], requests[k], reply, inputs),
                *_head_and_body(experiment, number, requests[k], reply),
                clients[k].arch if experiment.method.traits.heterogeneous else "",
            )
            for k, reply in replies.items()
        }


def _public_batch(experiment: Experiment, number: int) -> Inputs | None:
    """Other public inputs in every round: a model that behaves on known ones only would otherwise pass in all of them."""
    public = experiment.env.public
    if public is None:
        return None
    drawn = torch.randperm(len(public), generator=generator(experiment.seed, "gate", number))[:BATCH]
    return Inputs(public.rows_of_view(number, 0, drawn.sort().values))


def _sizes(request: Payload, reply: Payload, sends_updates: bool) -> dict[str, float]:
    sizes = {}
    for group, tensors in reply.tensors.items():
        if _both_ways(request, reply, group):
            sizes[group] = robust.norm(tensors if sends_updates else robust.difference(tensors, request.tensors[group]))
        else:
            sizes |= {f"{group}.{name}": _root_mean_square(t) for name, t in tensors.items() if _has_size(t)}
    return sizes


def _head_and_body(
    experiment: Experiment, number: int, request: Payload, reply: Payload
) -> tuple[Tensor | None, Tensor | None]:
    """The update of a model in the reply, in two parts; none if there is no model."""
    for group, tensors in reply.tensors.items():
        if _both_ways(request, reply, group) and (head := head_of(tensors)):
            start = {} if experiment.method.sends_updates else request.tensors[group]
            body = _vector({name: w for name, w in tensors.items() if name not in head}, start)
            if len(body) > SAMPLE:
                g = generator(experiment.seed, "gate", "body", number)
                body = body[torch.randint(len(body), (SAMPLE,), generator=g)]
            return _vector(head, start), body if len(body) else None
    return None, None


def _vector(new: Weights, start: Weights) -> Tensor:
    update = robust.difference(new, start) if start else {name: w for name, w in new.items() if w.is_floating_point()}
    return torch.cat([torch.empty(0, dtype=torch.float64), *(w.double().flatten() for w in update.values())])


def _both_ways(request: Payload, reply: Payload, group: str) -> bool:
    """Whether a group has the tensors that were sent to the client, so that there is an update."""
    sent, got = request.tensors.get(group, {}), reply.tensors.get(group, {})
    return bool(got) and got.keys() == sent.keys() and all(got[name].shape == sent[name].shape for name in got)


def _has_size(tensor: Tensor) -> bool:
    """Whether a tensor is compared by size: not labels, and not probabilities, which have none."""
    return tensor.is_floating_point() and tensor.numel() > 0 and not robust.is_probabilities(tensor)


def _root_mean_square(tensor: Tensor) -> float:
    mean = float(tensor.double().square().mean())
    return math.sqrt(mean) if math.isfinite(mean) else robust.norm({"": tensor}) / math.sqrt(tensor.numel())


def _said(experiment: Experiment, client: ClientInfo, request: Payload, reply: Payload, inputs: Inputs | None) -> Tensor | None:
    """What a client says on inputs that all clients see: its model on public ones, or its own words on them."""
    method, env = experiment.method, experiment.env
    if method.traits.clients_read_public:
        words = [t for group in reply.tensors.values() for t in group.values() if t.is_floating_point() and t.dim() == 2]
        return next((t for t in words if t.shape[1] == env.num_classes and len(t) >= FEWEST_INPUTS), None)
    if inputs is None or len(inputs) < FEWEST_INPUTS:
        return None
    arch = client.arch if method.traits.heterogeneous else env.large
    layout = {name: w.shape for name, w in env.initial(arch).items()} if arch in env.model_cache.names else {}
    for group, tensors in reply.tensors.items():
        if {name: w.shape for name, w in tensors.items()} == layout and _both_ways(request, reply, group):
            weights = _sum(request.tensors[group], tensors) if method.sends_updates else tensors
            return train.predict(env.build(arch, weights, "gate"), inputs)
    return None


def _sum(start: Weights, update: Weights) -> Weights:
    return {name: w + update[name] for name, w in start.items()}
