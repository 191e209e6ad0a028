"""Judge a cohort's replies together before the method sees them: clip what is too large, set aside what can't be honest.

Every judgement compares a reply with the others of its exchange. The worst client is set aside first and the others are judged
again without it, until nobody stands out: so the round is, to the bit, the one in which those that were set aside never
answered. Of an even number of sizes the median is the lower of the middle two, so that it is an honest client's or smaller even
if half of the clients are hostile; of updates it is the median of those that are no longer than the model itself.
Only the direction of updates is judged over several rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from fedet import maths, runtime
from fedet.config.schema import RobustConfig
from fedet.core import ClientInfo, Failure, Payload, Weights
from fedet.engine import evidence
from fedet.engine.evidence import Evidence
from fedet.experiment import Experiment
from fedet.trust import averages as robust

FEWEST = 3
"""With fewer replies nobody can say which is the odd one out."""
ENOUGH = 6
"""With fewer replies the direction that they have in common is mostly chance."""
MAJORITY = 0.5
"""Agreement is judged once the median client agrees with the others on this share of the inputs: else there is no majority."""
IN_COMMON = 0.02
"""Soft labels are judged once a usual client's correlate with the others' by this much: before, they are chance."""
SAID_LIMIT = 2.0
"""Logits and features may be this much larger than the median client's; they vary more than updates do."""
SAID_REJECT = 10.0
"""They are set aside only beyond this many times the factor for updates: an honest client's may be 16 times the median's."""
REMEMBERED = 50
"""Replies of each client that are known again if it sends them once more."""
REFUSED = ("set aside", "bad reply", "diverged")
"""The failures that count towards `run.ban_after`."""


@dataclass(frozen=True)
class Verdict:
    """The replies that the method sees, who was set aside, whose reply was scaled down, and what to remember."""

    replies: dict[int, Payload]
    failures: list[Failure] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    cosines: dict[int, float] = field(default_factory=dict)
    """How far each client's update points where the others' do, or its soft labels vary as theirs do."""
    bodies: dict[int, float] = field(default_factory=dict)
    """How far its update below the representation layer points where those of clients with the same architecture do."""


def judge(
    experiment: Experiment,
    clients: Sequence[ClientInfo],
    number: int,
    requests: Mapping[int, Payload],
    replies: Mapping[int, Payload],
    seen: Mapping[int, Collection[str]],
    directions: Mapping[int, Sequence[float]] | None = None,
    bodies: Mapping[int, Sequence[float]] | None = None,
) -> Verdict:
    """Judge the replies to one exchange.

    `seen` has the digests of each client's earlier replies, `directions` and `bodies` the sum and the number of its earlier
    cosines.
    """
    settings = experiment.config.run.robust
    if settings is None:
        return Verdict(dict(replies))
    digests = {k: _digest(requests[k], reply) for k, reply in replies.items()} if settings.replays else {}
    failures = [
        Failure(k, "set aside", "sent a reply that it had sent before, to another request")
        for k, digest in digests.items()
        if _is_replay(digest, seen.get(k, ()))
    ]
    left = {k: reply for k, reply in replies.items() if k not in {f.client for f in failures}}
    measured = evidence.measure(experiment, clients, number, requests, left)
    directions = directions or {}
    correlations = _correlations(measured, settings)
    while (odd := _odd_one_out(measured, settings, directions)) is not None:
        failures.append(odd)
        del left[odd.client], measured[odd.client]
    opposing, cosines = _opposing(measured, settings.direction, directions)
    for odd in opposing:
        del left[odd.client], measured[odd.client]
    below, below_cosines = _opposing_below(measured, settings.direction, bodies or {})
    for odd in below:
        del left[odd.client], measured[odd.client]
    failures += opposing + below
    factors = _factors(measured, settings.clip) if settings.clip else {}
    updates = experiment.method.sends_updates
    kept = {k: _scaled(requests[k], reply, factors.get(k, {}), updates) for k, reply in left.items()}
    known = {k: digest for k, digest in digests.items() if digest}
    return Verdict(kept, failures, sorted(factors), known, cosines | correlations, below_cosines)


