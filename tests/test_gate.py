"""The gate's promises: whoever is set aside never answered, to the bit; who is clipped, banned, remembered, believed."""

import functools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lab import Altered

import fedet
from fedet import check, config, experiment
from fedet.config.schema import RobustConfig
from fedet.core import ClientInfo, Delivery, Failure, Payload, Round
from fedet.engine import evidence, gate, rounds
from fedet.engine.callbacks import Callbacks
from fedet.engine.evidence import Evidence
from fedet.engine.exchange import InProcess
from fedet.errors import Diverged, FedetError, Interrupted
from fedet.methods import METHODS
from fedet.storage import checkpoint, files
from fedet.storage.client_store import ClientStore
from fedet.storage.records import CheckpointRecord
from fedet.trust import averages as robust

FEDERATED = [cls.name for cls in METHODS]
ON = {"run.robust": "on", "run.cohort": 6}


@functools.cache
def base(method):
    short = check.quick(config.method_class(method))
    return experiment.build(config.load(check.SMALL, {"method.name": method, **short, **ON}), Path("unused"))


def built(method="fedet", **run):
    """The small federation with defences and these keys of `[run]`; building it again would take longer than a round."""
    ready = base(method)
    changed = config.RunConfig.model_validate({**ready.config.run.model_dump(), **run})
    return replace(ready, config=ready.config.model_copy(update={"run": changed}))


def play(ready, tmp_path, transport, rounds_to_play=1):
    store, entries = ClientStore(tmp_path / "states"), []
    snapshot = rounds.Snapshot(ready.method.init(ready.env))
    for _ in range(rounds_to_play):
        entry, _, snapshot = rounds.run_round(ready, store, snapshot, transport)
        store.commit(snapshot.round)
        entries.append(entry)
    return snapshot, entries, store


class Silent(InProcess):
    """Some clients never answer."""

    def __init__(self, ready, silent):
        super().__init__(ready)
        self.silent = silent

    def send(self, number, tasks):
        return super().send(number, {k: task for k, task in tasks.items() if k not in self.silent})


def multiplied(factor, victims):
    def change(k, up):
        if k not in victims:
            return up
        groups = {
            g: {n: t * factor if t.is_floating_point() and not robust.is_probabilities(t) else t for n, t in group.items()}
            for g, group in up.tensors.items()
        }
        return Payload(groups, up.scalars)

    return change


QUICK = ("fedet", "scaffold", "fedgkt", "fedgems")


class Shuffled(InProcess):
    """Replies, states and failures arrive in an order of their own, and tensors within a reply too; some send too much."""

    def __init__(self, ready, seed):
        super().__init__(ready)
        self.order = random.Random(seed)

    def send(self, number, tasks):
        delivery = super().send(number, tasks)
        late = [Failure(k, "late", "no reply") for k in tasks if k in (0, 2)]
        replies = {k: self.shuffled(multiplied(1e5, {4})(k, up)) for k, up in delivery.replies.items() if k not in (0, 2)}
        return Delivery(self.mixed(replies), self.mixed(delivery.states), self.order.sample(late, len(late)))

    def shuffled(self, up):
        return Payload({g: self.mixed(group) for g, group in self.mixed(up.tensors).items()}, self.mixed(up.scalars))

    def mixed(self, mapping):
        return dict(self.order.sample(list(mapping.items()), len(mapping)))


@pytest.mark.parametrize("average", ["mean", "krum"])
@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in FEDERATED])
def test_who_answers_first_changes_no_bit(tmp_path, method, average):
    ready = built(method, robust={"average": average})
    one, two = (play(ready, tmp_path / str(seed), Shuffled(ready, seed), 2) for seed in (1, 2))
    assert check.same(one[0].state, two[0].state)
    assert one[0].directions == two[0].directions
    assert one[0].bodies == two[0].bodies
    assert [entry["failures"] for entry in one[1]] == [entry["failures"] for entry in two[1]]
    assert all(check.same(one[2].get(k), two[2].get(k)) for k in range(6))


