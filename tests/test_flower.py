"""On Flower the methods are the same, the bits are the same, and what goes wrong out there is named and survived."""

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
from collections import Counter

import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

from fakegrid import Clock, FakeGrid, error, over_the_wire
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from fedet import check, config, experiment
from fedet.config import plugins
from fedet.core import Delivery, Payload
from fedet.engine import loop, rounds, session
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError, FedetError
from fedet.flower import bundle, client, client_app, codec, server
from fedet.flower import grid as grid_module
from fedet.flower.bundle import Node
from fedet.flower.codec import ClientReply, NodeQuery, Reply
from fedet.flower.versioned_store import VersionedStore
from fedet.methods import METHODS, REFERENCES
from fedet.storage.run_folder import RunFolder

FAST = {"poll": 0.1, "wait": 5.0, "round_timeout": 5.0}


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(grid_module, "time", Clock())


class Bench:
    """An app folder, a fake grid of nodes with one client each, and the run on it."""

    def __init__(self, place, method, nodes=None, **changes):
        self.place, self.app_folder = place, place / "app"
        self.app_folder.mkdir(parents=True, exist_ok=True)
        asked = {"method.name": method, **check.quick(config.method_class(method)), **changes}
        asked |= {f"flower.{key}": value for key, value in FAST.items() if f"flower.{key}" not in changes}
        self.config = config.load(check.SMALL, asked)
        plain = self.config.model_dump(mode="json", exclude_none=True)
        (self.app_folder / "fedet.toml").write_text(tomli_w.dumps(plain), encoding="utf-8")
        self.run_config = {"config": "fedet.toml", "set": "", "out": str(place / "runs")}
        self.nodes = nodes or [{"client-id": k} for k in range(self.config.data.clients)]
        self.grid = self.new_grid()

    def new_grid(self, seed=0):
        nodes = [{"folder": str(self.place / "nodes" / str(i)), **node} for i, node in enumerate(self.nodes)]
        return FakeGrid(client_app(str(self.app_folder / "apps.py")), nodes, self.run_config, seed)

    def run(self):
        return server.run(self.grid, self.run_config, self.app_folder)

    @property
    def folder(self):
        (folder,) = (p for p in (self.place / "runs").iterdir() if p.name != ".cache")
        return RunFolder(folder)

    def state(self):
        return self.folder.restore()["state"]

    def metrics(self):
        return [{key: value for key, value in e.items() if key != "seconds"} for e in self.folder.metrics()]

    def first_cohort(self):
        """Whom the first round asks."""
        built = experiment.build(self.config, self.place / "cache")
        return [c.id for c in rounds.select(built, built.clients, 1)[0]]

    def simulated(self):
        """The same configuration in the simulator."""
        built = experiment.build(self.config, self.place / "cache")
        folder = RunFolder(self.place / "simulated")
        folder.path.mkdir()
        folder.begin(built, "")
        loop.run(built, folder, InProcess(built))
        entries = [{key: value for key, value in e.items() if key != "seconds"} for e in folder.metrics()]
        return folder.restore()["state"], entries


@pytest.fixture
def bench(tmp_path):
    return lambda method, nodes=None, **changes: Bench(tmp_path, method, nodes, **changes)


QUICK = ("fedet", "fedet-plus", "fedavg", "scaffold", "dsfl", "fedgkt")


@pytest.mark.parametrize(
    "method",
    [pytest.param(cls.name, marks=() if cls.name in QUICK else pytest.mark.slow) for cls in (*METHODS, *REFERENCES)],
)
def test_every_method_gives_the_bits_of_the_simulator(bench, method):
    flower = bench(method)
    state, entries = flower.simulated()
    flower.run()
    assert check.same(flower.state(), state)
    for ours, theirs in zip(flower.metrics(), entries, strict=True):
        assert ours["failures"] == []
        measured = {"accuracy", "loss", "per_class", "confusion", "per_client"}  # FedGKT's, on another extractor
        same = set(ours) - {"models"} - (measured if method == "fedgkt" else set())
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        if method not in ("fedgkt", "local"):  # the first one's server model includes a part that stays at the client
            assert ours["models"] == {name: score for name, score in theirs["models"].items() if name != "clients"}


def test_the_models_of_clients_that_train_alone_stay_on_their_disks_and_are_the_simulators(bench):
    flower = bench("local")
    flower.simulated()
    flower.run()
    assert [key for entry in flower.metrics() for key in entry if key in ("accuracy", "models", "stored")] == []
    simulated = RunFolder(flower.place / "simulated")
    simulated.restore()
    (run,) = {path.name for path in flower.place.glob("nodes/*/state/*")}
    for k in simulated.store.clients():
        disk = VersionedStore(flower.place / "nodes" / str(k) / "state" / run / str(k))
        assert check.same(disk.load(disk._versions()[-1]), simulated.store.get(k))


