"""Exchange messages with a round's clients: send requests, count traffic, and validate the replies."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from fedet import runtime
from fedet.core import ClientInfo, ClientState, ClientTask, Delivery, Failure, Payload, described, malformed, seed_of
from fedet.engine import divergence, gate
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Ledger, num_scalars
from fedet.trust import attacks


class NoReplies(FedetError):
    """Too few usable replies: the round is lost and the state does not change."""


class BudgetReached(FedetError):
    """The next exchange would exceed the run's budget of parameters."""


class InProcess:
    """A transport that runs clients in this process, one after the other, on one thread as in a worker."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def start_round(self, number: int) -> Sequence[ClientInfo]:
        """All clients are always available."""
        return self.experiment.clients

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """Run the clients by ascending id."""
        replies, states = {}, {}
        with runtime.limit_threads(1):
            for done, (k, task) in enumerate(sorted(tasks.items())):
                self.experiment.env.progress("clients", done, len(tasks))
                state = _copy(task.state)  # if the reply is rejected, the original must be unchanged
                try:
                    replies[k], states[k] = attacks.run_client(self.experiment, k, number, task.request, state)
                except Exception as error:
                    error.add_note(f"raised for client {k} in round {number}")
                    raise
        return Delivery(replies, states)


def _copy(state: ClientState) -> ClientState:
    return {group: {name: tensor.clone() for name, tensor in tensors.items()} for group, tensors in state.items()}


class RoundExchange:
    """The method's `r.exchange`: simulates drop-out, sends, counts, validates, and stores the states of accepted clients."""

    def __init__(
        self,
        experiment: Experiment,
        clients: Sequence[ClientInfo],
        store: ClientStore,
        number: int,
        send: Callable[[int, Mapping[int, ClientTask]], Delivery],
        budget: int | None = None,
        after: Callable[[], None] = lambda: None,
        seen: Mapping[int, Sequence[str]] | None = None,
        directions: Mapping[int, Sequence[float]] | None = None,
        bodies: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.experiment, self.clients, self.store, self.number = experiment, clients, store, number
        self.failures: list[Failure] = []
        self.ledger = Ledger()
        self.lost_states: set[int] = set()
        self.clipped: set[int] = set()
        """Clients of whose replies the gate scaled something down."""
        self.digests: dict[int, list[str]] = {}
        """The digests of this round's replies, by which the gate knows a replay."""
        self.cosines: dict[int, list[float]] = {}
        """How far the updates of this round's clients point where the others' do."""
        self.bodies: dict[int, list[float]] = {}
        """The same, below the representation layer."""
        self._known = seen or {}, directions or {}, bodies or {}
        self._requests: list[Mapping[int, Payload]] = []
        self._replies: list[Mapping[int, Payload]] = []
        self.seconds = 0.0
        self._send, self._budget, self._after = send, budget, after
        self._calls = itertools.count()

    def __call__(self, requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
        """The valid replies by ascending client id; raises `NoReplies` if there are too few."""
        method, env = self.experiment.method, self.experiment.env
        self._check(requests)
        requests = {int(k): request for k, request in sorted(requests.items())}  # a method may have its ids from NumPy
        expected = {k: method.expected_reply(down, self.clients[k], env) for k, down in requests.items()}
        if problem := next(filter(None, (malformed(up, in_memory=False) for up in expected.values())), None):
            raise FedetError(f"what '{type(method).__name__}.expected_reply' returns {problem}")
        responding = self._responding(requests)
        self._check_budget(requests, [expected[k] for k in responding])
        tasks = {k: ClientTask(requests[k], self.store.get(k), expected[k]) for k in responding}
        start = time.perf_counter()
        delivery = self._send(self.number, tasks) if tasks else Delivery({})
        self.seconds += time.perf_counter() - start
        replies = {k: delivery.replies[k] for k in sorted(tasks) if k in delivery.replies}
        odd = {k: why for k, reply in replies.items() if (why := malformed(reply))}
        self.failures += [Failure(k, "bad reply", f"its reply {why}") for k, why in odd.items()]
        replies = {k: reply for k, reply in replies.items() if k not in odd}
        found = {k: inspect(k, reply, expected[k]) for k, reply in replies.items()}
        in_form = {k: reply for k, reply in replies.items() if (f := found[k]) is None or f.kind != "bad reply"}
        self.ledger.count(requests, in_form)  # what is not in form has any size that its sender likes
        self.failures += sorted(delivery.failures, key=lambda f: f.client)  # on a network in the order of arrival
        accepted = {k: _in_order(reply, expected[k]) for k, reply in replies.items() if self._accepts(k, reply, found[k])}
        accepted = self._judged(requests, accepted)
        self.lost_states.update(delivery.lost_states)
        for k in delivery.lost_states:
            self.store.stage(k, {})
        for k in accepted:
            if k in delivery.states:
                self.store.stage(k, delivery.states[k])
        needed = max(1, min(self.experiment.config.flower.min_replies, len(requests)))
        if len(accepted) < needed:
            number = f"{len(accepted)} usable {'reply' if len(accepted) == 1 else 'replies'} of {len(requests)}"
            raise NoReplies(f"{number}, {needed} needed")
        self._requests.append(requests)
        self._replies.append(accepted)
        self._after()
        return accepted

    def _check(self, requests: Mapping[int, Payload]) -> None:
        """Raise an error for requests that are none: whatever the method gave."""
        if not isinstance(requests, Mapping):
            raise FedetError(
                f"r.exchange was given {described(requests)}: give it a dict of requests by client id, such as "
                "{c.id: Payload({'model': state}) for c in r.cohort}"
            )
        for k, request in requests.items():
            if not isinstance(k, int | np.integer) or not 0 <= k < len(self.clients):
                raise FedetError(f"r.exchange was given a request for {_short(k)}, which is no client's id: use c.id")
            if problem := malformed(request):
                raise FedetError(f"the request for client {k} {problem}")

    def _judged(self, requests: Mapping[int, Payload], replies: Mapping[int, Payload]) -> dict[int, Payload]:
        """The replies that the gate lets through, some of them scaled down."""
        verdict = gate.judge(self.experiment, self.clients, self.number, requests, replies, *self._known)
        self.failures += verdict.failures
        self.clipped.update(verdict.clipped)
        for k, digest in verdict.digests.items():
            self.digests.setdefault(k, []).append(digest)
        for k, cosine in verdict.cosines.items():
            self.cosines.setdefault(k, []).append(cosine)
        for k, cosine in verdict.bodies.items():
            self.bodies.setdefault(k, []).append(cosine)
        return verdict.replies

    def suspects(self) -> list[Failure]:
        """The clients that most likely made the server's state non-finite: those far above the median, or else the largest."""
        largest: dict[int, float] = {}
        for replies in self._replies:
            for k, reply in replies.items():
                largest[k] = max(largest.get(k, 0.0), _max_abs(reply))
        if not largest:
            return []
        median, most = float(np.median(list(largest.values()))), max(largest.values())
        far = [k for k, size in sorted(largest.items()) if size >= min(most, 1000 * max(median, 1.0))]
        return [Failure(k, "suspect", f"sent values up to {largest[k]:.3g}, the median client up to {median:.3g}") for k in far]

    def largest_weights(self) -> tuple[float, float]:
        """The largest absolute value sent to the clients and received back, in groups that went both ways, such as models."""
        before = after = 0.0
        for requests, replies in zip(self._requests, self._replies, strict=True):
            for k, reply in replies.items():
                shared = requests[k].tensors.keys() & reply.tensors.keys()
                before = max(before, _max_abs(Payload({name: requests[k].tensors[name] for name in shared})))
                after = max(after, _max_abs(Payload({name: reply.tensors[name] for name in shared})))
        return before, after

    def _responding(self, requests: Mapping[int, Payload]) -> list[int]:
        """The clients that do not drop out; each one does with the configured probability."""
        rate, call = self.experiment.config.run.dropout, next(self._calls)
        seed = seed_of(self.experiment.seed, "dropout", self.number)
        dropped = {k for k in requests if rate and np.random.default_rng(seed_of(seed, call, k)).random() < rate}
        self.failures += [Failure(k, "dropped", "no reply") for k in sorted(dropped)]
        return [k for k in requests if k not in dropped]

    def _check_budget(self, requests: Mapping[int, Payload], expected: Sequence[Payload]) -> None:
        if self._budget is not None:
            sent = self.ledger.total + sum(map(num_scalars, [*requests.values(), *expected]))
            if sent > self._budget:
                raise BudgetReached(f"round {self.number} would send {sent} parameters, but only {self._budget} are left")

    def _accepts(self, k: int, reply: Payload, failure: Failure | None) -> bool:
        if failure is None and (why := self.experiment.method.validate_reply(reply, self.experiment.env)):
            failure = Failure(k, "bad reply", why)
        if failure is None:
            return True
        self.failures.append(failure)
        if failure.kind == "diverged" and not self.experiment.config.run.drops_diverged:
            raise divergence.at_client(self.experiment.method, self.number, f"client {k} {failure.why}")
        return False


def _short(value: object) -> str:
    return repr(value) if isinstance(value, int | str) else described(value)


def inspect(client: int, reply: Payload, expected: Payload) -> Failure | None:
    """The failure of a reply with wrong scalars, groups, names, shapes or types or non-finite values, or None."""
    return _inspect_scalars(client, reply, expected) or _inspect_tensors(client, reply, expected)


def _inspect_scalars(client: int, reply: Payload, expected: Payload) -> Failure | None:
    if reply.scalars.keys() != expected.scalars.keys():
        name = sorted(reply.scalars.keys() ^ expected.scalars.keys())[0]
        return Failure(client, "bad reply", f"missing or unexpected scalar '{name[:60]}' (expected_reply lists them)")
    for name, value in reply.scalars.items():
        if type(value) is not type(expected.scalars[name]):
            kinds = type(value).__name__, type(expected.scalars[name]).__name__
            return Failure(client, "bad reply", f"scalar '{name}' is of type {kinds[0]}, expected {kinds[1]}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return Failure(client, "bad reply", f"scalar '{name}' does not fit in 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            return Failure(client, "diverged", f"sent a non-finite value in '{name}'")
    return None


def _inspect_tensors(client: int, reply: Payload, expected: Payload) -> Failure | None:
    if set(reply.tensors) != set(expected.tensors):
        odd = sorted(set(reply.tensors) ^ set(expected.tensors))[0]
        text = f"sent {len(reply.tensors)} groups instead of {len(expected.tensors)}: '{odd[:60]}' is missing or unexpected"
        return Failure(client, "bad reply", text)
    for group, wanted in expected.tensors.items():
        sent = reply.tensors[group]
        if sent.keys() != wanted.keys():
            name = sorted(sent.keys() ^ wanted.keys())[0]
            return Failure(client, "bad reply", f"'{group}' has missing or unexpected tensors, such as '{name[:60]}'")
        for name, like in wanted.items():
            got = sent[name]
            if got.shape != like.shape or got.dtype != like.dtype:
                text = f"'{group}.{name}' is {tuple(got.shape)} {got.dtype}, expected {tuple(like.shape)} {like.dtype}"
                return Failure(client, "bad reply", text)
            if not is_finite(got):
                return Failure(client, "diverged", f"sent non-finite values in '{group}.{name}'")
    return None


def _in_order(reply: Payload, expected: Payload) -> Payload:
    """The accepted reply with its groups and tensors in the order of those expected; the reply itself if they are already.

    Vectors of whole updates are compared place by place: a client that sends its tensors in another order must not escape.
    """
    wanted = {group: list(tensors) for group, tensors in expected.tensors.items()}
    if [(group, list(tensors)) for group, tensors in reply.tensors.items()] == list(wanted.items()):
        return reply
    return Payload(
        {group: {name: reply.tensors[group][name] for name in names} for group, names in wanted.items()}, reply.scalars
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; usually their sum shows it at a fraction of the cost."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _max_abs(reply: Payload) -> float:
    """The largest absolute value in a reply's floating-point tensors."""
    tensors = [t for group in reply.tensors.values() for t in group.values() if t.is_floating_point() and t.numel()]
    return max((float(torch.linalg.vector_norm(t, math.inf)) for t in tensors), default=0.0)
