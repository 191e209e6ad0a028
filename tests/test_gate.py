"""The gate's promises: whoever is set aside never answered, to the bit; who is clipped, banned, remembered, believed."""

import types
from dataclasses import replace

import pytest
import torch
from lab import Altered

import fedet
from fedet import check, config, experiment, robust
from fedet.config.schema import RobustConfig
from fedet.core import ClientInfo, Failure, Payload, Round
from fedet.engine import gate, rounds
from fedet.engine.exchange import InProcess
from fedet.errors import Diverged, Interrupted
from fedet.methods import METHODS
from fedet.storage import checkpoint
from fedet.storage.client_store import ClientStore

FEDERATED = [cls.name for cls in METHODS]
ON = {"run.robust": "on", "run.cohort": 6}


def built(tmp_path, method="fedet", **changes):
    short = check.quick(config.method_class(method))
    return experiment.build(config.load(check.SMALL, {"method.name": method, **short, **ON, **changes}), tmp_path / "cache")


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


@pytest.mark.parametrize("method", [m for m in FEDERATED if m != "dsfl"])
def test_a_round_without_those_set_aside_is_one_in_which_they_never_answered(tmp_path, method):
    ready = built(tmp_path, method)
    hostile, entries, kept = play(ready, tmp_path / "a", Altered(ready, multiplied(1e5, {1, 4})), 2)
    silent, _, kept_silent = play(ready, tmp_path / "b", Silent(ready, {1, 4}), 2)
    assert check.same(hostile.state, silent.state)
    for entry in entries:
        out = {f["client"]: f for f in entry["failures"]}
        assert out.keys() == {1, 4}
        assert {f["kind"] for f in out.values()} == {"set aside"}
        assert not {1, 4} & set(entry["replied"])
        assert not entry["lost"]
    for k in range(6):
        assert check.same(kept.get(k), kept_silent.get(k))


def test_soft_labels_that_contradict_everybody_are_set_aside(tmp_path):
    ready = built(tmp_path, "dsfl", **{"method.client.steps": 40, "data.alpha": 100.0})

    def lie(k, up):
        if k != 2 or not up.tensors:
            return up
        return Payload({"labels": {"probs": up.tensors["labels"]["probs"].roll(1, 1)}})

    hostile, entries, _ = play(ready, tmp_path / "a", Altered(ready, lie), 3)
    silent, _, _ = play(ready, tmp_path / "b", Silent(ready, {2}), 3)
    last = [f for f in entries[-1]["failures"] if f["client"] == 2]
    assert [f["kind"] for f in last] == ["set aside"]
    assert "majority" in last[0]["why"]
    if all(any(f["client"] == 2 for f in entry["failures"]) for entry in entries):
        assert check.same(hostile.state, silent.state)