def test_ids_from_numpy_are_ids(tmp_path):
    """A method may choose whom it asks with NumPy; the round's record still has to be JSON."""

    class Choosing(type(base("fedavg").method)):
        def round(self, state, r, env):
            ids = np.array([c.id for c in r.cohort])[::-1]
            r.exchange({k: Payload({"model": state}) for k in ids})
            return state

    ready = replace(built("fedavg", ban_after=1, dropout=0.4), method=Choosing())
    snapshot, entries, _ = play(ready, tmp_path, Altered(ready, multiplied(1e5, {1, 4})), 2)
    assert {"dropped", "set aside"} <= {f["kind"] for entry in entries for f in entry["failures"]}
    json.dumps(entries)
    checkpoint.save(tmp_path / "c.safetensors", {"set_aside": snapshot.set_aside, "replies": snapshot.replies})


@pytest.mark.parametrize(
    "method",
    [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in FEDERATED if m != "dsfl"],  # it has no sizes
)
def test_a_round_without_those_set_aside_is_one_in_which_they_never_answered(tmp_path, method):
    ready = built(method)
    hostile, entries, kept = play(ready, tmp_path / "a", Altered(ready, multiplied(1e5, {1, 4})))
    silent, _, kept_silent = play(ready, tmp_path / "b", Silent(ready, {1, 4}))
    assert check.same(hostile.state, silent.state)
    for entry in entries:
        out = {f["client"]: f for f in entry["failures"]}
        assert out.keys() == {1, 4}
        assert {f["kind"] for f in out.values()} == {"set aside"}
        assert not {1, 4} & set(entry["replied"])
        assert not entry["lost"]
    for k in range(6):
        assert check.same(kept.get(k), kept_silent.get(k))


def model_replies(ready, sizes):
    """Requests with the initial models, and replies that are this far away from them."""
    arch = {c.id: c.arch if ready.method.traits.heterogeneous else ready.env.large for c in ready.clients}
    start = {k: ready.env.initial(arch[k]) for k in sizes}
    requests = {k: Payload({"model": w}) for k, w in start.items()}
    replies = {}
    for k, size in sizes.items():
        g = torch.Generator().manual_seed(k)
        way = {name: torch.randn(w.shape, generator=g) for name, w in start[k].items()}
        update = {name: w * (size / robust.norm(way)) for name, w in way.items()}
        sent = update if ready.method.sends_updates else {name: w + update[name] for name, w in start[k].items()}
        replies[k] = Payload({"model": sent})
    return requests, replies


def update_norm(ready, request, reply):
    sent = reply.tensors["model"]
    return robust.norm(sent if ready.method.sends_updates else robust.difference(sent, request.tensors["model"]))


@pytest.mark.parametrize("method", ["fedet", "fedavg", "scaffold"])
def test_updates_far_above_the_median_are_scaled_down_and_the_others_are_what_was_sent(tmp_path, method):
    ready = built(method, robust={"agreement": 0.0, "clip": 1.5})
    requests, replies = model_replies(ready, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.5, 4: 2.0})
    verdict = gate.judge(ready, ready.clients, 1, requests, replies, {})
    assert verdict.failures == []
    assert verdict.clipped == [3, 4]
    norms = {k: update_norm(ready, requests[k], reply) for k, reply in verdict.replies.items()}
    assert norms == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.45, 4: 0.45}, rel=1e-4)
    assert all(verdict.replies[k] is replies[k] for k in (0, 1, 2))


def test_each_of_several_colluders_is_set_aside_and_the_median_is_that_of_the_others(tmp_path):
    ready = built(robust={"clip": 1.0})
    requests, replies = model_replies(ready, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 1e3, 5: 1e4})
    verdict = gate.judge(ready, ready.clients, 1, requests, replies, {})
    assert [f.client for f in verdict.failures] == [5, 4]
    honest = {k: replies[k] for k in range(4)}
    alone = gate.judge(ready, ready.clients, 1, requests, honest, {})
    assert verdict.clipped == alone.clipped == [2, 3]
    assert check.same(verdict.replies, alone.replies)


