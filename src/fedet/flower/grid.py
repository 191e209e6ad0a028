"""A transport over Flower's grid: which clients are connected, who is busy, what came back, and who failed and how."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPError

from fedet.config import FlowerConfig
from fedet.core import REMOTE_STATE, ClientInfo, ClientState, ClientTask, Delivery, Failure, Payload
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.flower import codec
from fedet.flower.codec import BadMessage, ClientReply, ClientRequest, NodeInfo, NodeQuery, Reply, Request, Version
from fedet.flower.registry import ClientRegistry

log = logging.getLogger("flwr")
ErrorKind = Literal["raised", "crashed", "unavailable", "bad reply"]
UNREADABLE = -1
"""An error code of our own, besides Flower's."""
ERRORS: Mapping[int, tuple[ErrorKind, str]] = {
    1: ("raised", "its app could not be loaded"),
    2: ("raised", "its app raised an exception"),
    3: ("unavailable", "its reply did not arrive completely"),
    4: ("unavailable", "its reply expired"),
    5: ("unavailable", "its node is gone"),
    8: ("crashed", "its app's process died"),
    UNREADABLE: ("bad reply", "its reply can't be read"),
}
"""Flower's error codes that a client or its node can cause, as a kind of failure."""
TTL_TIMEOUTS = 3
"""A message expires after this many round timeouts: a node that never answers is then free again."""


@dataclass
class Pending:
    """A message on its way: to which node, for which clients (none: a query), and for which step."""

    node: int
    clients: tuple[int, ...] = ()
    version: Version = (0, 0)


@dataclass
class Step:
    """What has come back so far in one step of a round."""

    version: Version
    expected: Mapping[int, Payload]
    replies: dict[int, Payload] = field(default_factory=dict)
    states: dict[int, ClientState] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    lost_states: list[int] = field(default_factory=list)

    def fail(self, clients: Collection[int], kind: ErrorKind | Literal["late", "busy", "absent"], why: str) -> None:
        """Note that these clients did not contribute."""
        self.failures += [Failure(k, kind, why) for k in sorted(clients)]

    def delivery(self) -> Delivery:
        """All of it, as the engine takes it."""
        return Delivery(dict(sorted(self.replies.items())), self.states, self.failures, sorted(self.lost_states))


