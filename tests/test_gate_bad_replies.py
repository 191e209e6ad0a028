"""Whatever clients send in the simulator, the round ends, names them, and leaves a finite state."""

import json
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import bad_replies
import numpy as np
import pytest
import torch
from lab import chosen

from fedet import check, config, experiment
from fedet.core import Delivery, Payload, Round
from fedet.engine import exchange, gate, rounds
from fedet.engine.exchange import InProcess, RoundExchange
from fedet.methods import fedavg
from fedet.storage.client_store import ClientStore

METHODS = ("fedet", "scaffold", "dsfl", "fedgkt", "fedgems")
CLIENTS = 6


class Hostile(InProcess):
    """Two of the clients send bad replies, made from those that good ones sent once; nobody trains again."""

    def __init__(self, ready, rng):
        super().__init__(ready)
        self.rng, self.good, self.last, self.sent = rng, {}, {}, 0
        self.hostile = ()

    def send(self, number, tasks):
        replies = {}
        for k, task in sorted(tasks.items()):
            asked = (k, tuple(sorted((g, tuple(sorted(t))) for g, t in task.request.tensors.items())))
            if asked not in self.good:
                self.good[asked] = super().send(number, {k: task})
            reply = self.good[asked].replies[k]
            if k in self.hostile:
                reply, _ = bad_replies.spoilt(self.rng, reply, task.request)
                self.sent += 1
            replies[k] = reply
        self.last = replies
        intruders = dict.fromkeys([-1, 99, 1 << 70, "0"], next(iter(replies.values())))
        numbered = {np.int64(k): reply for k, reply in replies.items()}
        return Delivery({**intruders, **numbered}, {k: dict(task.state) for k, task in tasks.items()})


def bombard(method, replies, tmp_path, seed=0):
    """Let that many bad replies through the exchange and the gate; returns how many were refused."""
    short = check.quick(config.method_class(method))
    changes = {"method.name": method, **short, "run.robust": {"replays": False}, "run.cohort": CLIENTS}
    ready = experiment.build(config.load(check.SMALL, changes), tmp_path / "cache")
    rng = random.Random(f"{method} {seed}")
    transport = Hostile(ready, rng)
    requests = first_requests(ready)
    refused = number = 0
    while transport.sent < replies:
        number += 1
        transport.hostile = rng.sample(range(CLIENTS), 2)
        talk = RoundExchange(ready, ready.clients, ClientStore(tmp_path / "states"), 1, transport.send)
        accepted = talk(requests)
        refused += len(talk.failures)
        check_round(ready, transport, talk, requests, accepted)
    return refused, transport.sent


def first_requests(ready):
    """The requests of the method's first exchange."""
    found = {}

    class Stop(Exception):
        pass

    def exchange_once(requests):
        found.update(requests)
        raise Stop

    with pytest.raises(Stop):
        ready.method.round(ready.method.init(ready.env), Round(1, chosen(ready, 1), exchange_once, 0), ready.env)
    return found


def check_round(ready, transport, talk, requests, accepted):
    failed = {f.client for f in talk.failures}
    assert failed | accepted.keys() == requests.keys()
    assert not failed & accepted.keys()
    json.dumps([f.as_dict() for f in talk.failures])
    assert all(len(f.why) < 2000 for f in talk.failures)
    for k, reply in accepted.items():
        expected = ready.method.expected_reply(requests[k], ready.clients[k], ready.env)
        assert exchange.inspect(k, reply, expected) is None
    alone = gate.judge(ready, ready.clients, 1, requests, {k: transport.last[k] for k in accepted}, {})
    assert alone.failures == []
    assert check.same(alone.replies, accepted)  # as if those that were refused had never answered


@pytest.mark.parametrize("method", METHODS)
def test_bad_replies_are_refused_or_scaled_down(tmp_path, method):
    refused, sent = bombard(method, 60, tmp_path)
    assert refused >= 0.3 * sent


@dataclass(frozen=True)
class Own(fedavg.FedAvg):
    """Somebody's method, whose clients send a count and a name, too; the count is used without a check."""

    name: ClassVar[str] = "own"

    def round(self, state, r, env):
        ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return r.average([up.tensors["model"] for up in ups.values()], [up.scalars["n"] for up in ups.values()])

    def expected_reply(self, down, client, env):
        return Payload({"model": down.tensors["model"]}, {"n": 0, "who": ""})

    def local(self, down, client):
        return Payload({"model": down.tensors["model"]}, {"n": len(client.data), "who": "me"})


def _model(change):
    return lambda up: Payload({"model": {name: change(t) for name, t in up.tensors["model"].items()}}, up.scalars)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda up: "hello", "of type str: it must be a Payload"),
        (lambda up: None, "nothing (None): it must be a Payload"),
        (lambda up: Payload(None, up.scalars), "must hold groups of named tensors"),
        (lambda up: Payload(up.tensors, [1]), "as its scalars: they are a dict"),
        (lambda up: Payload({"model": list(up.tensors["model"])}, up.scalars), "a group is a dict of named tensors"),
        (lambda up: Payload({**up.tensors, 5: {}}, up.scalars), "names are strings"),
        (lambda up: Payload({"model": {**up.tensors["model"], 7: torch.ones(1)}}, up.scalars), "names are strings"),
        (lambda up: Payload(up.tensors, {**up.scalars, 7: 1}), "names are strings"),
        (lambda up: Payload(up.tensors, {**up.scalars, "n": 10**400}), "64 bits"),
        (_model(lambda t: t.to_sparse()), "must be dense"),
        (_model(lambda t: t.to("meta")), "must be dense"),
        (_model(lambda t: t.tolist()), "must be a tensor"),
        (_model(lambda t: t.numpy()), "must be a tensor"),
    ],
)
@pytest.mark.parametrize("robust", ["off", "on"])
def test_what_is_no_message_at_all_is_a_bad_reply(tmp_path, robust, bad, why):
    ready = experiment.build(config.load(check.SMALL, {"run.robust": robust, "run.cohort": CLIENTS}), tmp_path / "cache")
    ready = replace(ready, method=Own())

    class Transport(InProcess):
        def send(self, number, tasks):
            delivery = super().send(number, tasks)
            return replace(delivery, replies=delivery.replies | {2: bad(delivery.replies[2])})

    snapshot = rounds.Snapshot(ready.method.init(ready.env))
    entry, _, _ = rounds.run_round(ready, ClientStore(tmp_path / "states"), snapshot, Transport(ready))
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(2, "bad reply")]
    assert why in entry["failures"][0]["why"]
    assert not entry["lost"]
    assert 2 not in entry["replied"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_ten_thousand_bad_replies(tmp_path, method):
    refused, sent = bombard(method, 2000, tmp_path, seed=1)
    assert sent >= 2000
    assert refused >= 0.3 * sent


@pytest.mark.parametrize("method", ["fedet", "fedavg"])
def test_the_server_stays_finite_whatever_two_of_six_send(tmp_path, method):
    short = check.quick(config.method_class(method))
    changes = {"method.name": method, **short, "run.robust": {"replays": False}, "run.cohort": CLIENTS}
    ready = experiment.build(config.load(check.SMALL, changes), tmp_path / "cache")
    transport, store = Hostile(ready, random.Random(3)), ClientStore(tmp_path / "states")
    snapshot = rounds.Snapshot(ready.method.init(ready.env))
    for _ in range(6):
        transport.hostile = transport.rng.sample(range(CLIENTS), 2)
        _, _, snapshot = rounds.run_round(ready, store, snapshot, transport)
        assert rounds.state_is_finite(snapshot.state)
