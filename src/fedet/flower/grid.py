"""An exchange made from Flower's grid: who is where, who is busy, what came back, and who failed and how."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPError

from fedet.config import FlowerConfig
from fedet.core import REMOTE_STATE, Exchange, Payload
from fedet.engine.exchange import Failure, Replies
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.flower import codec
from fedet.flower.codec import Card, Hello, Malformed, Part, Reply, Request, Version
from fedet.flower.roster import Roster
from fedet.storage.client_store import ClientStore

log = logging.getLogger("flwr")
Kind = Literal["raised", "crashed", "unavailable", "bad reply"]
BROKEN = -1
ERRORS: Mapping[int, tuple[Kind, str]] = {
    1: ("raised", "its app could not be loaded"),
    2: ("raised", "its app raised"),
    3: ("unavailable", "its reply did not arrive whole"),
    4: ("unavailable", "its reply expired"),
    5: ("unavailable", "its node is gone"),
    8: ("crashed", "its app's process died"),
    BROKEN: ("bad reply", "its reply can't be read"),
}
"""Flower's codes that a client or its node can cause, as a kind of failure."""
PATIENCE = 3
"""Deadlines after which a node that never answers counts as free again."""


@dataclass
class Pending:
    """A message on its way: to which node, for which clients (none: a query), and from which exchange."""

    node: int
    clients: tuple[int, ...] = ()
    exchange: tuple[int, int] = (0, 0)