@pytest.mark.parametrize("method", [cls.name for cls in REFERENCES])
def test_a_reference_is_refused_where_clients_bring_their_own_data(bench, method):
    with pytest.raises(ConfigError, match=rf"'{method}' needs the clients' data at the server.*in the simulator"):
        bench(method, **{"flower.own_data": True}).run()


def test_clients_may_share_nodes_and_replies_come_in_any_order(bench):
    flower = bench("scaffold", nodes=[{"client-ids": "0-3"}, {"client-ids": "4,5"}])
    state, entries = flower.simulated()
    flower.grid = flower.new_grid(seed=7)
    flower.run()
    assert check.same(flower.state(), state)
    assert flower.metrics() == entries
    assert [kind for _, kind, _ in flower.grid.asked].count("query") == 2


SLOW_DEATHS = (("fedavg", 1), ("scaffold", 2), ("moon", 1), ("fedgkt", 1), ("fedgems", 1))


class Crash(Exception):
    """The server's process dies."""


@pytest.mark.parametrize(
    ("method", "every"),
    [
        ("scaffold", 1),
        ("dsfl", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_DEATHS),
    ],
)
def test_a_server_that_dies_goes_on_from_its_checkpoint_with_the_same_bits(bench, method, every):
    flower = bench(method, **{"run.checkpoint_every": every})
    state, entries = flower.simulated()
    push = flower.grid.push_messages

    def deadly(messages):
        if sum(group == "3" for _, _, group in flower.grid.asked):  # all have begun or done the last round's first half
            raise Crash
        ids = push(messages)
        if messages[0].metadata.group_id == "3":
            flower.grid.order.random = lambda: 1.0
            list(flower.grid.pull_messages(ids))  # the clients do their work, and nobody is there to take it
            raise Crash
        return ids

    flower.grid.push_messages = deadly
    with pytest.raises(Crash):
        flower.run()
    assert flower.folder.restore()["round"] == 2
    flower.grid = flower.new_grid(seed=1)
    flower.run()
    assert check.same(flower.state(), state)
    assert [e["round"] for e in flower.metrics()] == [1, 2, 3]
    assert flower.metrics()[0]["cohort"] == entries[0]["cohort"]


def only_in(number, *, what):
    """A fault in one round's work."""
    return lambda node, message, pulls: what(message) if _round(message) == number else None


def _round(message):
    if message.metadata.message_type != "train":
        return 0
    return json.loads(message.content.config_records["head"]["json"])["version"][0]


@pytest.mark.parametrize(
    ("code", "kind"), [(1, "raised"), (2, "raised"), (5, "unavailable"), (8, "crashed"), (77, "unavailable")]
)
def test_an_error_is_named_and_the_round_goes_on(bench, code, kind):
    flower = bench("fedavg", **{"run.rounds": 2})
    victim = flower.first_cohort()[0]
    flower.grid.faults[1000 + victim] = only_in(1, what=lambda message: error(message, code, "it went wrong"))
    flower.run()
    first, second = flower.metrics()
    (failure,) = first["failures"]
    assert (failure["client"], failure["kind"]) == (victim, kind)
    assert "it went wrong" in failure["why"]
    assert victim not in first["replied"]
    assert len(first["replied"]) == 2
    assert not first["lost"]
    assert second["failures"] == []


SOUR = """
from dataclasses import dataclass
from fedet.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Sour(FedAvg):
    def local(self, down, client):
        if client.id % 2:
            raise ValueError('patient 4711 has no label')
        return super().local(down, client)
"""


@pytest.mark.parametrize("send", [False, True])
def test_what_a_clients_code_raises_is_named_and_its_text_stays_at_the_node_unless_asked_for(bench, tmp_path, send, caplog):
    own = own_code(tmp_path, "sour.py", SOUR)
    nodes = [{"client-ids": "0-5"} | ({"send-errors": True} if send else {})]
    flower = bench(f"{own}:Sour", nodes=nodes, **{"run.cohort": 6, "run.rounds": 1})
    with heard(caplog):
        flower.run()
    (entry,) = flower.metrics()
    assert entry["replied"] == [0, 2, 4]
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(k, "raised") for k in (1, 3, 5)]
    for why in (f["why"] for f in entry["failures"]):
        assert why.startswith("ValueError: patient 4711" if send else "ValueError at sour.py:9; the text is in the node's log")
    assert any("patient 4711 has no label" in str(r.exc_info) for r in caplog.records if r.exc_info)
    if not send:
        assert not any("4711" in path.read_text(errors="replace") for path in flower.folder.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["query", "train"])