class Federation:
    """The clients behind a grid, as a `Transport`."""

    def __init__(self, grid: Grid, experiment: Experiment, run: str, settings: FlowerConfig) -> None:
        self.grid, self.experiment, self.run, self.settings = grid, experiment, run, settings
        self.registry = ClientRegistry(experiment.clients, experiment.env.archs, settings)
        self.pending: dict[str, Pending] = {}
        self._next_query: dict[int, float] = {}
        """Node to the time from which it may be queried again."""
        self._version: Version = (0, 0)
        self._started = False

    def start_round(self, number: int) -> Sequence[ClientInfo]:
        """Query new nodes and wait for enough clients; returns all clients, absent and busy ones with no examples."""
        self._version = (number, 0)
        return self.registry.with_available(self._wait_for_clients())

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """Send each node its clients' tasks, and wait for the replies until the round's timeout."""
        self._version = (number, self._version[1] + 1 if self._version[0] == number else 1)
        step = Step(self._version, {k: task.expected for k, task in tasks.items()})
        available = set(self.available())
        busy = {k for k in tasks if k not in available and self.registry.nodes.get(k) in self._busy()}
        step.fail(busy, "busy", "its node is still working on an earlier request")
        step.fail(tasks.keys() - available - busy, "absent", "its node is not connected")
        unsent = self._push(*self._messages({k: task for k, task in tasks.items() if k in available}))
        step.fail([k for p in unsent for k in p.clients], "unavailable", "the request could not be sent")
        self._wait_for_replies(step)
        return step.delivery()

    def available(self) -> list[int]:
        """Clients that can be asked now: their node is connected and not busy."""
        return self.registry.at(set(self.grid.get_node_ids()) - self._busy())

    def _wait_for_clients(self) -> list[int]:
        """The clients that can be chosen: before the first round all that are expected, later as many as a round needs."""
        needed, wait = self.settings.min_replies, self.settings.wait
        wanted = needed if self._started else max(self.registry.expected, needed)
        end = time.monotonic() + wait
        while True:
            self._query_new_nodes()
            self._collect(None)
            available = self.available()
            if len(available) >= wanted:
                break
            if time.monotonic() > end:
                if len(available) >= needed:
                    log.warning("fedet: %s of %s clients are connected after %g s; continuing", len(available), wanted, wait)
                    break
                raise FedetError(
                    f"{len(available)} clients are connected after {wait:g} s and at least {needed} are needed: start more "
                    "nodes and resubmit, the run resumes from its checkpoint; or raise flower.wait"
                )
            time.sleep(self.settings.poll)
        self._started = True
        return available

    def _query_new_nodes(self) -> None:
        """Ask each new node, once, which clients it has; one without a usable answer is asked again after a timeout."""
        connected, now = set(self.grid.get_node_ids()), time.monotonic()
        for node in [n for n in self._next_query if n not in connected]:
            del self._next_query[node]  # if it returns, it may have changed
        new = [n for n in sorted(connected) if not self.registry.at({n}) or n not in self._next_query]
        new = [n for n in new if now >= self._next_query.get(n, 0) and n not in self._busy()]
        content = codec.head_only(NodeQuery(run=self.run))
        self._push([Message(content, n, MessageType.QUERY, ttl=self._ttl()) for n in new], [Pending(n) for n in new])
        self._next_query.update(dict.fromkeys(new, now + self.settings.round_timeout))

    def _messages(self, tasks: Mapping[int, ClientTask]) -> tuple[list[Message], list[Pending]]:
        """One message per node, because each one starts a process there."""
        packer, messages, pending = codec.Packer(), [], []
        nodes: dict[int, list[int]] = {}
        for k in sorted(tasks):
            nodes.setdefault(self.registry.nodes[k], []).append(k)
        for node, clients in nodes.items():
            content = packer.content(self._request({k: tasks[k] for k in clients}, packer))
            group = str(self._version[0])
            messages.append(Message(content, node, MessageType.TRAIN, ttl=self._ttl(), group_id=group))
            pending.append(Pending(node, tuple(clients), self._version))
        return messages, pending

    def _request(self, tasks: Mapping[int, ClientTask], packer: codec.Packer) -> Request:
        done, every = self._version[0] - 1, self.experiment.config.run.checkpoint_every
        parts = {}
        for k, task in tasks.items():
            groups, scalars = packer.groups(task.request), dict(task.request.scalars)
            parts[k] = ClientRequest(groups=groups, scalars=scalars, version=version_of(task.state))
        return Request(
            run=self.run,
            version=self._version,
            last_checkpoint=max(0, done - done % every - every),  # if the newest is damaged, the one before is used
            classes=self.experiment.data.num_classes,
            shape=self.experiment.data.input_shape,
            clients=parts,
        )

    def _wait_for_replies(self, step: Step) -> None:
        """Wait until the timeout; nodes that have not answered by then are late, and stay busy."""
        timeout = self.settings.round_timeout
        end = time.monotonic() + timeout
        while waiting := [k for p in self.pending.values() if p.version == step.version for k in p.clients]:
            if time.monotonic() > end:
                step.fail(waiting, "late", f"no reply within {timeout:g} s")
                return
            time.sleep(self.settings.poll)
            self._collect(step)
            self.experiment.env.progress("clients", len(step.replies), len(step.expected))

    def _busy(self) -> set[int]:
        return {p.node for p in self.pending.values()}

    def _ttl(self) -> float:
        return TTL_TIMEOUTS * self.settings.round_timeout

    def _push(self, messages: list[Message], pending: Sequence[Pending]) -> list[Pending]:
        """Send; returns those that could not be sent. A grid may leave these out of its list of ids, or put None there."""
        accepted = set(self.grid.push_messages(messages)) if messages else set()
        sent = list(zip((m.metadata.message_id for m in messages), pending, strict=True))
        self.pending.update({i: p for i, p in sent if i in accepted})
        return [p for i, p in sent if i not in accepted]

    def _collect(self, step: Step | None) -> None:
        """Take in whatever has arrived; a message is known by the one it replies to, not by its stated sender."""
        for message_id in list(self.pending):
            message = self._pull(message_id)
            if message is None:
                continue
            p = self.pending.pop(message_id)
            if not p.clients:
                self._register(p.node, message)
            elif step is not None and p.version == step.version:
                self._accept(p, message, step)
            else:
                clients = ", ".join(map(str, p.clients))
                log.warning("fedet: client %s answered round %s after its deadline and is free again", clients, p.version[0])

    def _pull(self, message_id: str) -> Message | None:
        """The reply to one message, if it is there.

        One at a time: the next one's bytes need not fit in memory beside it, and an unreadable one affects no other.
        """
        try:
            return next(iter(self.grid.pull_messages([message_id])), None)
        except HTTPError:
            raise
        except Exception as error:  # Flower's decoder may raise anything on bytes that someone else made up
            request = Message(RecordDict(), self.pending[message_id].node, MessageType.TRAIN)
            return Message(Error(UNREADABLE, _text(error)), reply_to=request)

    def _register(self, node: int, message: Message) -> None:
        """Accept a node's clients as far as they are plausible; whatever is wrong with its answer is logged."""
        try:
            if message.has_error():
                raise BadMessage(_error(message)[1])
            longest = codec.HEAD_PER_CLIENT + 512 * len(self.registry.clients)
            info = codec.read_head(NodeInfo, message.content, longest)
            refused = self.registry.register(node, info, set(self.grid.get_node_ids()))
        except HTTPError:
            raise
        except Exception as error:
            log.warning("fedet: node %s can't take part: %s", node, _text(error))
            return
        for client, why in refused.items():
            log.warning("fedet: client %s of node %s can't take part: %s", client, node, why)
        log.info("fedet: node %s hosts client %s", node, ", ".join(map(str, self.registry.at({node}))) or "none")

    def _accept(self, p: Pending, message: Message, step: Step) -> None:
        """Sort a node's reply into replies and failures; whatever is wrong with it concerns its own clients only."""
        try:
            if message.has_error():
                step.fail(p.clients, *_error(message))
                return
            parts = self._parts(p, message.content, step).clients
        except Exception as error:
            step.fail(p.clients, "bad reply", _text(error))
            return
        if set(parts) != set(p.clients):
            self._next_query.pop(p.node, None)  # it may have restarted as another client
        for k in p.clients:
            try:
                self._accept_client(k, parts.get(k), message.content, step)
            except Exception as error:
                step.fail([k], "bad reply", _text(error))

    def _parts(self, p: Pending, content: RecordDict, step: Step) -> Reply:
        """The head of a node's reply, if the reply's size and version are right."""
        expected = [step.expected[k] for k in p.clients]
        size, limit = codec.size_of(content), self.settings.max_reply_mb * 2**20 * len(p.clients)
        if size > limit:
            raise BadMessage(
                f"its reply has {size} bytes, more than flower.max_reply_mb = {self.settings.max_reply_mb:g} allows"
            )
        if size > codec.expected_size(expected):
            raise BadMessage(f"its reply has {size} bytes, expected at most {codec.expected_size(expected)}")
        reply = codec.read_head(Reply, content, codec.longest_reply(expected))
        if reply.version != step.version:
            raise BadMessage(f"its reply is for round and step {reply.version}, expected {step.version}")
        return reply

    def _accept_client(self, k: int, part: ClientReply | None, content: RecordDict, step: Step) -> None:
        if part is None:
            raise BadMessage("its node's reply does not mention it")
        if part.error is not None:
            step.lost_states += [k] if part.lost else []
            step.fail([k], "raised", _printable(part.error))
            return
        codec.check(part, content, step.expected[k])
        step.replies[k] = codec.decode(part, content)
        if part.kept:
            step.states[k] = {REMOTE_STATE: {"version": torch.tensor(step.version)}}


def version_of(state: ClientState) -> Version:
    """Which of the states on a client's disk is current."""
    marker = state.get(REMOTE_STATE)
    return (0, 0) if marker is None else (int(marker["version"][0]), int(marker["version"][1]))


def _error(message: Message) -> tuple[ErrorKind, str]:
    kind, text = ERRORS.get(message.error.code, ("unavailable", f"error {message.error.code}"))
    reason = _printable((message.error.reason or "").strip())
    return kind, f"{text}: {reason}" if reason else text


def _text(error: Exception) -> str:
    return _printable(str(error) if isinstance(error, BadMessage) else f"{type(error).__name__}: {error}")


def _printable(text: str, limit: int = 500) -> str:
    """A text from elsewhere as it may go into logs, metrics and terminals."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])
