"""Whatever a client sends, the server goes on: a thousand made-up bad replies through the transport."""

import copy
import functools
import json
import math
import random
import tracemalloc
import types

import pytest
import torch

pytest.importorskip("flwr")

from fakegrid import Clock, FakeGrid, error
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedet.config import FlowerConfig
from fedet.core import ClientInfo, ClientTask, Payload
from fedet.flower import codec
from fedet.flower import grid as grid_module
from fedet.flower.codec import ClientDescription, ClientReply, NodeInfo, Reply
from fedet.flower.grid import Federation, version_of

VICTIMS = range(12)
"""Clients whose whole reply is bad; each is alone at its node."""
MATE = 15
"""A client whose part of its node's reply is bad; its neighbour's, 14, is good."""
GOOD = (12, 13, 14)
CLIENTS = (*VICTIMS, *GOOD, MATE)
MEMORY = 16 << 20


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(grid_module, "time", Clock())


@functools.cache
def good_payload(k):
    """64 KB, every kind of tensor and of scalar."""
    rng = torch.Generator().manual_seed(k)
    model = {"weight": torch.randn(128, 128, generator=rng), "bias": torch.randn(128, generator=rng)}
    model |= {"steps": torch.tensor(k), "none": torch.empty(0, 3)}
    extra = {"mask": torch.rand(10, generator=rng) > 0.5, "half": torch.randn(7, generator=rng).bfloat16()}
    return Payload({"model": model, "extra": extra}, {"loss": 0.5, "steps": k, "done": True, "note": "fine"})


@functools.cache
def good_reply(*clients):
    """The head and the records of a node's good reply."""
    packer, parts = codec.Packer(), {}
    for k in clients:
        payload = good_payload(k)
        parts[k] = ClientReply(groups=packer.groups(payload), scalars=payload.scalars, kept=True)
    content = packer.content(Reply(version=(0, 0), clients=parts))
    return content.config_records["head"]["json"], dict(content.array_records)


def app(message, context):
    """A node that says which clients it has."""
    clients = {k: ClientDescription(arch="cnn", examples=10) for k in context.node_config["clients"]}
    return Message(codec.head_only(NodeInfo(clients=clients)), reply_to=message)


def federation():
    """A transport to these clients, and its grid."""
    nodes = [{"clients": [k]} for k in (*VICTIMS, 12, 13)] + [{"clients": [14, MATE]}]
    experiment = types.SimpleNamespace(
        clients=[ClientInfo(k, "cnn", 10) for k in CLIENTS],
        env=types.SimpleNamespace(archs=("cnn",), progress=lambda *_: None),
        data=types.SimpleNamespace(num_classes=10, input_shape=(1, 8, 8)),
        config=types.SimpleNamespace(run=types.SimpleNamespace(checkpoint_every=1)),
    )
    fake = FakeGrid(app, nodes, {})
    settings = FlowerConfig(poll=0.1, wait=5.0, round_timeout=5.0)
    return Federation(fake, experiment, "a run", settings), fake


def tasks():
    return {k: ClientTask(Payload({"model": {"x": torch.zeros(4)}}), {}, meta(good_payload(k))) for k in CLIENTS}


def meta(payload):
    groups = {g: {name: t.to("meta") for name, t in group.items()} for g, group in payload.tensors.items()}
    return Payload(groups, payload.scalars)


class Draft:
    """A good reply taken apart, to be spoilt."""

    def __init__(self, message, client, clients):
        self.client = str(client)
        text, records = good_reply(*clients)
        asked = json.loads(message.content.config_records["head"]["json"])
        self.head = json.loads(text) | {"version": asked["version"]}
        self.records = {name: {key: copy.copy(a) for key, a in record.items()} for name, record in records.items()}
        self.text = None
        """The head as text, if it is not to be written from `head`."""

    @property
    def part(self):
        return self.head["clients"][self.client]

    def array(self, rng):
        """One of this client's arrays, in its record."""
        record = self.records[rng.choice(sorted(self.part["groups"].values()))]
        key = rng.choice(sorted(record))
        return record, key, record[key]

    def recognizable(self):
        """Whether it can be spoilt in one more way."""
        clients = self.head.get("clients")
        if self.text is not None or not isinstance(clients, dict) or not isinstance(clients.get(self.client), dict):
            return False
        groups, scalars = self.part.get("groups"), self.part.get("scalars")
        if not isinstance(groups, dict) or not isinstance(scalars, dict) or set(groups) != {"model", "extra"}:
            return False
        return all(isinstance(name, str) and name in self.records for name in groups.values())

    def message(self, request):
        try:
            return Message(self.content(), reply_to=request)
        except Exception:  # Flower itself can't write it down
            return error(request, 3, "")

    def content(self):
        text = json.dumps(self.head) if self.text is None else self.text
        records = {name: ArrayRecord(record) for name, record in self.records.items()}
        return RecordDict({"head": ConfigRecord({"json": text}), **records})