def test_a_cohort_of_which_half_sends_huge_updates_goes_on_with_the_other_half(tmp_path):
    ready = built()
    requests, replies = model_replies(ready, {0: 0.1, 1: 0.2, 2: 0.3, 3: 1e3, 4: 2e3, 5: 1e3})
    assert sorted(f.client for f in gate.judge(ready, ready.clients, 1, requests, replies, {}).failures) == [3, 4, 5]


def test_most_of_a_cohort_can_not_make_updates_longer_than_the_model_itself_look_usual(tmp_path):
    six = built()
    ready = replace(six, clients=[*six.clients, *(replace(c, id=c.id + 6) for c in six.clients)])
    requests, replies = model_replies(ready, {0: 0.1, 1: 0.2, 2: 0.3, 3: 1e3, 4: 2e3, 5: 1e3, 6: 1e3, 7: 3e3})
    assert sorted(f.client for f in gate.judge(ready, ready.clients, 1, requests, replies, {}).failures) == [3, 4, 5, 6, 7]


def test_who_still_learns_where_others_have_nothing_to_learn_is_heard(tmp_path):
    ready = built(robust={"agreement": 0.0})
    requests, replies = model_replies(ready, {0: 1e-3, 1: 1e-3, 2: 1e-3, 3: 1e-3, 4: 0.05})  # fifty times the median
    verdict = gate.judge(ready, ready.clients, 1, requests, replies, {})
    assert verdict.failures == []
    assert verdict.clipped == [4]
    assert update_norm(ready, requests[4], verdict.replies[4]) == pytest.approx(1.5e-3, rel=1e-3)


def soft_labels(choices):
    """Replies of DS-FL that choose these classes for twenty inputs each."""
    rows = torch.arange(20)
    probs = {k: torch.full((20, 10), 0.01).index_put((rows, choice(rows)), torch.tensor(0.91)) for k, choice in choices.items()}
    return {k: Payload({"labels": {"probs": p}}) for k, p in probs.items()}


def diagonal(rows):
    return rows % 10


def judged_labels(choices, known=(), **settings):
    """What the gate says of DS-FL's clients that choose these classes, some of whom it has heard before."""
    ready = built("dsfl", robust=settings)
    requests = {k: Payload({"request": {"samples": torch.arange(20)}}) for k in choices}
    memory = {k: [0.0, 1.0] for k in known}
    return gate.judge(ready, 2 * list(ready.clients), 1, requests, soft_labels(choices), {}, memory)


def test_soft_labels_that_contradict_the_majority_are_set_aside_once_there_is_one():
    choices = dict.fromkeys(range(5), diagonal) | {5: lambda rows: (rows + 1) % 10}
    verdict = judged_labels(choices, correlation=0)
    assert [(f.client, f.kind) for f in verdict.failures] == [(5, "set aside")]
    assert "on 0% of the public inputs, the median client on 100%" in verdict.failures[0].why
    everyone_differs = {k: lambda rows, k=k: (rows + k) % 10 for k in range(6)}
    assert judged_labels(everyone_differs, correlation=0).failures == []


def test_most_of_a_cohort_can_not_make_soft_labels_that_say_nothing_look_usual():
    choices = dict.fromkeys(range(3), diagonal) | dict.fromkeys(range(3, 9), torch.zeros_like)
    verdict = judged_labels(choices, known=range(9))
    assert [(f.client, f.kind) for f in verdict.failures] == [(k, "set aside") for k in range(3, 9)]
    assert "its soft labels correlate with those of the others by 0.00, a usual client's by" in verdict.failures[0].why
    assert {f.client for f in judged_labels(choices, known=range(9), correlation=0).failures} == {0, 1, 2}  # by agreement


