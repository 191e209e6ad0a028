"""How requests reach clients: factories of Exchange, and what wraps one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedet import runtime
from fedet.core import Exchange, Payload, seed_of
from fedet.errors import Diverged, FedetError
from fedet.storage.client_store import ClientStore

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.experiment import Experiment


class NoReplies(FedetError):
    """Nobody answered: the round is lost and the state stays as it was."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A client that did not contribute to a round, and why."""

    client: int
    kind: Literal["dropped", "bad reply", "diverged", "absent", "busy", "late", "raised", "crashed", "unavailable"]
    why: str

    def as_dict(self) -> dict[str, Any]:
        """For the metrics."""
        return asdict(self)


class Replies(dict[int, Payload]):
    """Replies that come with the names of those who sent none, where a transport knows more than that they are missing."""

    def __init__(self, replies: Mapping[int, Payload], failures: Iterable[Failure] = ()) -> None:
        super().__init__(replies)
        self.failures = tuple(failures)


def in_process(experiment: Experiment, store: ClientStore, number: int) -> Exchange:
    """Run each client here, one after the other, as a worker of a pool would: on one thread, for the same bits."""

    def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
        replies = {}
        with runtime.limit_threads(1):
            for done, (client_id, down) in enumerate(sorted(requests.items())):
                experiment.env.progress("clients", done, len(requests))
                client = experiment.client(client_id, number, store.get(client_id))
                replies[client_id] = experiment.method.local(down, client)
                store.stage(client_id, client.state)
        return replies

    return exchange


def drop_out(exchange: Exchange, rate: float, seed: int, failures: list[Failure]) -> Exchange:
    """Leave out each client with this probability: it is asked and never answers."""
    if rate == 0:
        return exchange
    calls = iter(range(1 << 30))

    def dropping(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
        call = next(calls)
        gone = {k for k in requests if np.random.default_rng(seed_of(seed, call, k)).random() < rate}
        failures.extend(Failure(k, "dropped", "no answer") for k in sorted(gone))
        alive = {k: down for k, down in requests.items() if k not in gone}
        return exchange(alive) if alive else {}

    return dropping


Expected = Callable[[int, Payload], Payload]
"""What a good reply of this client to this request looks like."""


def checked(
    exchange: Exchange,
    failures: list[Failure],
    expected: Expected,
    when_diverged: str,
    at_least: int = 1,
    validate_reply: Callable[[Payload], str | None] = lambda reply: None,
) -> Exchange:
    """Trust nothing a client sends: set bad replies aside, name them, hand on the others in ascending id."""

    def checking(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
        replies, good = exchange(requests), {}
        failures.extend(getattr(replies, "failures", ()))
        for client in sorted(replies):
            if client not in requests:
                continue
            failure = inspect(client, replies[client], expected(client, requests[client]))
            if failure is None and (why := validate_reply(replies[client])):
                failure = Failure(client, "bad reply", why)
            if failure is None:
                good[client] = replies[client]
            else:
                failures.append(failure)
                if failure.kind == "diverged" and when_diverged == "stop":
                    raise Diverged(f"client {client} {failure.why}")
        if len(good) < max(1, min(at_least, len(requests))):
            raise NoReplies(f"{len(good)} usable replies")
        return good

    return checking


def inspect(client: int, reply: Payload, expected: Payload) -> Failure | None:
    """What is wrong with a reply, if anything: groups, names, shapes, types, and finite numbers."""
    for name, value in reply.scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            return Failure(client, "diverged", f"sent a number that is not finite as '{name}'")
    if set(reply.tensors) != set(expected.tensors):
        return Failure(client, "bad reply", f"sent groups {sorted(reply.tensors)} instead of {sorted(expected.tensors)}")
    for group, wanted in expected.tensors.items():
        sent = reply.tensors[group]
        if sent.keys() != wanted.keys():
            odd = sorted(sent.keys() ^ wanted.keys())[0]
            return Failure(client, "bad reply", f"'{group}' has missing or extra tensors, such as '{odd}'")
        for name, like in wanted.items():
            got = sent[name]
            if got.shape != like.shape or got.dtype != like.dtype:
                text = f"'{group}.{name}' is {tuple(got.shape)} {got.dtype}, expected {tuple(like.shape)} {like.dtype}"
                return Failure(client, "bad reply", text)
            if got.is_floating_point() and not bool(torch.isfinite(got.sum())) and not bool(torch.isfinite(got).all()):
                return Failure(client, "diverged", f"sent numbers that are not finite in '{group}.{name}'")
    return None


def with_threads(config: Config) -> Config:
    """Write down how many threads the server's work uses: sums split in another way round in another way."""
    if config.run.threads is not None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": torch.get_num_threads()})})