def many_groups(rng, draft):
    """The issue's first: a record of 64 KB that thousands of groups name."""
    name = draft.part["groups"]["model"]
    draft.part["groups"] = {f"g{i}": name for i in range(rng.choice([3, 40, 2000]))}


def shape(*shapes):
    def spoil(rng, draft):
        record, key, a = draft.array(rng)
        record[key] = Array(a.dtype, rng.choice(shapes), a.stype, a.data)

    return spoil


def array(**parts):
    def spoil(rng, draft):
        _, _, a = draft.array(rng)
        name = rng.choice(sorted(parts))
        a.__dict__[name] = rng.choice(parts[name])

    return spoil


def data(change):
    def spoil(rng, draft):
        _, _, a = draft.array(rng)
        a.data = change(a.data)

    return spoil


def values(number):
    """Right in form: the engine judges numbers."""

    def spoil(rng, draft):
        record = draft.records[draft.part["groups"]["model"]]
        record["weight"] = codec.array_of(torch.full((128, 128), number))

    return spoil


def names(rng, draft):
    record, key, a = draft.array(rng)
    what = rng.randrange(3)
    if what < 2:
        del record[key]
    if what > 0:
        record[rng.choice(["", "x" * 10_000, "\x1b[2J", "Weight"])] = a


def records(rng, draft):
    what = rng.randrange(3)
    if what == 0:
        draft.records.clear()
    elif what == 1:
        draft.records |= {f"r{i}": {"x": codec.array_of(torch.zeros(100))} for i in range(rng.choice([1, 300]))}
    else:
        draft.records["9"] = {"x": codec.array_of(torch.zeros(1 << 18))}


def groups(rng, draft):
    own = draft.part["groups"]
    own.update(
        rng.choice([{"more": own["model"]}, {"model": "nowhere"}, {"model": own["extra"]}, {"model": 7}, {"model": None}])
    )
    if rng.random() < 0.3:
        del own["extra"]


ODD = [None, [], {}, "text", -1, 10**30, 10**4000, 1.5, True, math.nan, math.inf, -math.inf, "\ud800", [[1]], {"a": {"b": {}}}]


def scalars(rng, draft):
    own = draft.part["scalars"]
    name = rng.choice([*own, "more"])
    own[name] = rng.choice([*ODD, "long " * 1000])
    if rng.random() < 0.2:
        del own[name]


def scalar_type(rng, draft):
    draft.part["scalars"]["loss"] = rng.choice(["low", 1, True, 10**4000])


def part(rng, draft):
    key = rng.choice(["groups", "scalars", "kept", "error", "lost", "extra"])
    draft.part[key] = rng.choice([*ODD, "\x1b[31mred\x07", "e" * 5000, "why"])


def head(rng, draft):
    draft.head[rng.choice(["version", "clients", "extra"])] = rng.choice([*ODD, [0, 0], [1, 10**30], [-1, 1], [1, 1, 1]])


def version(rng, draft):
    draft.head["version"] = rng.choice([[0, 0], [9, 9], [10**30, 1], [-1, 1], ["1", "1"], [1.5, 1], None])


def ids(rng, draft):
    """Clients that were not asked, twice the same one, and what is no id."""
    own = draft.part
    which = rng.choice(
        [["99"], ["-1"], [draft.client, f"0{draft.client}"], ["one"], ["1e3"], ["9" * 5000], map(str, range(3000))]
    )
    others = {name: rng.choice([own, {}, {"error": "no"}]) for name in which}
    draft.head["clients"] = others if rng.random() < 0.5 else {**others, draft.client: own}