@dataclass
class Answers:
    """What has come back in one exchange."""

    payloads: dict[int, Payload] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Federation:
    """The clients behind a grid."""

    def __init__(self, grid: Grid, ready: Experiment, run: str, how: FlowerConfig) -> None:
        self.grid, self.run, self.how = grid, run, how
        self.roster = Roster(ready.clients, ready.env.archs, how)
        self.pending: dict[str, Pending] = {}
        self._asked: dict[int, float] = {}
        self._started = False

    def connect(self, experiment: Experiment, store: ClientStore, number: int) -> Exchange:
        """Find out who is there, wait if they are too few, and return the exchange of this round."""
        self._gather()
        choice = experiment.clients
        assert isinstance(choice, list)
        choice[:] = self.roster.only(self.available())
        steps = iter(range(1, 1 << 30))
        keep = number - 1 - (number - 1) % experiment.config.run.checkpoint_every

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            step = next(steps)
            versions = {k: version_of(store, k) for k in requests}
            answers = self._exchange(experiment, requests, versions, (number, step), keep)
            for k, part in sorted(answers.parts.items()):
                if part.kept or part.lost:
                    mark = (0, 0) if part.lost else (number, step)
                    store.stage(k, {REMOTE_STATE: {"version": torch.tensor(mark)}})
            return Replies(answers.payloads, answers.failures)

        return exchange

    def available(self) -> list[int]:
        """Clients that can be asked now: their node is there and has nothing else to do."""
        return self.roster.at(*(set(self.grid.get_node_ids()) - self._busy()))

    def _gather(self) -> None:
        """Meet new nodes. The first time wait for all who are expected; later only for as many as a round needs."""
        wanted = self.how.min_replies if self._started else max(self.roster.expected, self.how.min_replies)
        end = time.monotonic() + self.how.wait
        while True:
            self._meet()
            self._collect(None)
            here = self.available()
            if len(here) >= wanted:
                break
            if time.monotonic() > end:
                if len(here) >= self.how.min_replies:
                    log.warning("fedet: after %g s %s of %s clients are here; going on", self.how.wait, len(here), wanted)
                    break
                raise FedetError(
                    f"{len(here)} clients after {self.how.wait:g} s, at least {self.how.min_replies} are needed: start more "
                    "nodes and submit again, the run goes on from its checkpoint; or raise flower.wait"
                )
            time.sleep(self.how.poll)
        self._started = True

    def _meet(self) -> None:
        """Ask each new node, once, who its clients are; one that gave no usable answer is asked again after a deadline."""
        there, now = set(self.grid.get_node_ids()), time.monotonic()
        for node in [n for n in self._asked if n not in there]:
            del self._asked[node]  # should it come back, it may have changed
        new = [n for n in sorted(there) if not self.roster.at(n) or n not in self._asked]
        new = [n for n in new if now >= self._asked.get(n, 0) and n not in self._busy()]
        hello = codec.written(Hello(run=self.run))
        self._push([Message(hello, n, MessageType.QUERY, ttl=self._ttl()) for n in new], [Pending(n) for n in new])
        self._asked.update(dict.fromkeys(new, now + self.how.round_timeout))

    def _exchange(
        self,
        experiment: Experiment,
        requests: Mapping[int, Payload],
        versions: Mapping[int, Version],
        place: tuple[int, int],
        keep: int,
    ) -> Answers:
        answers, nodes = Answers(), self._nodes(requests)
        answers.failures += [Failure(k, *why) for k, why in sorted(self._unreachable(requests).items())]
        packer = codec.Packer()
        messages, pending = [], []
        for node, clients in nodes.items():
            parts = {k: packer.part(requests[k], versions[k]) for k in clients}
            head = Request(
                run=self.run,
                round=place[0],
                step=place[1],
                keep=keep,
                classes=experiment.data.num_classes,
                shape=experiment.data.input_shape,
                clients=parts,
            )
            kind = MessageType.TRAIN
            messages.append(Message(packer.content(head), node, kind, ttl=self._ttl(), group_id=str(place[0])))
            pending.append(Pending(node, tuple(clients), place))
        unsent = self._push(messages, pending)
        answers.failures += [Failure(k, "unavailable", "the request could not be sent") for p in unsent for k in p.clients]
        self._await(place, answers, experiment.env.progress, len(requests))
        return answers

    def _await(self, place: tuple[int, int], answers: Answers, progress: Callable[[str, int, int], None], total: int) -> None:
        """Wait for this exchange's replies until the deadline; who has not answered by then is late, and stays busy."""
        end = time.monotonic() + self.how.round_timeout
        while any(p.exchange == place for p in self.pending.values()):
            if time.monotonic() > end:
                late = sorted(k for p in self.pending.values() if p.exchange == place for k in p.clients)
                why = f"no answer within {self.how.round_timeout:g} s"
                answers.failures += [Failure(k, "late", why) for k in late]
                return
            time.sleep(self.how.poll)
            self._collect(answers, place)
            progress("clients", len(answers.payloads), total)

    def _nodes(self, requests: Mapping[int, Payload]) -> dict[int, list[int]]:
        """One message a node: its clients share what starting a process costs."""
        nodes: dict[int, list[int]] = {}
        for k in sorted(set(requests) & set(self.available())):
            nodes.setdefault(self.roster.homes[k], []).append(k)
        return nodes

    def _unreachable(self, requests: Mapping[int, Payload]) -> dict[int, tuple[Literal["absent", "busy"], str]]:
        free, busy = set(self.available()), self._busy()
        return {
            k: ("busy", "its node still works on an earlier request")
            if self.roster.homes.get(k) in busy
            else ("absent", "its node is not connected")
            for k in requests
            if k not in free
        }

    def _busy(self) -> set[int]:
        return {p.node for p in self.pending.values()}

    def _ttl(self) -> float:
        return PATIENCE * self.how.round_timeout

    def _push(self, messages: list[Message], pending: Sequence[Pending]) -> list[Pending]:
        """Send; returns those that could not be sent. A grid may leave these out of its list of ids, or put None there."""
        accepted = set(self.grid.push_messages(messages)) if messages else set()
        sent = list(zip((m.metadata.message_id for m in messages), pending, strict=True))
        self.pending.update({i: p for i, p in sent if i in accepted})
        return [p for i, p in sent if i not in accepted]

    def _collect(self, answers: Answers | None, place: tuple[int, int] = (0, 0)) -> None:
        """Take in whatever has arrived; a message is known by the one it replies to, not by who says to have sent it."""
        for message_id in list(self.pending):
            message = self._pull(message_id)
            if message is None:
                continue
            p = self.pending.pop(message_id)
            if not p.clients:
                self._register(p.node, message)
            elif answers is not None and p.exchange == place:
                self._take(p, message, answers)
            else:
                names, number = ", ".join(map(str, p.clients)), p.exchange[0]
                log.warning("fedet: client %s answered round %s after its deadline; it is free again", names, number)

    def _pull(self, message_id: str) -> Message | None:
        """The reply to one message, if it is there.

        One at a time: the next one's bytes need not fit beside it, and what can't be taken apart spoils no other.
        """
        try:
            return next(iter(self.grid.pull_messages([message_id])), None)
        except HTTPError:
            raise
        except Exception as error:  # whatever Flower's decoder makes of bytes that someone else put together
            sent = Message(RecordDict(), self.pending[message_id].node, MessageType.TRAIN)
            return Message(Error(BROKEN, f"{type(error).__name__}: {error}"[:500]), reply_to=sent)

    def _register(self, node: int, message: Message) -> None:
        """Take a node's word for who its clients are, within bounds."""
        try:
            if message.has_error():
                raise Malformed(_error(message)[1])
            refused = self.roster.register(node, codec.read(Card, message.content), set(self.grid.get_node_ids()))
        except Malformed as error:
            log.warning("fedet: node %s can't take part: %s", node, error)
            return
        for client, why in refused.items():
            log.warning("fedet: client %s of node %s can't take part: %s", client, node, why)
        log.info("fedet: node %s has client %s", node, ", ".join(map(str, self.roster.at(node))) or "none")

    def _take(self, p: Pending, message: Message, answers: Answers) -> None:
        """Sort a reply into payloads and failures; whatever is wrong with it, it is named and set aside."""
        if message.has_error():
            answers.failures += [Failure(k, *_error(message)) for k in p.clients]
            return
        try:
            size = codec.size_of(message.content)
            if size > self.how.max_reply_mb * 2**20 * len(p.clients):
                raise Malformed(f"its reply has {size} bytes, more than flower.max_reply_mb = {self.how.max_reply_mb:g} allows")
            parts = codec.only(codec.read(Reply, message.content).clients, p.clients)
        except Malformed as error:
            answers.failures += [Failure(k, "bad reply", str(error)) for k in p.clients]
            return
        if set(parts) != set(p.clients):
            self._asked.pop(p.node, None)  # it may have started again as someone else: ask it who it is
        for k in p.clients:
            failure = self._unpack(k, parts.get(k), message, answers)
            if failure:
                answers.failures.append(failure)

    def _unpack(self, k: int, part: Part | None, message: Message, answers: Answers) -> Failure | None:
        if part is None:
            return Failure(k, "bad reply", "its node's reply says nothing of it")
        if part.error is not None:
            if part.lost:
                answers.parts[k] = part
            return Failure(k, "raised", part.error)
        try:
            answers.payloads[k] = codec.payload(part, message.content)
        except Malformed as error:
            return Failure(k, "bad reply", str(error))
        answers.parts[k] = part
        return None


def version_of(store: ClientStore, client: int) -> Version:
    """Which of the states on a client's disk counts."""
    mark: Any = store.get(client).get(REMOTE_STATE)
    return (0, 0) if mark is None else (int(mark["version"][0]), int(mark["version"][1]))


def _error(message: Message) -> tuple[Kind, str]:
    kind, text = ERRORS.get(message.error.code, ("unavailable", f"error {message.error.code}"))
    reason = (message.error.reason or "").strip()
    return kind, f"{text}: {reason[:500]}" if reason else text