def test_two_clients_that_have_something_in_common_do_not_set_the_others_aside():
    draws = {k: torch.randint(10, (20,), generator=torch.Generator().manual_seed(21 + k)) for k in range(2, 6)}
    guessing = {k: lambda rows, k=k: draws[k][rows] for k in draws}
    assert judged_labels(dict.fromkeys(range(2), diagonal) | guessing, known=range(6)).failures == []


def test_a_first_reply_of_soft_labels_passes_and_is_remembered():
    choices = dict.fromkeys(range(4), diagonal) | {4: torch.zeros_like, 5: lambda rows: (rows + 1) % 10}
    first = judged_labels(choices, known=range(4))
    assert first.failures == []
    assert first.cosines.keys() == choices.keys()
    assert {f.client for f in judged_labels(choices, known=first.cosines).failures} == {4, 5}


class Labelled(Silent):
    """DS-FL's clients all say the same of an input, but for two that say the same of all; some clients never answer."""

    def send(self, number, tasks):
        delivery = super().send(number, tasks)
        return replace(delivery, replies={k: self.labelled(k, up) for k, up in delivery.replies.items()})

    def labelled(self, k, up):
        if "labels" not in up.tensors:
            return up
        rows = torch.arange(len(up.tensors["labels"]["probs"]))
        classes = self.experiment.env.num_classes
        chosen = torch.zeros_like(rows) if k in (1, 4) else rows % classes
        return Payload({"labels": {"probs": torch.nn.functional.one_hot(chosen, classes).float()}})


def test_a_round_of_soft_labels_without_those_set_aside_is_one_in_which_they_never_answered(tmp_path):
    ready = built("dsfl")
    heard = rounds.Snapshot(ready.method.init(ready.env), directions={k: [0.0, 1.0] for k in range(6)})
    all_answer, two_silent = ClientStore(tmp_path / "a"), ClientStore(tmp_path / "b")
    entry, _, after = rounds.run_round(ready, all_answer, heard, Labelled(ready, ()))
    _, _, without = rounds.run_round(ready, two_silent, heard, Labelled(ready, (1, 4)))
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(1, "set aside"), (4, "set aside")]
    assert check.same(after.state, without.state)
    assert all(check.same(all_answer.get(k), two_silent.get(k)) for k in range(6))


def test_a_client_that_knows_only_two_classes_is_heard():
    choices = dict.fromkeys(range(5), diagonal) | {5: lambda rows: torch.where(rows % 10 == 3, 3, 0)}
    assert judged_labels(choices, known=range(6)).failures == []


def test_outputs_that_are_not_finite_on_public_inputs_are_found(tmp_path):
    ready = built(robust={"reject": 0.0, "clip": 0.0})
    _, (entry,), _ = play(ready, tmp_path, Altered(ready, multiplied(1e30, {2})))
    assert [f["client"] for f in entry["failures"]] == [2]
    assert "finite" in entry["failures"][0]["why"]


@pytest.mark.parametrize("size", [1e150, 1e200, 1e308])
def test_values_whose_squares_are_no_numbers_are_judged_by_their_size(size):
    w = {"w": torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) * (size / 5), "n": torch.tensor([7])}
    assert robust.norm(w) == pytest.approx(size)
    assert robust.norm(dict.fromkeys("abcd", torch.tensor([1.7e308], dtype=torch.float64))) == math.inf


@pytest.mark.parametrize("factor", [1e200, 1e308, -1e308])
@pytest.mark.parametrize("group", ["model", "said"])
def test_most_of_a_cohort_can_not_hide_behind_sizes_that_are_no_numbers(group, factor):
    """Four of seven: their median is infinite, with which nothing can be compared."""
    ready = built(robust={"agreement": 0.0, "direction": 0.0})
    ready = replace(ready, clients=2 * list(ready.clients))
    start, way = torch.ones(8, dtype=torch.float64), torch.arange(8, dtype=torch.float64) / 10
    requests = {k: Payload({"model": {"w": start}} if group == "model" else {}) for k in range(7)}
    hostile = dict.fromkeys(range(3, 7), way * factor - 1e308)
    replies = {k: Payload({group: {"w": hostile.get(k, start + way)}}) for k in range(7)}
    verdict = gate.judge(ready, ready.clients, 1, requests, replies, {})
    assert [f.client for f in verdict.failures] == [3, 4, 5, 6]
    assert not any("nan" in f.why or "inf" in f.why for f in verdict.failures)