def test_what_a_node_raises_on_its_way_to_its_clients_stays_there_too(bench, kind, caplog):
    flower = bench(
        "fedavg", nodes=[{"client-ids": "0-4"}, {"client-id": 5}], **{"run.cohort": 6, "flower.clients": 5, "run.rounds": 1}
    )
    real = flower.grid.app

    def failing(message, context):
        if context.node_id == 1001 and message.metadata.message_type == kind:
            context.node_config["arch"] = "secret"
        return real(message, context)

    flower.grid.app = failing
    with heard(caplog):
        flower.run()
    (entry,) = flower.metrics()
    assert entry["replied"] == [0, 1, 2, 3, 4]
    told = [f["why"] for f in entry["failures"]] + [
        r.getMessage() for r in caplog.records if "can't take part" in r.getMessage()
    ]
    assert told
    for why in told:
        assert "ConfigError at client.py" in why
        assert "secret" not in why


def own_code(place, name, text):
    """A file of the user's in the app folder."""
    (place / "app").mkdir(exist_ok=True)
    (place / "app" / name).write_text(text, encoding="utf-8")
    return place / "app" / name


@contextlib.contextmanager
def heard(caplog):
    """Flower's logger does not propagate."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_a_late_node_is_named_left_alone_until_free_and_its_late_work_does_not_count(bench):
    flower = bench("scaffold", **{"run.cohort": 6, "flower.round_timeout": 1.0, "run.rounds": 3})
    free = []
    grid, late = flower.grid, 1002

    def slow(node, message, pulls):
        if _round(message) != 1 or free:
            return None
        return "later"

    grid.faults[late] = slow
    push = grid.push_messages

    def pushing(messages):
        if any(m.metadata.group_id == "2" for m in messages):
            free.append(True)  # in the second round it finishes the first one's work
            assert late not in [m.metadata.dst_node_id for m in messages]
        return push(messages)

    grid.push_messages = pushing
    flower.run()
    first, second, third = flower.metrics()
    assert [(f["client"], f["kind"]) for f in first["failures"]] == [(2, "late")]
    assert 2 not in second["cohort"]
    assert second["failures"] == []
    assert 2 in third["cohort"]
    assert third["failures"] == []
    assert check.same(flower.state(), without(flower, {1: {2}, 2: {2}}))


class Absences(InProcess):
    """The simulator, without some clients in some rounds: in the first they are chosen and don't answer."""

    def __init__(self, built, missing):
        super().__init__(built)
        self.missing = missing

    def start_round(self, number):
        gone = self.missing.get(number, set()) if number > 1 else set()
        return [dataclasses.replace(c, num_examples=0) if c.id in gone else c for c in self.experiment.clients]

    def send(self, number, tasks):
        gone = self.missing.get(number, set())
        done = super().send(number, {k: task for k, task in tasks.items() if k not in gone})
        return Delivery(done.replies, done.states)


def without(flower, missing):
    """The simulator's state if these clients had not been there in these rounds."""
    built = experiment.build(flower.config, flower.place / "cache")
    folder = RunFolder(flower.place / "without")
    folder.path.mkdir()
    folder.begin(built, "")
    loop.run(built, folder, Absences(built, missing))
    return folder.restore()["state"]


def test_a_node_that_dies_is_not_asked_again_and_one_that_joins_late_is(bench):
    flower = bench(
        "fedavg", nodes=[{"client-id": k} for k in range(5)], **{"run.cohort": 6, "flower.clients": 5, "run.rounds": 3}
    )
    push = flower.grid.push_messages

    def pushing(messages):
        number = messages[0].metadata.group_id
        ids = push(messages)
        if number == "1":
            flower.grid.dead.add(1001)
        if number == "2":
            flower.grid.join({"client-id": 5, "folder": str(flower.place / "nodes" / "5")})
        return ids

    flower.grid.push_messages = pushing
    flower.run()
    first, second, third = flower.metrics()
    assert [(f["client"], f["kind"]) for f in first["failures"]] == [(1, "unavailable")]
    assert second["cohort"] == [0, 2, 3, 4]
    assert third["replied"] in ([0, 2, 3, 4, 5], [0, 2, 3, 4])  # met in the third round, if its answer came in time
    assert not any(e["lost"] for e in (first, second, third))


