"""Whatever clients send in the simulator, the round ends, names them, and leaves a finite state."""

import json
import random

import bad_replies
import pytest
from lab import chosen

from fedet import check, config, experiment
from fedet.core import Delivery, Round
from fedet.engine import exchange, gate, rounds
from fedet.engine.exchange import InProcess, RoundExchange
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
        return Delivery(replies, {k: dict(task.state) for k, task in tasks.items()})


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