def test_the_public_inputs_of_the_gate_are_others_in_every_round(monkeypatch):
    monkeypatch.setattr(evidence, "BATCH", 20)
    ready = built()
    rows = [evidence._public_batch(ready, number).data for number in (1, 2, 1)]
    assert [len(r) for r in rows] == [20] * 3
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    other = replace(ready, config=ready.config.model_copy(update={"run": ready.config.run.model_copy(update={"seed": 1})}))
    assert not torch.equal(evidence._public_batch(other, 1).data, rows[0])


def test_a_replay_is_known_again(tmp_path):
    ready, first = built(), {}

    def replay(k, up):
        return first.setdefault(k, up) if k == 2 else up

    _, entries, _ = play(ready, tmp_path / "a", Altered(ready, replay), 3)
    assert [[f["client"] for f in entry["failures"]] for entry in entries] == [[], [2], [2]]
    assert "before" in entries[1]["failures"][0]["why"]


@pytest.mark.parametrize("method", [m if m == "fedgkt" else pytest.param(m, marks=pytest.mark.slow) for m in FEDERATED])
def test_an_honest_client_is_never_taken_for_a_replay(tmp_path, method):
    ready = built(method)
    _, entries, _ = play(ready, tmp_path, InProcess(ready), 3)
    assert not any("before" in f["why"] for entry in entries for f in entry["failures"])


def test_with_fewer_than_three_replies_nobody_is_compared(tmp_path):
    ready = built(cohort=2)
    _, (entry,), _ = play(ready, tmp_path, InProcess(ready))
    assert entry["failures"] == []
    assert entry["clipped"] == []


def _overflowing(ready):
    """SCAFFOLD whose server's step leaves the finite numbers, whatever the clients send."""
    return replace(ready, method=replace(ready.method, server_lr=1e45))


def test_a_server_that_leaves_the_finite_numbers_is_a_lost_round_and_the_run_goes_on(tmp_path):
    ready, off = (_overflowing(built("scaffold", robust=switch)) for switch in ({"direction": 0.0}, "off"))
    snapshot, entries, _ = play(ready, tmp_path / "a", InProcess(ready), 2)
    assert [entry["lost"] for entry in entries] == [True, True]
    assert {f["kind"] for entry in entries for f in entry["failures"]} == {"suspect"}
    assert check.same(snapshot.state, ready.method.init(ready.env))
    with pytest.raises(Diverged):
        play(off, tmp_path / "b", InProcess(off))


# Direction


def _heading(*rows):
    """The evidence of clients whose updates of the head are these vectors."""
    return {
        k: Evidence({}, {}, None, None if row is None else torch.tensor(row, dtype=torch.float64)) for k, row in enumerate(rows)
    }


TOWARDS, AGAINST = (1.0, 0.2), (-1.0, 0.1)


def test_a_client_is_set_aside_once_it_has_pointed_against_the_others_again():
    measured = _heading(*[TOWARDS] * 5, AGAINST)
    failures, first = gate._opposing(measured, 0.02, {})
    assert failures == []  # one reply is no evidence
    assert first[5] == pytest.approx(-0.98 / (1.04 * 1.01) ** 0.5)
    known = gate.directed({}, {k: [c] for k, c in first.items()})
    failures, second = gate._opposing(measured, 0.02, known)
    assert [f.client for f in failures] == [5]
    assert "point against those of the others, with a mean cosine of -0.64 in 2 replies" in failures[0].why
    assert second[5] == pytest.approx(first[5])  # it is still measured, and may improve
    assert all(second[k] == pytest.approx(1.0) for k in range(5))  # the others, as if it had never answered