def test_too_few_replies_lose_the_round_and_leave_the_model_as_it_was(bench):
    flower = bench("fedavg", **{"run.rounds": 1, "flower.min_replies": 3})
    victim = flower.first_cohort()[0]
    flower.grid.faults[1000 + victim] = only_in(1, what=lambda message: error(message, 8, ""))
    flower.run()
    (entry,) = flower.metrics()
    assert entry["lost"]
    built = experiment.build(flower.config, flower.place / "cache")
    assert check.same(flower.state(), built.method.init(built.env))


def test_too_few_clients_are_waited_for_and_then_it_says_what_to_do(bench):
    flower = bench("fedavg", nodes=[{"client-id": 0}], **{"flower.wait": 0.3, "flower.min_replies": 2})
    with pytest.raises(FedetError, match=r"1 clients are connected after 0\.3 s.*start more nodes and resubmit"):
        flower.run()


BAD = {
    "shape": lambda head, records: records.update({"0": changed(records["0"], lambda t: t.reshape(-1)[:1])}),
    "type": lambda head, records: records.update({"0": changed(records["0"], lambda t: t.double())}),
    "not finite": lambda head, records: records.update({"0": changed(records["0"], lambda t: t * float("nan"))}),
    "a tensor less": lambda head, records: records["0"].popitem(),
    "no record": lambda head, records: records.clear(),
    "another group": lambda head, records: part(head).update(groups={"mode1": "0"}),
    "another client": lambda head, records: head.update(clients={"17": part(head)}),
    "unknown key": lambda head, records: part(head).update(extra=1),
    "no truth value": lambda head, records: part(head).update(kept="soon"),
    "another step": lambda head, records: head.update(version=[1, 2]),
    "another scalar": lambda head, records: part(head).update(scalars={"loss": 1.0}),
    "many groups of one record": lambda head, records: part(head).update(groups=dict.fromkeys(map(str, range(100)), "0")),
    "a huge empty shape": lambda head, records: records.update({"0": rewritten(records["0"], shape=(1 << 39, 1 << 39, 0))}),
    "a record more": lambda head, records: records.update({"9": ArrayRecord({"x": codec.array_of(torch.zeros(1))})}),
    "a deep head": lambda head, records: part(head).update(scalars=functools.reduce(lambda deep, _: [deep], range(500), 1)),
    "too short": lambda head, records: records.update({"0": rewritten(records["0"], data=b"\0" * 3)}),
    "no shape": lambda head, records: records.update({"0": rewritten(records["0"], shape=(-1, 2))}),
    "huge shape": lambda head, records: records.update({"0": rewritten(records["0"], shape=(1 << 39, 1 << 39))}),
    "pickle": lambda head, records: records.update({"0": rewritten(records["0"], stype="pickle")}),
    "no type": lambda head, records: records.update({"0": rewritten(records["0"], dtype="object")}),
    "too large": lambda head, records: records.update({"9": ArrayRecord({"x": codec.array_of(torch.zeros(3 << 18))})}),
}


def part(head):
    return next(iter(head["clients"].values()))


def changed(record, how):
    return ArrayRecord({key: codec.array_of(how(codec.tensor_of(a))) for key, a in record.items()})


def rewritten(record, **parts):
    first = next(iter(record))
    a = record[first]
    whole = {"dtype": a.dtype, "shape": a.shape, "stype": a.stype, "data": a.data} | parts
    return ArrayRecord({**record, first: Array(**whole)})


def test_numbers_that_are_finite_but_huge_lose_a_round_and_not_the_run(bench):
    flower = bench("fedet", **{"run.rounds": 2})
    victim = flower.first_cohort()[0]

    def tamper(node, reply):
        if node == 1000 + victim and reply.metadata.message_type == "train" and reply_version(reply) == 1:
            records = {name: changed(r, lambda t: torch.full_like(t, 1e30)) for name, r in reply.content.array_records.items()}
            reply.content = RecordDict({"head": reply.content.config_records["head"], **records})
        return reply

    flower.grid.tamper = tamper
    flower.run()
    first, second = flower.metrics()
    assert first["lost"]
    assert [(f["client"], f["kind"]) for f in first["failures"]] == [(victim, "suspect")]
    assert not second["lost"]
    assert flower.folder.restore()["round"] == 2