def text(rng, draft):
    whole = json.dumps(draft.head)
    cut = rng.randrange(len(whole))
    draft.text = rng.choice(
        [
            *("", "null", "[]", "7", "{", whole[:cut], whole[cut:], whole + whole, whole[:cut] + "\x00" + whole[cut:]),
            *("[" * 200_000, '{"a":' * 100_000, '{"clients": {"0": ' + "9" * 6000 + "}}", "\ud800", whole.replace('"', "'")),
            *(whole + " " * (1 << 20), b"\xff\xfe", 7, [whole], [], whole.replace("{", '{"clients": 1, ', 1)),
        ]
    )


def flip(rng, draft):
    """Any one character another."""
    whole = list(json.dumps(draft.head))
    whole[rng.randrange(len(whole))] = chr(rng.randrange(32, 0x2FF))
    draft.text = "".join(whole)


OF_A_PART = {
    "many groups": many_groups,
    "empty huge shape": shape((1 << 39, 1 << 39, 0), (0, 1 << 62, 1 << 62)),
    "1e30": values(1e30),
    "not finite": values(math.nan),
    "shape": shape((-1,), (1 << 62, 4), (1,) * 5000, (2, 2), (128, 128, 1), (), (True,), (10**400,)),
    "odd array": array(dtype=["object", "float64", "", "torch.float32", 7], stype=["pickle", "numpy.ndarray", "", None]),
    "odd data": array(data=[None, b"", b"\0" * 3, "text", bytes(1 << 20)], shape=[None, "ab", (1.5,), ("x",), {}, 7]),
    "truncated": data(lambda raw: raw[:-1]),
    "too long": data(lambda raw: raw + b"\0"),
    "twice": data(lambda raw: raw * 2),
    "names": names,
    "groups": groups,
    "scalars": scalars,
    "scalar type": scalar_type,
    "part": part,
}
OF_A_NEIGHBOUR = {kind: OF_A_PART[kind] for kind in ("empty huge shape", "1e30", "shape", "truncated", "scalar type")}
"""Those that leave the message as a whole readable, and no longer than it may be."""


def replayed(rng, draft):
    """All of a reply to another round or step."""
    asked = draft.head["version"]
    draft.head["version"] = rng.choice([[asked[0] - 1, asked[1]], [asked[0], asked[1] + 1], [asked[0] + 1, 1]])


OF_A_MESSAGE = {
    "replayed": replayed,
    "records": records,
    "head": head,
    "version": version,
    "ids": ids,
    "text": text,
    "flip": flip,
}


def errors(rng, message):
    code = rng.choice([-1, 0, 1, 2, 3, 6, 7, 8, 99, 2**31 - 1, -(2**31), 10**5000, None, "two", [1], 1.5])
    return error(message, code, rng.choice([None, "", "why", "\x1b[2J\x00\ud800", "e" * 100_000, 7, ["no", "text"]]))


def raised(rng, message):
    raise rng.choice([ValueError("bad children"), MemoryError(), RecursionError("deep"), KeyError("x"), AssertionError()])


def contents(rng, message):
    odd = Message(RecordDict(), reply_to=message)
    odd.__dict__["_content"] = rng.choice(
        [
            *(None, 7, RecordDict(), RecordDict({"head": ConfigRecord({})}), RecordDict({"head": MetricRecord({"json": 1})})),
            RecordDict({"head": ArrayRecord({"json": codec.array_of(torch.zeros(2))})}),
        ]
    )
    return odd


def bad_reply(rng, draft, kinds):
    """Spoil a draft once or twice, as long as it can still be recognized."""
    for kind in rng.sample(sorted(kinds), rng.choice([1, 1, 2])):
        kinds[kind](rng, draft)
        if not draft.recognizable():
            break


def in_form(reply, expected):
    """Groups, names, shapes, types are those of a good reply."""
    described = lambda p: (  # noqa: E731
        {(g, name, t.shape, t.dtype) for g, group in p.tensors.items() for name, t in group.items()},
        {name: type(value) for name, value in p.scalars.items()},
    )
    return described(reply) == described(expected)