def test_a_client_that_opposed_the_others_once_is_not_set_aside_for_ever():
    known = {k: [1.0, 2.0] for k in range(5)} | {5: [-0.5, 1.0]}
    assert gate._opposing(_heading(*[TOWARDS] * 6), 0.02, known)[0] == []


@pytest.mark.parametrize(
    ("rows", "limit", "last"),
    [
        ([TOWARDS] * 5 + [AGAINST], 0.0, [-1.0, 3.0]),  # turned off
        ([TOWARDS] * 4 + [AGAINST], 0.02, [-1.0, 3.0]),  # too few replies
        ([TOWARDS] * 5 + [None], 0.02, [-1.0, 3.0]),  # it sent no model
        ([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0), (0.7, 0.7), (-0.7, -0.7)], 0.02, [0.0, 1.0]),  # everywhere
    ],
    ids=["off", "few", "no model", "everywhere"],
)
def test_nobody_is_judged_by_direction_without_a_common_one(rows, limit, last):
    known = {k: [0.0, 1.0] for k in range(len(rows) - 1)} | {len(rows) - 1: last}
    assert gate._opposing(_heading(*rows), limit, known)[0] == []


def _bodies(*rows):
    """The evidence of clients with honest heads, an architecture, and an update of their other layers."""
    honest = torch.tensor(TOWARDS, dtype=torch.float64)
    return {
        k: Evidence({}, {}, None, honest, torch.tensor(row, dtype=torch.float64), arch) for k, (arch, row) in enumerate(rows)
    }


def test_who_reverses_only_the_layers_below_the_head_is_found_among_its_architecture():
    lying = [("a", TOWARDS)] * 3 + [("a", AGAINST)] + [("b", (*AGAINST, 1.0))] * 3 + [("c", AGAINST)]
    measured = _bodies(*lying)
    assert gate._opposing(measured, 0.02, {k: [-1.0, 1.0] for k in range(8)})[0] == []  # by their heads all are alike
    failures, first = gate._opposing_below(measured, 0.02, {})
    assert failures == []  # one reply is no evidence
    assert first.keys() == set(range(7))  # the last has nobody to be compared with
    failures, second = gate._opposing_below(measured, 0.02, gate.directed({}, {k: [c] for k, c in first.items()}))
    assert [f.client for f in failures] == [3]
    assert "below its representation layer" in failures[0].why
    assert second[3] == pytest.approx(first[3])
    assert all(second[k] == pytest.approx(1.0) for k in (0, 1, 2, 4, 5, 6))
    assert gate._opposing_below(measured, 0.0, {3: [-3.0, 3.0]}) == ([], {})  # turned off
    assert gate._opposing_below(_bodies(*lying[:5]), 0.02, {3: [-3.0, 3.0]})[0] == []  # too few that can be compared


@pytest.mark.parametrize("method", ["fedet", "scaffold"])
def test_a_body_is_the_update_below_the_head_and_a_sample_of_a_large_one(monkeypatch, method):
    ready = built(method)
    requests, replies = model_replies(ready, {0: 0.1, 1: 0.2})
    monkeypatch.setattr(evidence, "SAMPLE", 1 << 20)
    whole = evidence.measure(ready, ready.clients, 1, requests, replies)
    for k, e in whole.items():
        numbers = sum(w.numel() for w in replies[k].tensors["model"].values() if w.is_floating_point())
        assert len(e.head) + len(e.body) == numbers
        assert math.hypot(float(e.head.norm()), float(e.body.norm())) == pytest.approx(e.sizes["model"], rel=1e-6)
    monkeypatch.setattr(evidence, "SAMPLE", 50)
    parts = [evidence.measure(ready, ready.clients, number, requests, replies)[0].body for number in (1, 2, 1)]
    assert [len(part) for part in parts] == [50] * 3
    assert torch.equal(parts[0], parts[2])
    assert not torch.equal(parts[0], parts[1])