def test_with_defences_numbers_that_are_huge_cost_only_their_sender(bench):
    flower = bench("fedet", **{"run.rounds": 1, "run.robust": "on", "run.cohort": 4})
    victim = flower.first_cohort()[0]

    def tamper(node, reply):
        if node == 1000 + victim and reply.metadata.message_type == "train":
            records = {name: changed(r, lambda t: torch.full_like(t, 1e30)) for name, r in reply.content.array_records.items()}
            reply.content = RecordDict({"head": reply.content.config_records["head"], **records})
        return reply

    flower.grid.tamper = tamper
    flower.run()
    (entry,) = flower.metrics()
    assert not entry["lost"]
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(victim, "set aside")]


def test_bans_hold_and_outlive_a_restart_of_the_server(bench):
    settings = {"run.robust": "on", "run.cohort": 5, "run.ban_after": 2, "run.rounds": 2, "flower.min_replies": 3}
    flower = bench("fedavg", **settings)
    first = {}

    def tamper(node, reply):
        """One client repeats its first model under each round's number, another has a shape that nobody asked for."""
        if node not in (1001, 1004) or reply.metadata.message_type != "train":
            return reply
        head, records = reply.content.config_records["head"], dict(reply.content.array_records)
        if node == 1004:
            records["0"] = changed(records["0"], lambda t: t.reshape(-1)[:1])
        reply.content = RecordDict({"head": head, **(first.setdefault(node, records))})
        return reply

    flower.grid.tamper = tamper
    flower.run()
    flower.run_config["set"] = json.dumps({"run.rounds": 6})
    flower.grid = flower.new_grid()
    flower.grid.tamper = tamper
    flower.run()
    refused, banned = Counter(), set()
    for entry in flower.metrics():
        assert set(entry["banned"]) == banned
        assert not banned & set(entry["cohort"])
        refused.update({f["client"] for f in entry["failures"] if f["kind"] in ("bad reply", "set aside")})
        banned = {k for k, times in refused.items() if times >= 2}
    assert banned == {1, 4}
    assert refused[1] == refused[4] == 2
    assert flower.metrics()[-1]["cohort"] == [0, 2, 3, 5]
    assert not any(entry["lost"] for entry in flower.metrics())


def test_a_simulated_attack_is_refused(bench):
    with pytest.raises(ConfigError, match=r"run\.attack simulates hostile clients"):
        bench("fedet", **{"run.attack": "flip"}).run()


def reply_version(reply):
    return json.loads(reply.content.config_records["head"]["json"])["version"][0]


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_set_aside_and_named(bench, what):
    flower = bench("fedavg", **{"run.rounds": 1, "flower.max_reply_mb": 2.0})
    victim = flower.first_cohort()[0]

    def tamper(node, reply):
        if node != 1000 + victim or reply.metadata.message_type != "train":
            return reply
        head = json.loads(reply.content.config_records["head"]["json"])
        records = dict(reply.content.array_records)
        BAD[what](head, records)
        content = RecordDict({"head": ConfigRecord({"json": json.dumps(head)}), **records})
        reply.content = content
        return reply

    flower.grid.tamper = tamper
    flower.run()
    (entry,) = flower.metrics()
    (failure,) = entry["failures"]
    assert failure["client"] == victim
    assert failure["kind"] == ("diverged" if what == "not finite" else "bad reply"), failure
    assert victim not in entry["replied"]
    assert len(entry["replied"]) == 2


def test_a_reply_that_flower_itself_cannot_take_apart_spoils_no_other(bench):
    flower = bench("fedavg", **{"run.rounds": 1})
    victim = flower.first_cohort()[0]
    pull = flower.grid.pull_messages

    def pulling(ids):
        replies = pull(ids)
        if any(r.metadata.src_node_id == 1000 + victim and r.metadata.message_type == "train" for r in replies):
            raise ValueError("Unexpected set of `children`")
        return replies

    flower.grid.pull_messages = pulling
    flower.run()
    (entry,) = flower.metrics()
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(victim, "bad reply")]


CARDS = {
    "more examples than its part has": lambda card: card["clients"]["3"].update(examples=10_000),
    "no architecture of the run": lambda card: card["clients"]["3"].update(arch="gpt"),
    "a client that is not in the run": lambda card: card.update(clients={"99": card["clients"]["3"]}),
    "a negative number": lambda card: card["clients"]["3"].update(examples=-1),
    "nonsense": lambda card: card.update(clients=7),
    "another's name": lambda card: card.update(clients={"2": card["clients"]["3"]}),
}