class Sender:
    """Answers of all nodes: good ones of the good, and of the others whatever comes to mind."""

    def __init__(self, seed):
        self.rng, self.sent, self.kinds = random.Random(seed), 0, {}

    def __call__(self, node, message, pulls):
        if message.metadata.message_type != "train":
            return None
        client = node - 1000
        if client in VICTIMS:
            return self._bad(message, client)
        draft = Draft(message, MATE if client == 14 else client, (14, MATE) if client == 14 else (client,))
        if client == 14:
            self.sent += 1
            bad_reply(self.rng, draft, OF_A_NEIGHBOUR)
        return draft.message(message)

    def _bad(self, message, client):
        self.sent += 1
        how = self.rng.random()
        if how < 0.1:
            return errors(self.rng, message)
        if how < 0.15:
            raised(self.rng, message)
        if how < 0.2:
            return contents(self.rng, message)
        draft = Draft(message, client, (client,))
        bad_reply(self.rng, draft, OF_A_PART if how < 0.65 else OF_A_MESSAGE)
        return draft.message(message)


@pytest.mark.parametrize(
    "exchanges", [80, pytest.param(800, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=["1,000", "10,000"]
)
def test_bad_replies_end_nothing_and_cost_no_memory(exchanges):
    transport, fake = federation()
    sender, work, refused = Sender(seed=14), tasks(), 0
    fake.faults = dict.fromkeys(fake.contexts, sender)
    assert [c.num_examples for c in transport.start_round(1)] == [10] * len(CLIENTS)
    tracemalloc.start()
    try:
        for number in range(1, exchanges + 1):
            transport.start_round(number)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            delivery = transport.send(number, work)
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY
            refused += check_delivery(delivery, number, work)
    finally:
        tracemalloc.stop()
    assert sender.sent >= 12.5 * exchanges  # 12 victims, and a part of a reply now and then
    assert refused >= 0.8 * sender.sent


def check_delivery(delivery, number, work):
    """Good replies are delivered as they were sent, bad ones are named; returns how many were refused."""
    failed = [f.client for f in delivery.failures]
    assert sorted([*failed, *delivery.replies]) == sorted(CLIENTS)
    assert set(GOOD) <= set(delivery.replies)
    for k in GOOD:
        sent, got = good_payload(k).tensors, delivery.replies[k].tensors
        assert all(torch.equal(got[g][name], t) for g, group in sent.items() for name, t in group.items())
    assert all(in_form(reply, work[k].expected) for k, reply in delivery.replies.items())
    assert all(f.why.isprintable() and len(f.why) < 700 for f in delivery.failures)
    assert set(delivery.states) <= set(delivery.replies)
    assert all(version_of(state) == (number, 1) for state in delivery.states.values())
    return len(failed)


def test_clients_that_leave_after_they_were_counted_are_absent_and_not_a_crash():
    transport, fake = federation()
    transport.start_round(1)
    here = sorted(fake.contexts)
    calls = iter([here, here])  # the query's look and the count's; after that nobody is there
    fake.get_node_ids = lambda: next(calls, [])
    assert any(c.num_examples for c in transport.start_round(2))
    delivery = transport.send(2, tasks())
    assert delivery.replies == {}
    assert {f.kind for f in delivery.failures} == {"absent"}


def test_steps_are_counted_within_a_round_and_states_are_markers_of_them():
    transport, fake = federation()
    fake.faults = dict.fromkeys(fake.contexts, lambda node, message, pulls: good_or_lost(node, message))
    transport.start_round(7)
    first = transport.send(7, tasks())
    second = transport.send(7, {k: ClientTask(t.request, first.states.get(k, {}), t.expected) for k, t in tasks().items()})
    assert {version_of(state) for state in first.states.values()} == {(7, 1)}
    assert {version_of(state) for state in second.states.values()} == {(7, 2)}
    assert set(second.states) == set(CLIENTS) - {3}
    assert second.lost_states == [3]
    assert [(f.client, f.kind) for f in second.failures] == [(3, "raised")]
    transport.start_round(8)
    assert {version_of(state) for state in transport.send(8, tasks()).states.values()} == {(8, 1)}


def good_or_lost(node, message):
    """Good replies; client 3 has lost any state that it is to start from."""
    if message.metadata.message_type != "train":
        return None
    clients = {1014: (14, MATE)}.get(node, (node - 1000,))
    draft = Draft(message, clients[0], clients)
    asked = json.loads(message.content.config_records["head"]["json"])["clients"]
    if node == 1003 and asked["3"]["version"] != [0, 0]:
        draft.head["clients"]["3"] = {"error": "it is gone", "lost": True}
    return draft.message(message)