def test_most_of_the_clients_are_left():
    rows = [TOWARDS] * 2 + [(-1.0, -0.2)] * 2 + [(0.2, -1.0), (-0.2, 1.0)]
    assert gate._opposing(_heading(*rows), 0.02, {k: [-3.0, 3.0] for k in range(2, 6)})[0] == []


def test_directions_are_added_up():
    assert gate.directed({1: [0.5, 2.0]}, {1: [0.25], 2: [-1.0, 0.5]}) == {1: [0.75, 3.0], 2: [-0.5, 2.0]}


@pytest.mark.parametrize("memory", [[], [1.0], [0.5, -2.0], [math.nan, 3.0], [1.0, 2.0, 3.0]], ids=str)
def test_a_checkpoint_whose_directions_make_no_sense_is_refused(memory):
    fields = {"round": 1, "totals": {}, "state": None, "directions": {3: memory}}
    with pytest.raises(FedetError, match="directions"):
        files.conform(fields, CheckpointRecord, "checkpoint")
    assert files.conform(fields | {"directions": {3: [-0.5, 2.0]}}, CheckpointRecord, "checkpoint")


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_reversed_updates_are_found(tmp_path, method):
    settings = {"run.robust": "on", "run.attack": {"kind": "stealth", "share": 0.2}, "run.workers": 0, "run.eval_all_every": 8}
    caught = fedet.run("digits", method=method, rounds=8, out=tmp_path, progress=False, **settings).summary["caught"]
    assert caught["precision"] == 1.0
    assert caught["recall"] > 0.5  # the first reply of each attacker passes


# Bans, and what is remembered between rounds


def test_a_banned_client_is_left_out_and_cohorts_stay_a_function_of_seed_round_and_bans(tmp_path):
    ready = built(cohort=4, ban_after=1, rounds=6)
    snapshot, entries, _ = play(ready, tmp_path, Altered(ready, multiplied(1e5, {0, 3})), 6)
    banned = set()
    for entry in entries:
        assert set(entry["banned"]) == banned
        assert not banned & set(entry["cohort"])
        assert entry["cohort"] == [c.id for c in rounds.select(ready, ready.clients, entry["round"], banned)[0]]
        banned |= {f["client"] for f in entry["failures"]}
    assert banned == {0, 3}
    assert snapshot.set_aside == {0: 1, 3: 1}