@pytest.mark.parametrize("what", CARDS)
def test_what_a_node_says_of_itself_is_taken_within_bounds(bench, what, caplog):
    flower = bench("fedavg", **{"run.rounds": 1, "run.cohort": 6, "flower.clients": 5, "flower.wait": 1.0})

    def tamper(node, reply):
        if node == 1003 and reply.metadata.message_type == "query":
            card = json.loads(reply.content.config_records["head"]["json"])
            CARDS[what](card)
            reply.content = RecordDict({"head": ConfigRecord({"json": json.dumps(card)})})
        return reply

    flower.grid.tamper = tamper
    with heard(caplog):
        flower.run()
    (entry,) = flower.metrics()
    assert 3 not in entry["cohort"]
    assert entry["failures"] == []
    refused = [r.getMessage() for r in caplog.records if "can't take part" in r.getMessage()]
    assert refused
    if what != "another's name":
        assert "1003" in refused[0]


def test_clients_bring_their_own_data_and_architecture(bench, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def data(client):\n"
        "    rng = np.random.default_rng(client)\n"
        "    n = 20 + client\n"
        "    return rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, n)\n",
        encoding="utf-8",
    )
    own = {"data": f"{tmp_path / 'mine.py'}:data"}
    archs = ("cnn-w0.5", "resnet8-w0.0625")
    nodes = [{"client-id": k, "arch": archs[k % 2], **own} for k in range(3)]
    changes = {"flower.own_data": True, "flower.clients": 3, "run.cohort": 3, "run.rounds": 2}
    flower = bench("fedet", nodes=nodes, **changes)
    flower.run()
    for entry in flower.metrics():
        assert entry["replied"] == [0, 1, 2]
    ledger = [json.loads(line) for line in (flower.folder.path / "ledger.jsonl").read_text().splitlines()]
    sizes = [c["down"]["model"] for c in ledger[0]["clients"]]
    assert sizes[0] == sizes[2] != sizes[1]  # what they got is what they asked for


def test_a_client_that_lost_its_disk_starts_afresh(bench):
    flower = bench("scaffold", **{"run.cohort": 6, "run.rounds": 3})
    push = flower.grid.push_messages

    def pushing(messages):
        if messages[0].metadata.group_id == "2":
            shutil.rmtree(flower.place / "nodes" / "4" / "state")
        return push(messages)

    flower.grid.push_messages = pushing
    flower.run()
    first, second, third = flower.metrics()
    (failure,) = second["failures"]
    assert failure["client"] == 4
    assert "no longer on its disk" in failure["why"]
    assert first["failures"] == third["failures"] == []


def test_a_store_has_every_version_that_a_checkpoint_may_go_back_to(tmp_path):
    store = VersionedStore(tmp_path)
    state = lambda n: {"a": {"x": torch.tensor([float(n)])}}  # noqa: E731

    def load(version, last_checkpoint):
        store.prune(version, last_checkpoint)
        return store.load(version)

    assert load((0, 0), 0) == {}
    assert store.save((1, 1), {}, (0, 0)) is False  # nothing to keep
    for n in (1, 3):
        assert store.save((n, 1), state(n), (0, 0))
    assert float(load((3, 1), 2)["a"]["x"]) == 3.0
    store.save((5, 1), state(5), (3, 1))  # late: never accepted
    assert float(load((3, 1), 4)["a"]["x"]) == 3.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3-1.safetensors"]
    store.save((6, 1), state(6), (3, 1))
    store.save((6, 2), state(6.5), (6, 1))
    store.save((7, 1), state(7), (6, 2))
    assert float(load((6, 2), 4)["a"]["x"]) == 6.5
    assert float(load((3, 1), 4)["a"]["x"]) == 3.0  # the server returned to a checkpoint of round 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3-1.safetensors"]
    assert load((9, 1), 8) is None
    (tmp_path / "9-1.safetensors").write_bytes(b"half a file")
    assert load((9, 1), 8) is None  # corrupt: as good as lost


def test_records_carry_every_type_bit_for_bit():
    sent = Payload(
        {
            "x": {
                "w": torch.randn(3, 4),
                "half": torch.randn(5).bfloat16(),
                "n": torch.arange(7),
                "flag": torch.tensor([True, False]),
            },
            "y": {"empty": torch.empty(0, 10), "scalar": torch.tensor(3.5, dtype=torch.float64)},
            "none": {},
        },
        {"rate": 0.1 + 0.2, "count": 3, "yes": True, "word": "a/b", "infinite": float("inf")},
    )
    packer = codec.Packer()
    head = Reply(version=(1, 1), clients={4: ClientReply(groups=packer.groups(sent), scalars=sent.scalars)})
    content = over_the_wire(packer.content(head))
    part = codec.read_head(Reply, content).clients[4]
    codec.check(part, content, sent)
    got = codec.decode(part, content)
    assert check.same(got.tensors, sent.tensors)
    assert got.scalars == sent.scalars
    assert [type(v) for v in got.scalars.values()] == [type(v) for v in sent.scalars.values()]