@pytest.mark.parametrize("method", ["fedet", "fedavg", "scaffold"])
def test_updates_above_the_median_are_scaled_down_to_it(tmp_path, method):
    ready = built(tmp_path, method, **{"run.robust": {"reject": 0.0, "agreement": 0.0}})
    seen = []
    inner = ready.method.round

    def watch(state, r, env):
        return inner(state, replace(r, exchange=lambda requests: seen.append((requests, r.exchange(requests))) or seen[-1][1]), env)

    watched = replace(ready, method=_with_round(ready.method, watch))
    _, (entry,), _ = play(watched, tmp_path, Altered(ready, multiplied(100.0, {3})))
    requests, replies = seen[0]
    update = {k: r.tensors["model"] for k, r in replies.items()}
    if not ready.method.sends_updates:
        update = {k: robust.difference(u, requests[k].tensors["model"]) for k, u in update.items()}
    norms = {k: robust.norm(u) for k, u in update.items()}
    assert 3 in entry["clipped"]
    assert entry["failures"] == []
    assert max(norms.values()) == pytest.approx(sorted(norms.values())[len(norms) // 2], rel=1e-4)


def _with_round(method, function):
    """The same method with another `round`; frozen dataclasses can't be patched."""
    proxy = types.SimpleNamespace(**{name: getattr(method, name) for name in dir(method) if not name.startswith("__")})
    proxy.round = function
    return proxy


def test_outputs_that_are_not_finite_on_public_inputs_are_found(tmp_path):
    ready = built(tmp_path, **{"run.robust": {"reject": 0.0, "clip": "none"}})
    _, (entry,), _ = play(ready, tmp_path, Altered(ready, multiplied(1e30, {2})))
    assert [f["client"] for f in entry["failures"]] == [2]
    assert "finite" in entry["failures"][0]["why"]


def test_a_replay_is_known_again_and_an_honest_repetition_is_not_one(tmp_path):
    ready, first = built(tmp_path), {}

    def replay(k, up):
        return first.setdefault(k, up) if k == 2 else up

    _, entries, _ = play(ready, tmp_path / "a", Altered(ready, replay), 3)
    assert [[f["client"] for f in entry["failures"]] for entry in entries] == [[], [2], [2]]
    assert "before" in entries[1]["failures"][0]["why"]
    for method in FEDERATED:
        _, entries, _ = play(built(tmp_path, method), tmp_path / method, InProcess(built(tmp_path, method)), 3)
        assert not any("before" in f["why"] for entry in entries for f in entry["failures"]), method


def test_with_fewer_than_three_replies_nobody_is_compared(tmp_path):
    ready = built(tmp_path, **{"run.cohort": 2})
    _, (entry,), _ = play(ready, tmp_path, InProcess(ready))
    assert entry["failures"] == []
    assert entry["clipped"] == []


def test_a_server_that_leaves_the_finite_numbers_is_a_lost_round_and_the_run_goes_on(tmp_path):
    loose = {"reject": 0.0, "clip": "none", "agreement": 0.0}
    ready = built(tmp_path, "fedgkt", **{"run.robust": loose})
    snapshot, entries, _ = play(ready, tmp_path / "a", Altered(ready, multiplied(1e25, {2})), 2)
    assert [entry["lost"] for entry in entries] == [True, True]
    assert {(f["client"], f["kind"]) for entry in entries for f in entry["failures"]} == {(2, "suspect")}
    assert check.same(snapshot.state, ready.method.init(ready.env))
    off = built(tmp_path, "fedgkt", **{"run.robust": "off"})
    with pytest.raises(Diverged):
        play(off, tmp_path / "b", Altered(off, multiplied(1e25, {2})))


# Bans, and what is remembered between rounds


def test_a_banned_client_is_left_out_and_cohorts_stay_a_function_of_seed_round_and_bans(tmp_path):
    ready = built(tmp_path, **{"run.cohort": 4, "run.ban_after": 1, "run.rounds": 6})
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


@pytest.mark.parametrize("workers", [0, 2])
def test_bans_and_memory_survive_a_stop(tmp_path, workers):
    settings = {"run.rounds": 5, "run.ban_after": 2, "run.attack": {"kind": "scale", "share": 0.34}, **ON, "run.cohort": 4}
    small = check.SMALL | {"method": {"name": "fedet", **_steps()}}
    whole = fedet.run(small, out=tmp_path / "whole", **settings)

    def stop(entry):
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fedet.run(small, out=tmp_path / "cut", on_round=stop, **{**settings, "run.workers": workers})
    (cut,) = [path for path in (tmp_path / "cut").iterdir() if path.name != ".cache"]
    fedet.resume(cut)
    stored = [checkpoint.load(path / "last" / "checkpoint.safetensors")[0] for path in (whole.run_dir, cut)]
    assert stored[0]["set_aside"]
    assert stored[0]["replies"]
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
    for key in ("set_aside", "replies"):
        assert fields.pop(key) == {}
    checkpoint.save(path, fields, meta)
    assert fedet.resume(run.run_dir, rounds=2).summary["rounds"] == 2


def test_a_client_is_not_believed_to_have_ten_times_as_many_examples_as_the_median():
    clients = [ClientInfo(k, "cnn", n) for k, n in enumerate((10, 12, 0, 9, 1_000_000))]
    believed = gate.credible(clients, RobustConfig())
    assert [c.num_examples for c in believed] == [10, 12, 0, 9, 110]
    assert gate.credible(clients, None) is clients
    assert gate.credible(clients[:4], RobustConfig()) is clients[:4] or gate.credible(clients[:4], RobustConfig()) == clients[:4]
    assert Round(1, believed, dict, 0).weights([0, 4], "examples") == [10.0, 110.0]


# All methods


class RobustLab(check.Lab):
    """The small federation with defences."""

    def experiment(self, **changes):
        return super().experiment(**{"run.robust": "on", "run.cohort": 4, **changes})


@pytest.mark.parametrize("method", ["fedet", "scaffold", pytest.param("dsfl", marks=pytest.mark.slow)])
def test_methods_keep_their_promises_with_defences(tmp_path, method):
    outcomes = list(check.run_checks(RobustLab(method, {}, tmp_path), check.CHECKS))
    assert [(o.name, o.detail) for o in outcomes if not o.ok] == []


@pytest.mark.parametrize("average", ["median", "trimmed", "krum", "multi-krum", "geometric"])
@pytest.mark.parametrize("method", ["fedet", "scaffold", "feddf"])
def test_every_average_works_in_every_kind_of_method(tmp_path, method, average):
    ready = built(tmp_path, method, **{"run.robust": {"average": average, "consensus": "median"}})
    snapshot, (entry,), _ = play(ready, tmp_path, InProcess(ready))
    plain, _, _ = play(built(tmp_path, method, **{"run.robust": "off"}), tmp_path / "off", InProcess(ready))
    assert not entry["lost"]
    assert rounds.state_is_finite(snapshot.state)
    assert not check.same(snapshot.state, plain.state)