def banned(set_aside: Mapping[int, int], limit: int | None) -> frozenset[int]:
    """The clients that were refused so often that they are left out of cohorts."""
    return frozenset(k for k, times in set_aside.items() if limit and times >= limit)


def counted(set_aside: Mapping[int, int], failures: Iterable[Failure]) -> dict[int, int]:
    """How often each client was refused, after a round with these failures; at most once per round."""
    refused = {f.client for f in failures if f.kind in REFUSED}
    return {k: set_aside.get(k, 0) + (k in refused) for k in sorted({*set_aside, *refused})}


def remembered(seen: Mapping[int, Sequence[str]], digests: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """The digests of each client's last replies, after a round with these."""
    return {k: [*seen.get(k, ()), *digests.get(k, ())][-REMEMBERED:] for k in sorted({*seen, *digests})}


def credible(clients: Sequence[ClientInfo], settings: RobustConfig | None) -> Sequence[ClientInfo]:
    """The clients with no more examples than `examples` times the median: what a client says of itself is not trusted."""
    sizes = [c.num_examples for c in clients if c.num_examples > 0]
    limit = math.floor(settings.examples * float(np.median(sizes))) if settings and settings.examples and sizes else 0
    if not limit or max(sizes) <= limit:
        return clients
    return [replace(c, num_examples=min(c.num_examples, limit)) for c in clients]


def directed(directions: Mapping[int, Sequence[float]], cosines: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """The sum and the number of each client's cosines, after a round with these."""
    found = {k: list(known) for k, known in directions.items()}
    for k, new in sorted(cosines.items()):
        total, count = found.get(k, (0.0, 0.0))
        found[k] = [total + math.fsum(new), count + len(new)]
    return found


def _odd_one_out(measured: Mapping[int, Evidence], settings: RobustConfig, known: Collection[int]) -> Failure | None:
    """The client to set aside first, or None."""
    return _not_finite(measured) or _too_large(measured, settings.reject) or _out_of_line(measured, settings, known)


def _not_finite(measured: Mapping[int, Evidence]) -> Failure | None:
    """The first client whose sizes, or whose outputs on public inputs, are not finite."""
    for k, e in measured.items():
        for name, size in e.sizes.items():
            if not math.isfinite(size):  # no median and no factor could be computed with it
                return Failure(k, "set aside", f"its '{name}' is too large for any number")
        if e.said is not None and not bool((finite := torch.isfinite(e.said)).all()):
            share = float(finite.double().mean())
            return Failure(k, "set aside", f"only {share:.0%} of its outputs on public inputs are finite")
    return None


def _too_large(measured: Mapping[int, Evidence], reject: float) -> Failure | None:
    """The client whose update, logits or features exceed the median the most, if by more than this factor.

    An update must also be longer than the model that it starts from. When most clients have nothing left to learn, the median
    is so short that an honest client's update is twenty times as long.
    """
    worst: tuple[float, int, str] | None = None
    for name, sizes in _comparable(measured).items():
        middle = _usual(name, sizes, measured)
        usual = middle * (SAID_REJECT if "." in name else 1.0)
        for k, size in sizes.items():
            if usual and not _plausible(name, measured[k]) and (worst is None or size / usual > worst[0]):
                worst = size / usual, k, f"its '{name}' is {size / middle:.3g} times as large as the median client's"
    if not reject or worst is None or worst[0] <= reject:
        return None
    return Failure(worst[1], "set aside", worst[2])


def _plausible(name: str, e: Evidence) -> bool:
    """Whether an update is no longer than what it starts from, if that is anything."""
    return 0 < e.sizes[name] <= e.started.get(name, 0.0)


def _usual(name: str, sizes: Mapping[int, float], measured: Mapping[int, Evidence]) -> float:
    """The median size; where enough updates are plausible, theirs, so that it is honest even if most of a cohort is not."""
    plausible = [size for k, size in sizes.items() if _plausible(name, measured[k])]
    return median_low(plausible if len(plausible) >= FEWEST else sizes.values())


def _out_of_line(measured: Mapping[int, Evidence], settings: RobustConfig, known: Collection[int]) -> Failure | None:
    """The client whose words on public inputs fit the least to those of the others, if they do not fit."""
    if scores := _correlations(measured, settings):
        return _uninformative(scores, settings.correlation, known)
    said = {k: e.said for k, e in measured.items() if e.said is not None}
    if not settings.agreement or len({t.shape for t in said.values()}) != 1:
        return None
    return _contradicting(said, settings.agreement)


def _correlations(measured: Mapping[int, Evidence], settings: RobustConfig) -> dict[int, float]:
    """How far each client's soft labels vary as the others' do; empty if clients send anything else, or it is not judged."""
    said = {k: e.said for k, e in measured.items() if e.said is not None}
    same = len({t.shape for t in said.values()}) == 1
    if not settings.correlation or not same or not all(map(robust.is_probabilities, said.values())):
        return {}
    with runtime.limit_threads(1):  # the bits must not depend on the threads
        return dict(zip(said, robust.correlations(torch.stack(list(said.values()))).tolist(), strict=True))


def _uninformative(scores: Mapping[int, float], factor: float, known: Collection[int]) -> Failure | None:
    """The client whose soft labels follow those of the others the least, if less than this factor of what is usual.

    A client's first reply passes: it has not learned from the others yet, and would never do so if it were set aside.
    """
    clients = list(scores)
    odd = robust.uninformative(list(scores.values()), factor, IN_COMMON, [i for i, k in enumerate(clients) if k in known])
    if odd is None:
        return None
    usual = median_low([score for score in scores.values() if score > 0])
    text = f"its soft labels correlate with those of the others by {scores[clients[odd]]:.2f}, a usual client's by {usual:.2f}"
    return Failure(clients[odd], "set aside", text)


def _contradicting(said: Mapping[int, Tensor], factor: float) -> Failure | None:
    """The client that agrees with the others' majority the least, if less than this factor of what the median client does."""
    agreements = maths.agreement(torch.stack(list(said.values()))).tolist()
    odd = robust.leave_out(agreements, factor)
    if odd is None or float(np.median(agreements)) < MAJORITY:
        return None
    text = f"agrees with the majority of the others on {agreements[odd]:.0%} of the public inputs, the median client on"
    return Failure(list(said)[odd], "set aside", f"{text} {float(np.median(agreements)):.0%}")


def _opposing(
    measured: Mapping[int, Evidence], limit: float, directions: Mapping[int, Sequence[float]]
) -> tuple[list[Failure], dict[int, float]]:
    """The clients whose updates, in this and earlier rounds, point against the others'; and every client's cosine this time.

    One round says little, because a client with rare labels may point anywhere. So cosines are averaged over all replies of a
    client, with one more of zero, from its second reply on. Nobody is set aside unless most of the clients are left and then
    have a direction in common.
    """
    heads = {k: e.head for k, e in measured.items() if e.head is not None}
    if len({h.shape for h in heads.values()}) != 1:
        return [], {}
    return _against(heads, _cosines, limit, directions, "its updates point against those of the others")


def _opposing_below(
    measured: Mapping[int, Evidence], limit: float, bodies: Mapping[int, Sequence[float]]
) -> tuple[list[Failure], dict[int, float]]:
    """As `_opposing`, for the layers below the representation layer, which clients of the same architecture share.

    A client that reverses these alone has an honest head.
    """
    vectors = {k: e.body for k, e in measured.items() if e.body is not None}

    def cosines(left: Mapping[int, Tensor]) -> dict[int, float]:
        families: dict[object, dict[int, Tensor]] = {}
        for k, body in left.items():
            families.setdefault((measured[k].arch, body.shape), {})[k] = body
        return {k: c for family in families.values() if len(family) >= FEWEST for k, c in _cosines(family).items()}

    comparable = {k: vectors[k] for k in cosines(vectors)}
    text = "below its representation layer, its updates point against those of clients with its architecture"
    return _against(comparable, cosines, limit, bodies, text)


def _against(
    vectors: dict[int, Tensor],
    cosines_of: Callable[[Mapping[int, Tensor]], dict[int, float]],
    limit: float,
    memory: Mapping[int, Sequence[float]],
    what: str,
) -> tuple[list[Failure], dict[int, float]]:
    """The clients whose vectors, in this and earlier rounds, point against the others', and every client's cosine."""
    if not limit or len(vectors) < ENOUGH:
        return [], {}
    left, failures = dict(vectors), []
    while worst := _worst(cosines_of(left), memory):
        mean, k = worst
        if mean >= -limit:
            break
        replies = int(memory[k][1]) + 1
        failures.append(Failure(k, "set aside", f"{what}, with a mean cosine of {mean:.2f} in {replies} replies"))
        del left[k]
    cosines = cosines_of(left)
    if failures and (2 * len(left) <= len(vectors) or float(np.median(list(cosines.values()) or [0.0])) < 2 * limit):
        return [], cosines_of(vectors)
    for f in failures:
        cosines |= {k: c for k, c in cosines_of({**left, f.client: vectors[f.client]}).items() if k == f.client}
    return failures, cosines


def _worst(cosines: Mapping[int, float], directions: Mapping[int, Sequence[float]]) -> tuple[float, int] | None:
    """The least mean cosine of a client that had replied before, and that client; None if too few clients are left."""
    known = {k: directions[k] for k in cosines if k in directions} if len(cosines) >= FEWEST else {}
    return min((((total + cosines[k]) / (count + 2), k) for k, (total, count) in known.items()), default=None)


def _cosines(heads: Mapping[int, Tensor]) -> dict[int, float]:
    """The mean cosine between each client's update and the others'."""
    with runtime.limit_threads(1):  # the bits must not depend on the threads
        return dict(zip(heads, robust.mean_cosines(torch.stack(list(heads.values()))).tolist(), strict=True))


def _comparable(measured: Mapping[int, Evidence]) -> dict[str, dict[int, float]]:
    """Sizes by name and client, for names that enough clients have."""
    names = {name: None for e in measured.values() for name in e.sizes}
    table = {name: {k: e.sizes[name] for k, e in measured.items() if name in e.sizes} for name in names}
    return {name: sizes for name, sizes in table.items() if len(sizes) >= FEWEST}


def _factors(measured: Mapping[int, Evidence], clip: float) -> dict[int, dict[str, float]]:
    """By how much which part of whose reply is scaled down: updates to `clip` times the median, other values to twice it."""
    factors: dict[int, dict[str, float]] = {}
    for name, sizes in _comparable(measured).items():
        limit = _usual(name, sizes, measured) * (SAID_LIMIT if "." in name else clip)
        for k, size in sizes.items():
            if limit and size > limit:
                factors.setdefault(k, {})[name] = limit / size
    return factors


def _scaled(request: Payload, reply: Payload, factors: Mapping[str, float], sends_updates: bool) -> Payload:
    """The reply with these parts scaled down; the reply itself, with its own tensors, if there are none."""
    if not factors:
        return reply
    groups: dict[str, Weights] = {}
    for group, tensors in reply.tensors.items():
        if group in factors and not sends_updates:
            groups[group] = robust.clipped(tensors, request.tensors[group], factors[group])
        else:
            whole = factors.get(group, 1.0)
            groups[group] = {name: _times(t, factors.get(f"{group}.{name}", whole)) for name, t in tensors.items()}
    return Payload(groups, reply.scalars)


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 or not tensor.is_floating_point() else (tensor.double() * factor).to(tensor.dtype)


def _digest(request: Payload, reply: Payload) -> str:
    """Two digests, of the request and of the reply; empty if the reply has no number that training would change."""
    changing = [t for group in reply.tensors.values() for t in group.values() if t.is_floating_point()]
    return f"{_hash(request)}:{_hash(reply)}" if any(bool(t.any()) for t in changing) else ""


def _is_replay(digest: str, seen: Collection[str]) -> bool:
    """Whether the same reply was sent to another request; a client without randomness may repeat itself to the same one."""
    request, _, reply = digest.partition(":")
    return any(known.partition(":")[2] == reply and known.partition(":")[0] != request for known in seen if digest)


def _hash(payload: Payload) -> str:
    total = hashlib.blake2b(repr(sorted(payload.scalars.items())).encode(), digest_size=8)
    for group, tensors in sorted(payload.tensors.items()):
        for name, tensor in sorted(tensors.items()):
            total.update(f"{group} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