def test_one_record_serves_all_clients_of_an_architecture():
    shared = {"w": torch.randn(4)}
    packer = codec.Packer()
    parts = {k: ClientReply(groups=packer.groups(Payload({"model": shared}))) for k in range(3)}
    assert len(packer.records) == 1
    assert len(packer.content(Reply(version=(1, 1), clients=parts)).array_records) == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "set the node's client"),
        ({"client-id": "x"}, "is not a list of client ids"),
        ({"client-ids": "3-"}, "is not a list of client ids"),
        ({"client-id": 1, "arhc": "cnn"}, "did you mean 'arch'"),
        ({"client-id": 1, "trust-code": "yes"}, "neither true nor false"),
    ],
)
def test_a_nodes_settings_are_checked(settings, text):
    with pytest.raises(ConfigError, match=text):
        Node.of(settings)


def test_a_nodes_clients():
    assert Node.of({"client-ids": "0-2,5"}).clients == (0, 1, 2, 5)
    assert Node.of({"partition-id": 4, "num-partitions": 9}).clients == (4,)


def test_a_run_is_the_same_wherever_its_folder_lies(tmp_path):
    names = []
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "mine.py").write_text("def data():\n    return None\n", encoding="utf-8")
        (folder / "fedet.toml").write_text('base = "digits"\n[data]\nname = "mine.py:data"\n', encoding="utf-8")
        loaded = bundle.load(folder, {"config": "fedet.toml", "set": '{"run.seed": 3, "run.rounds": 7}'})
        assert str(folder) in loaded.data.name
        names.append(bundle.identity(loaded, folder))
    assert names[0] == names[1]
    assert names[0].endswith("-s3")
    theirs = config.load(loaded.model_dump(mode="json", exclude_none=True), {"flower.own_data": True})
    assert bundle.identity(theirs, folder) != names[1]  # other data: not a run to be resumed


def test_the_flower_table_is_no_part_of_what_an_experiment_is():
    assert config.load("digits").digest() == config.load("digits", {"flower.round_timeout": 7}).digest()


def test_a_run_made_on_flower_is_not_resumed_where_its_clients_are_not(bench):
    flower = bench("scaffold", **{"run.rounds": 1, "run.cohort": 6})
    flower.run()
    with pytest.raises(FedetError, match="submit it there again"):
        session.resume(flower.folder.path, rounds=2)


def test_a_node_that_started_again_as_another_client_is_asked_who_it_is(bench):
    nodes = [{"client-id": k} for k in range(3)]
    flower = bench("fedavg", nodes=nodes, **{"run.rounds": 4, "run.cohort": 6, "flower.clients": 3})
    push = flower.grid.push_messages

    def pushing(messages):
        if messages[0].metadata.group_id == "2":
            flower.grid.contexts[1002].node_config["client-id"] = 5
        return push(messages)

    flower.grid.push_messages = pushing
    flower.run()
    replied = [e["replied"] for e in flower.metrics()]
    assert replied[:2] == [[0, 1, 2], [0, 1]]
    assert replied[-1] == [0, 1, 5]


def test_clients_with_their_own_data_load_the_public_data_too(bench, tmp_path):
    mine = own_code(
        tmp_path,
        "mine.py",
        "import numpy as np\n"
        "def data(client):\n"
        "    rng = np.random.default_rng(client)\n"
        "    return rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8), rng.integers(0, 13 if client == 2 else 3, 20)\n"
        "def public(n, seed, input_shape):\n"
        "    return np.random.default_rng(seed).integers(0, 256, (n, *input_shape), dtype=np.uint8)\n",
    )
    nodes = [{"client-id": k, "data": f"{mine}:data", "send-errors": True} for k in range(3)]
    own = {"flower.own_data": True, "flower.clients": 3, "run.cohort": 3, "run.rounds": 2}
    public = {"data.public": f"{mine}:public", "data.public_size": 40, "method.samples": 30}
    flower = bench("dsfl", nodes=nodes, **own, **public)
    flower.run()
    for entry in flower.metrics():
        assert entry["replied"] == [0, 1]
        assert {f["client"] for f in entry["failures"]} == {2}
        assert "has the label 12, the run has 10 classes" in entry["failures"][0]["why"]