def test_refusals_are_counted_once_a_round():
    failures = [Failure(1, "set aside", ""), Failure(1, "diverged", ""), Failure(2, "dropped", ""), Failure(3, "suspect", "")]
    assert gate.counted({1: 1, 5: 2}, failures) == {1: 2, 5: 2}
    assert gate.banned({1: 2, 5: 1}, 2) == {1}
    assert gate.banned({1: 2}, None) == frozenset()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_bans_and_memory_survive_a_stop(tmp_path, workers):
    settings = {
        "run.rounds": 4,
        "run.ban_after": 1,
        "run.attack": {"kind": "scale", "share": 0.2},
        **ON,
        "run.cohort": 8,
        "data.clients": 9,
    }
    small = check.SMALL | {"method": {"name": "fedet", **_steps()}}
    whole = fedet.run(small, out=tmp_path / "whole", **settings)

    def stop(entry):
        if entry["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fedet.run(small, out=tmp_path / "cut", callbacks=Callbacks(round=stop), **{**settings, "run.workers": workers})
    (cut,) = [path for path in (tmp_path / "cut").iterdir() if path.name != ".cache"]
    fedet.resume(cut)
    stored = [checkpoint.load(path / "last" / "checkpoint.safetensors")[0] for path in (whole.run_dir, cut)]
    assert stored[0]["set_aside"]
    assert stored[0]["replies"]
    assert stored[0]["directions"]
    for fields in stored:
        fields.pop("seconds")
    assert check.same(*stored)
    assert whole.summary["caught"]["recall"] == 1.0


def _steps():
    return {"client": {"steps": 3, "batch": 16}, "server": {"steps": 3, "batch": 16, "lr": 0.01}}


def test_a_checkpoint_of_an_older_version_still_loads(tmp_path):
    small = check.SMALL | {"method": {"name": "fedet", **_steps()}}
    run = fedet.run(small, out=tmp_path, **{"run.rounds": 1})
    path = run.run_dir / "last" / "checkpoint.safetensors"
    fields, meta = checkpoint.load(path)
    for key in ("set_aside", "replies", "directions", "bodies"):
        assert fields.pop(key) == {}
    checkpoint.save(path, fields, meta)
    assert fedet.resume(run.run_dir, rounds=2).summary["rounds"] == 2


def test_a_client_is_not_believed_to_have_ten_times_as_many_examples_as_the_median():
    clients = [ClientInfo(k, "cnn", n) for k, n in enumerate((10, 12, 0, 9, 1_000_000))]
    believed = gate.credible(clients, RobustConfig())
    assert [c.num_examples for c in believed] == [10, 12, 0, 9, 110]
    assert gate.credible(clients, None) is clients
    assert gate.credible(clients[:4], RobustConfig()) == clients[:4]
    assert Round(1, believed, dict, 0).weights([0, 4], "examples") == [10.0, 110.0]


# All methods


class RobustLab(check.Lab):
    """The small federation with defences."""

    def experiment(self, **changes):
        return super().experiment(**{"run.robust": "on", "run.cohort": 4, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("method", FEDERATED)
def test_methods_keep_their_promises_with_defences(tmp_path, method):
    outcomes = list(check.run_checks(RobustLab(method, {}, tmp_path), check.CHECKS))
    assert [(o.name, o.detail) for o in outcomes if not o.ok] == []


@pytest.mark.parametrize(
    ("method", "average", "consensus"),
    [
        ("fedet", "median", "median"),
        ("scaffold", "krum", "variance"),
        pytest.param("feddf", "geometric", "trimmed", marks=pytest.mark.slow),
        ("dsfl", "mean", "median"),
        pytest.param("fedet-plus", "multi-krum", "calibrated", marks=pytest.mark.slow),
        pytest.param("fedavg", "trimmed", "entropy", marks=pytest.mark.slow),
    ],
)
def test_averages_and_consensuses_reach_every_kind_of_method(tmp_path, method, average, consensus):
    ready = built(method, robust={"average": average, "consensus": consensus})
    snapshot, (entry,), _ = play(ready, tmp_path, InProcess(ready))
    plain, _, _ = play(built(method), tmp_path / "plain", InProcess(ready))
    assert not entry["lost"]
    assert rounds.state_is_finite(snapshot.state)
    assert not check.same(snapshot.state, plain.state)


@pytest.mark.parametrize("server_logits", ["on_the_fly", "cached"])
def test_fedgkt_trains_on_no_more_rows_of_a_client_than_it_is_believed_to_have(tmp_path, monkeypatch, server_logits):
    ready = base("fedgkt")
    most = RobustConfig(examples=0.5)
    seen, train_on = [], type(ready.method)._train
    monkeypatch.setattr(
        type(ready.method),
        "_train",
        lambda self, model, sent, r, env: seen.append(len(sent["labels"])) or train_on(self, model, sent, r, env),
    )
    method = replace(ready.method, server_logits=server_logits)
    for robust_settings in (most, None):
        play(
            replace(built("fedgkt", robust=robust_settings), method=method),
            tmp_path / str(robust_settings),
            InProcess(ready),
            2,
        )
    believed = sum(c.num_examples for c in gate.credible(ready.clients, most))
    everything = sum(c.num_examples for c in ready.clients)
    assert believed < everything
    assert seen == [believed] * 2 + [everything] * 2
