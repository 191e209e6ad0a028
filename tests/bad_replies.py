"""Made-up bad replies for the simulator's exchange: a good reply, spoilt in form or in content."""

import math

import torch

from fedet.core import Payload
from fedet.trust import averages as robust

NUMBERS = (math.nan, math.inf, -math.inf, 0.0, 1e-30, 1e6, -1e6, 1e20, 3e38, -3e38, 1e200, -1e308)
HUGE = ((1 << 40,), (1 << 20, 1 << 20, 0), (0, 1 << 62), (1 << 31, 1 << 31), (1,) * 60)
"""Shapes of tensors that have one number in memory, or none."""


def spoilt(rng, reply, request):
    """A reply that is bad in one to three ways, those that make it huge last, and what was done."""
    ways = sorted((rng.choice(WAYS) for _ in range(rng.choice([1, 1, 2, 3]))), key=(many_groups, absurd_shape).count)
    for way in ways:
        reply = way(rng, reply, request)
    return reply, [way.__name__ for way in ways]


def _changed(rng, reply, change):
    """The reply with one tensor replaced by what `change` makes of it."""
    places = [(g, name) for g, group in reply.tensors.items() for name in group]
    if not places:
        return reply
    group, name = rng.choice(places)
    tensors = {g: dict(inner) for g, inner in reply.tensors.items()}
    tensors[group][name] = change(tensors[group][name])
    return Payload(tensors, reply.scalars)


def _everywhere(reply, change):
    return Payload({g: {name: change(t) for name, t in group.items()} for g, group in reply.tensors.items()}, reply.scalars)


def _as(value, like):
    """The number as the tensor's type, which may not be able to hold it."""
    return torch.tensor(value, dtype=torch.float64).to(like.dtype)


def _floats(change):
    return lambda t: change(t) if t.is_floating_point() and not robust.is_probabilities(t) else t


def number_somewhere(rng, reply, request):
    """One value of one tensor is a number that training would not give."""
    value = rng.choice(NUMBERS)

    def put(t):
        t = t.clone(memory_format=torch.contiguous_format)
        if t.numel() and t.is_floating_point():
            t.view(-1)[rng.randrange(t.numel())] = _as(value, t)
        return t

    return _changed(rng, reply, put)


def number_everywhere(rng, reply, request):
    value = rng.choice(NUMBERS)
    return _everywhere(reply, lambda t: _as(value, t).expand(t.shape).clone() if t.is_floating_point() else t)


def multiplied(rng, reply, request):
    factor = rng.choice([-1.0, 1e3, -1e5, 1e12, 1e30, 0.0])
    return _everywhere(reply, _floats(lambda t: t * factor))


def noise(rng, reply, request):
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    size = 10.0 ** rng.randrange(-3, 10)
    return _everywhere(reply, _floats(lambda t: t + size * torch.randn(t.shape, generator=g).to(t.dtype)))


def shape(rng, reply, request):
    return _changed(
        rng, reply, lambda t: rng.choice([t.reshape(-1), t[None], t[:0] if t.dim() else t, torch.empty(0), t.unsqueeze(-1)])
    )


def absurd_shape(rng, reply, request):
    """Trillions of numbers, all of which are the same one."""
    return _changed(rng, reply, lambda t: torch.zeros(1, dtype=t.dtype).expand(huge) if (huge := rng.choice(HUGE)) else t)


def rows(rng, reply, request):
    """A row more or less, or many more, than the client has said that it has examples."""

    def count(t):
        ways = (lambda: t[:-1], lambda: torch.cat([t, t[:1]]), lambda: t.repeat(50, *[1] * (t.dim() - 1)))
        return rng.choice(ways)() if t.dim() else t

    return _changed(rng, reply, count) if rng.random() < 0.5 else _everywhere(reply, count)


def order(rng, reply, request):
    """Nothing wrong: groups and tensors in another order."""
    mixed = {g: dict(rng.sample(list(group.items()), len(group))) for g, group in reply.tensors.items()}
    return Payload(dict(rng.sample(list(mixed.items()), len(mixed))), reply.scalars)


def many_groups(rng, reply, request):
    """One group under thousands of names."""
    group = next(iter(reply.tensors.values()), {})
    return Payload({**reply.tensors, **{f"g{i}": group for i in range(rng.choice([1, 5000]))}}, reply.scalars)


def kind(rng, reply, request):
    kinds = [torch.float64, torch.float16, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    return _changed(rng, reply, lambda t: (t.real if t.is_complex() else t).to(rng.choice(kinds)))


def names(rng, reply, request):
    tensors = {g: dict(inner) for g, inner in reply.tensors.items()}
    if not tensors:
        return Payload({"model": {}}, reply.scalars)
    group = rng.choice(sorted(tensors))
    if tensors[group] and rng.random() < 0.6:
        tensors[group].pop(rng.choice(sorted(tensors[group])))
    if rng.random() < 0.6:
        tensors[group][rng.choice(["", "x" * 1000, "head.l3.weight", "\x1b[2J"])] = torch.zeros(2)
    return Payload(tensors, reply.scalars)


def groups(rng, reply, request):
    tensors = dict(reply.tensors)
    if tensors and rng.random() < 0.6:
        tensors.pop(rng.choice(sorted(tensors)))
    if rng.random() < 0.6:
        tensors[rng.choice(["model", "control", "extra", ""])] = {"w": torch.ones(3)}
    return Payload(tensors, reply.scalars)


def scalars(rng, reply, request):
    extra = rng.choice([{"loss": math.nan}, {"n": 10**30}, {"note": "x" * 10_000}, {"": True}, {"loss": None}])
    return Payload(reply.tensors, {**reply.scalars, **extra})


def copied(rng, reply, request):
    """What the client was sent, unchanged."""
    return Payload({g: request.tensors.get(g, group) for g, group in reply.tensors.items()}, reply.scalars)


def nothing(rng, reply, request):
    return Payload()


WAYS = (
    number_somewhere, number_everywhere, multiplied, noise, shape, absurd_shape, rows, order, kind, names, groups, many_groups,
    scalars, copied, nothing,
)  # fmt: skip