def test_fedgems_runs_with_data_of_the_clients_and_labelled_public_data(bench, tmp_path):
    mine = own_code(
        tmp_path,
        "mine.py",
        "import numpy as np\n"
        "def data(client):\n"
        "    rng = np.random.default_rng(client)\n"
        "    return rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, 20)\n"
        "def public(n, seed, input_shape):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    return rng.integers(0, 256, (n, *input_shape), dtype=np.uint8), rng.integers(0, 10, n)\n",
    )
    nodes = [{"client-id": k, "data": f"{mine}:data"} for k in range(3)]
    own = {"flower.own_data": True, "flower.clients": 3, "run.cohort": 3, "run.rounds": 2}
    flower = bench("fedgems", nodes=nodes, **own, **{"data.public": f"{mine}:public", "data.public_size": 40})
    flower.run()
    for entry in flower.metrics():
        assert entry["replied"] == [0, 1, 2], entry["failures"]
        assert entry["notes"]["asked"] > 0


OUTSIDE = """
from dataclasses import dataclass
from pathlib import Path
from fedet.methods.fedavg import FedAvg

(Path(__file__).parent / "was-here").touch()

@dataclass(frozen=True)
class Outside(FedAvg):
    pass
"""


@pytest.fixture
def outside(tmp_path):
    """A method in a file outside the app folder, which leaves a trace when it is loaded."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "code.py").write_text(OUTSIDE, encoding="utf-8")
    return folder


def test_the_server_runs_no_code_from_outside_the_app_unless_its_operator_says_so(bench, outside, monkeypatch):
    flower = bench("fedavg", **{"run.rounds": 1})
    flower.run_config["set"] = json.dumps({"method.name": f"{outside / 'code.py'}:Outside"})
    with pytest.raises(
        ConfigError, match="is not in the app folder: to allow other code, start the SuperLink with FEDET_TRUST_CODE=1"
    ):
        flower.run()
    assert not (outside / "was-here").exists()
    monkeypatch.setenv("FEDET_TRUST_CODE", "1")
    flower.run()
    assert (outside / "was-here").exists()
    assert len(flower.metrics()) == 1


def test_a_submitted_setting_can_not_call_what_is_installed(bench, tmp_path):
    flower = bench("fedavg")
    trace = tmp_path / "trace"
    flower.run_config["set"] = json.dumps({"models.server": {"name": "os:system", "options": {"command": f"touch {trace}"}}})
    with pytest.raises(ConfigError, match="'os:system' is not in the app folder"):
        flower.run()
    assert not trace.exists()


def test_a_node_runs_no_code_from_outside_the_app_unless_its_operator_says_so(bench, outside):
    flower = bench("fedavg")
    changes = {"method.name": f"{outside / 'code.py'}:Outside"}
    run_config = flower.run_config | {"set": json.dumps(changes)}
    run = bundle.identity(flower.config, flower.app_folder)
    for trusted, kind in ((False, plugins.UntrustedCode), (True, client.PublicError)):  # then: it is another run's name
        (outside / "was-here").unlink(missing_ok=True)
        context = Context(1, 1, {"client-id": 0, "trust-code": trusted}, RecordDict(), run_config)
        with pytest.raises(kind):
            client.describe(codec.head_only(NodeQuery(run=run)), context, flower.app_folder)
        assert (outside / "was-here").exists() == trusted


def test_references_are_limited_to_a_folder_by_where_their_code_is(tmp_path, monkeypatch):
    inside = tmp_path / "app"
    (inside / "package").mkdir(parents=True)
    (inside / "package" / "part.py").write_text("thing = 1\n", encoding="utf-8")
    (inside / "alone.py").write_text("thing = 2\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("thing = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(inside)
    monkeypatch.chdir(tmp_path)
    link = inside / "link.py"
    link.symlink_to(tmp_path / "other.py")
    with plugins.only_from(inside, "no"):
        assert plugins.resolve("package.part:thing", "model") == 1
        assert plugins.resolve(f"{inside / 'alone.py'}:thing", "model") == 2
        refused = [
            "os:system",
            "other:thing",
            f"{link}:thing",
            f"{inside}/../other.py:thing",
            "nowhere:thing",
            ".x:y",
            "__main__:x",
        ]
        for reference in refused:
            with pytest.raises(plugins.UntrustedCode, match="is not in the app folder: no"):
                plugins.resolve(reference, "model")
        with plugins.only_from(None):
            assert plugins.resolve(f"{link}:thing", "model") == 3
    assert callable(plugins.resolve("os:system", "model"))
