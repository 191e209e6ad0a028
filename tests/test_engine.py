"""The engine's promises: selection, evaluation, stopping, drop-outs, set-aside clients, resume."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab import Altered, chosen

import fedet
from fedet import check, config, experiment
from fedet.core import ClientInfo, Delivery, Failure, Payload, seed_of
from fedet.engine import evaluation, loop, rounds, run_warnings, session
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError, Diverged, FedetError, Interrupted
from fedet.methods import METHODS, REFERENCES
from fedet.storage import checkpoint, metrics
from fedet.storage.client_store import ClientStore
from fedet.storage.run_folder import RunFolder

SMALL = check.SMALL | {
    "method": {"name": "fedet", "client": {"steps": 3, "batch": 16}, "server": {"steps": 3, "batch": 16, "lr": 0.01}}
}


def built(tmp_path, **changes):
    return experiment.build(config.load(SMALL, changes), tmp_path / "cache")


def run(tmp_path, name="runs", **changes):
    return fedet.run(SMALL, out=tmp_path / name, **changes)


def bits(run_dir):
    """All that must be equal of two runs: weights, metrics without times, ledger."""
    entries = [{k: v for k, v in entry.items() if k != "seconds"} for entry in metrics.read(run_dir / "metrics.jsonl")]
    fields, _ = checkpoint.load(run_dir / "last" / "checkpoint.safetensors")
    fields.pop("seconds")
    return entries, (run_dir / "ledger.jsonl").read_bytes(), fields


def assert_same_run(a, b):
    first, second = bits(a), bits(b)
    assert first[:2] == second[:2]
    assert check.same(first[2], second[2])
    assert _files(a / "best") == _files(b / "best")


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# Selection


def test_selection_depends_on_seed_and_round_alone(tmp_path):
    ready, other = built(tmp_path), built(tmp_path, **{"run.seed": 1})
    cohorts = [[c.id for c in chosen(ready, n)] for n in range(1, 9)]
    assert cohorts == [[c.id for c in chosen(ready, n)] for n in range(1, 9)]
    assert len({tuple(c) for c in cohorts}) > 1
    assert cohorts != [[c.id for c in chosen(other, n)] for n in range(1, 9)]
    assert all(c == sorted(set(c)) and len(c) == 3 for c in cohorts)


def test_larger_clients_are_drawn_more_often(tmp_path):
    ready = built(tmp_path, **{"data.clients": 20, "data.alpha": 0.3, "run.cohort": 1})
    drawn = np.bincount([chosen(ready, n)[0].id for n in range(1, 2001)], minlength=20)
    share = ready.data.sizes / ready.data.sizes.sum()
    assert np.abs(drawn / 2000 - share).max() < 0.04  # one draw at a time is exactly proportional
    even = built(tmp_path, **{"data.clients": 20, "data.alpha": 0.3, "run.cohort": 1, "run.selection": "uniform"})
    assert np.abs(np.bincount([chosen(even, n)[0].id for n in range(1, 2001)]) / 2000 - 0.05).max() < 0.03


def test_empty_clients_are_never_drawn(tmp_path):
    ready = built(tmp_path, **{"data.clients": 3000, "run.cohort": 50})
    assert (ready.data.sizes == 0).sum() > 1000
    for how in ("size", "uniform"):
        other = experiment.replace(
            ready, config=config.load(SMALL, {"data.clients": 3000, "run.cohort": 50, "run.selection": how})
        )
        assert all(c.num_examples > 0 for n in range(1, 20) for c in rounds.select(other, other.clients, n)[0])


def test_with_replacement_draws_count(tmp_path):
    ready = built(tmp_path, **{"run.selection": "with_replacement", "run.cohort": 12})
    cohort, draws = rounds.select(ready, ready.clients, 1)
    assert sum(draws.values()) == 12
    assert len(cohort) == len(draws) < 12


# Architectures


@pytest.mark.parametrize("how", ["uniform", "balanced"])
def test_assignment_is_drawn_from_the_seed(tmp_path, how):
    ready = built(tmp_path, **{"models.assignment": how, "data.clients": 40})
    archs = [c.arch for c in ready.clients]
    assert archs == [c.arch for c in built(tmp_path, **{"models.assignment": how, "data.clients": 40}).clients]
    if how == "balanced":
        assert {archs.count(a) for a in set(archs)} == {20}


def test_assignment_by_capability_takes_the_largest_that_fits(tmp_path):
    sizes = {a: built(tmp_path).env.model_cache.num_params(a) for a in ("cnn-w0.5", "resnet8-w0.0625")}
    small, large = sorted(sizes, key=sizes.get)
    ready = built(tmp_path, **{"models.assignment": "capability", "models.budgets": [sizes[small], sizes[large], 10**9]})
    assert [c.arch for c in ready.clients] == [small, large, large] * 2
    with pytest.raises(ConfigError, match="fits no architecture"):
        built(tmp_path, **{"models.assignment": "capability", "models.budgets": [10]})
    with pytest.raises(ConfigError, match=f"no client has the architecture '{large}'"):
        built(tmp_path, **{"models.assignment": "capability", "models.budgets": [sizes[small]]})


@pytest.mark.parametrize("how", ["examples", "classes"])
def test_larger_models_go_to_clients_with_more_data(tmp_path, how):
    ready = built(tmp_path, **{"models.assignment": how, "data.clients": 12, "data.alpha": 0.3})
    counts = ready.data.label_counts()
    amounts = counts.sum(axis=1) if how == "examples" else (counts > 0).sum(axis=1)
    sizes = [ready.env.model_cache.num_params(client.arch) for client in ready.clients]
    small, large = sorted(set(sizes))
    assert sizes.count(small) == sizes.count(large) == 6
    assert len(set(amounts)) > 2
    assert max(amounts[k] for k in range(12) if sizes[k] == small) <= min(amounts[k] for k in range(12) if sizes[k] == large)


# Evaluation and stopping


def test_models_and_consensus_are_logged(tmp_path):
    result = run(tmp_path, run__eval_every=2, run__eval_all_every=4, rounds=5)
    assert ["models" in entry for entry in result.metrics] == [False, True, False, True, True]
    assert list(result.metrics[1]["models"]) == ["server"]
    assert list(result.metrics[3]["models"]) == ["server", "cnn-w0.5", "resnet8-w0.0625", "consensus"]
    assert result.metrics[4]["models"].keys() == result.metrics[3]["models"].keys()  # final values are of one round
    assert result.metrics[3]["models"]["server"] == result.metrics[3]["accuracy"]


def test_summary_matches_metrics(tmp_path):
    result = run(tmp_path, rounds=4)
    best = max(result.metrics, key=lambda entry: entry["accuracy"])
    assert result.summary["best_accuracy"] == best["accuracy"]
    assert result.summary["best_round"] == best["round"]
    assert result.accuracy == result.metrics[-1]["accuracy"]
    for key in ("params_up", "params_down", "bytes_up", "bytes_down"):
        assert result.traffic[key] == sum(entry[key] for entry in result.metrics)
    assert result.metrics[-1]["params_total"] == result.traffic["params_up"] + result.traffic["params_down"]
    lines = metrics.read(result.run_dir / "ledger.jsonl")
    assert sum(c["up"]["model"] for line in lines for c in line["clients"]) == result.traffic["params_up"]


def test_best_model_is_the_best_rounds_model(tmp_path):
    result = run(tmp_path, rounds=4)
    ready = built(tmp_path)
    logits = torch.cat([result.model(ready.data.test.inputs(torch.arange(len(ready.data.test))))])
    assert (logits.argmax(-1) == ready.data.test.labels).double().mean().item() == pytest.approx(result.best_accuracy)


def test_runs_end_by_budget_target_and_patience(tmp_path):
    whole = run(tmp_path, rounds=4)
    first = whole.metrics[0]["params_total"]
    assert (r := run(tmp_path, rounds=4, run__budget_params=first + 1)).summary["stopped"] == "budget_params"
    assert r.summary["rounds"] == 1
    early = run(tmp_path, rounds=4, run__target_accuracy=max(whole.metrics[0]["accuracy"], 1e-3))
    assert (early.summary["stopped"], early.summary["rounds"]) == ("target_accuracy", 1)
    timed = run(tmp_path, rounds=4, run__budget_seconds=1e-6)
    assert (timed.summary["stopped"], timed.summary["rounds"]) == ("budget_seconds", 1)
    flat = run(tmp_path, rounds=9, run__patience=2, data__val_fraction=0.1, method__server__lr=1e-12, method__client__lr=1e-12)
    assert (flat.summary["stopped"], flat.summary["rounds"]) == ("patience", 3)
    assert "val_accuracy" in flat.metrics[0]


def test_c_acc_counts_up_to_and_including_the_first_round_there():
    records = [{"params_total": 10, "accuracy": 0.2}, {"params_total": 20}, {"params_total": 30, "accuracy": 0.5}]
    assert metrics.c_acc(records, 0.5) == 30
    assert metrics.c_acc(records, 0.2) == 10
    assert metrics.c_acc(records, 0.51) is None


# Drop-outs and bad clients


def test_dropout_is_recorded_and_reproducible(tmp_path):
    a, b = run(tmp_path, "a", rounds=6, run__dropout=0.5), run(tmp_path, "b", rounds=6, run__dropout=0.5)
    assert_same_run(a.run_dir, b.run_dir)
    gone = [f for entry in a.metrics for f in entry["failures"]]
    assert gone
    assert {f["kind"] for f in gone} == {"dropped"}
    for entry in a.metrics:
        assert sorted(entry["replied"] + [f["client"] for f in entry["failures"]]) == entry["cohort"]
        assert entry["params_down"] > 0
        assert (entry["params_up"] == 0) == (not entry["replied"]) == entry["lost"]


def test_lost_rounds_keep_the_state(tmp_path):
    with pytest.warns(fedet.FedetWarning, match="2 of 2 rounds were lost"):
        result = run(tmp_path, rounds=2, run__dropout=1.0)
    assert [entry["lost"] for entry in result.metrics] == [True, True]
    assert {entry["why_lost"] for entry in result.metrics} == {"0 usable replies of 3, 1 needed"}
    assert "0 usable replies of 3, 1 needed" in (result.run_dir / "report.html").read_text(encoding="utf-8")
    ready = built(tmp_path)
    fields, _ = checkpoint.load(result.run_dir / "last" / "checkpoint.safetensors")
    assert check.same(fields["state"]["large"], ready.env.initial(ready.env.large))


def spoil(reply, how):
    weights = {name: tensor.clone() for name, tensor in reply.tensors["model"].items()}
    name = next(iter(weights))
    if how == "nan":
        weights[name].view(-1)[0] = float("nan")
    elif how == "shape":
        weights[name] = weights[name].reshape(-1)
    elif how == "type":
        weights[name] = weights[name].double()
    elif how == "absurd":  # 2^62 numbers, of which one is in memory
        weights[name] = torch.zeros(1).expand(1 << 31, 1 << 31)
    elif how == "missing":
        del weights[name]
    elif how == "extra":
        weights["more"] = torch.zeros(1)
    scalars = {"loss": float("inf")} if how == "scalar" else {}
    return Payload({"other" if how == "group" else "model": weights}, scalars)


@pytest.mark.parametrize("how", ["nan", "scalar", "shape", "absurd", "type", "missing", "extra", "group"])
def test_a_bad_reply_is_set_aside_and_named(tmp_path, how):
    ready = built(tmp_path, **{"run.diverged": "drop"})
    victim = chosen(ready, 1)[0].id

    hostile = Altered(ready, lambda k, up: spoil(up, how) if k == victim else up)
    start = rounds.Snapshot(ready.method.init(ready.env))
    entry, _, after = rounds.run_round(ready, ClientStore(tmp_path / "c"), start, hostile)
    assert [f["client"] for f in entry["failures"]] == [victim]
    assert entry["failures"][0]["kind"] == ("diverged" if how == "nan" else "bad reply")
    assert victim not in entry["replied"]
    assert after.round == 1
    assert not entry["lost"]
    metrics.append(tmp_path / "metrics.jsonl", entry)
    assert metrics.read(tmp_path / "metrics.jsonl")[0]["params_up"] <= entry["params_down"]


def test_a_reply_nobody_asked_for_is_ignored(tmp_path):
    ready = built(tmp_path)

    class Intruded(InProcess):
        def send(self, number, tasks):
            delivery = super().send(number, tasks)
            return replace(delivery, replies={**delivery.replies, 99: next(iter(delivery.replies.values()))})

    start = rounds.Snapshot(ready.method.init(ready.env))
    entry, _, _ = rounds.run_round(ready, ClientStore(tmp_path / "c"), start, Intruded(ready))
    assert 99 not in entry["replied"]
    assert entry["failures"] == []


REPORTING = """
from dataclasses import dataclass, replace
from fedet.core import Payload
from fedet.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Reporting(FedAvg):
    def local(self, down, client):
        return Payload(super().local(down, client).tensors, {"loss": 0.5, "batches": 3})

    def expected_reply(self, down, client, env):
        return Payload(down.tensors, {"loss": 0.0, "batches": 0})
"""


@pytest.mark.parametrize(
    ("scalars", "kind"),
    [
        ({"loss": float("inf"), "batches": 3}, "diverged"),
        ({"loss": 1, "batches": 3}, "bad reply"),
        ({"loss": 0.5, "batches": True}, "bad reply"),
        ({"loss": 0.5}, "bad reply"),
        ({"loss": 0.5, "batches": 3, "more": 1}, "bad reply"),
    ],
)
def test_scalars_of_a_reply_are_checked_too(tmp_path, scalars, kind):
    (tmp_path / "reporting.py").write_text(REPORTING, encoding="utf-8")
    method = {"name": f"{tmp_path / 'reporting.py'}:Reporting"}
    ready = experiment.build(config.load(check.SMALL | {"method": method}, {"run.diverged": "drop"}), tmp_path / "cache")
    victim = chosen(ready, 1)[0].id
    lying = Altered(ready, lambda k, up: Payload(up.tensors, scalars) if k == victim else up)
    entry, _, _ = rounds.run_round(ready, ClientStore(tmp_path / "c"), rounds.Snapshot(ready.method.init(ready.env)), lying)
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(victim, kind)]
    assert len(entry["replied"]) == len(entry["cohort"]) - 1


@pytest.mark.parametrize("method", ["dsfl", "scaffold", "moon"])
def test_what_a_client_of_a_rejected_reply_kept_does_not_count(tmp_path, method):
    short = check.quick(config.method_class(method))
    ready = experiment.build(config.load(check.SMALL, {"method.name": method, **short, "run.diverged": "drop"}), tmp_path / "x")
    victim, store = chosen(ready, 1)[0].id, ClientStore(tmp_path / "c")

    class Diverging(InProcess):
        """One client's numbers all become NaN, in what it sends and in what it keeps."""

        def send(self, number, tasks):
            delivery = super().send(number, tasks)
            for groups in (delivery.replies[victim].tensors, delivery.states[victim]) if victim in delivery.replies else ():
                for tensors in groups.values():
                    for tensor in tensors.values():
                        if tensor.is_floating_point():
                            tensor.fill_(float("nan"))
            return delivery

    entry, _, after = rounds.run_round(ready, store, rounds.Snapshot(ready.method.init(ready.env)), Diverging(ready))
    store.commit(1)
    assert victim not in entry["replied"]
    assert store.get(victim) == {}
    assert all(store.get(k) for k in entry["replied"])
    if method == "scaffold":  # c is still the mean of the clients' c_k
        kept = [store.get(k).get("control") for k in range(6)]
        for name, c in after.state.control.items():
            mean = sum(own[name].double() for own in kept if own) / 6
            torch.testing.assert_close(c.double(), mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedet", "feddf"])
def test_a_huge_reply_costs_one_round_and_its_sender_is_named(tmp_path, method):
    short = check.quick(config.method_class(method))
    changes = {"method.name": method, **short, "run.diverged": "drop", "run.rounds": 2}
    ready = experiment.build(config.load(check.SMALL, changes), tmp_path / "cache")
    victim, folder = chosen(ready, 1)[0].id, RunFolder.new(tmp_path / "runs", ready.config)
    folder.begin(ready, "")

    class Shouting(InProcess):
        def send(self, number, tasks):
            delivery = super().send(number, tasks)
            if number == 1:
                for name, tensor in delivery.replies[victim].tensors["model"].items():
                    tensor.fill_(1e38 if name.endswith("weight") else 0.0)
            return delivery

    last = loop.run(ready, folder, Shouting(ready))
    first, second = folder.metrics()
    assert first["lost"]
    assert [(f["client"], f["kind"]) for f in first["failures"]] == [(victim, "suspect")]
    assert "1e+38" in first["failures"][0]["why"]
    assert first["why_lost"] == "the server's state left the finite numbers"
    assert "why_lost" not in second
    assert f"suspect, client {victim}: sent values up to 1e+38" in run_warnings.why_lost([first])
    assert last.round == 2
    assert not second["lost"]


def test_a_time_budget_ends_a_run_with_a_reason_a_last_model_and_a_checkpoint(tmp_path, monkeypatch):
    ready = built(tmp_path, **{"run.rounds": 50, "run.budget_seconds": 10.0, "run.checkpoint_every": 100})
    folder = RunFolder.new(tmp_path / "runs", ready.config)
    folder.begin(ready, "")
    reads = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(reads) * 1.0)  # each look at the clock takes a second
    last = loop.run(ready, folder, InProcess(ready))
    assert rounds.ended(ready, last) == "budget_seconds"
    assert folder.result()["stopped"] == "budget_seconds"
    assert checkpoint.load(folder.checkpoint)[0]["round"] == last.round == len(folder.metrics()) > 0
    assert (folder.path / "last" / "model.safetensors").is_file()


def test_the_last_round_is_tested_in_full_whatever_ends_the_run(tmp_path):
    seldom = {"run__eval_every": 3, "run__eval_all_every": 9}
    usual = run(tmp_path, rounds=4, **seldom)
    per_round = usual.metrics[0]["params_total"]
    ends = [
        usual,
        run(tmp_path, rounds=8, run__budget_params=3 * per_round, **seldom),
        run(tmp_path, rounds=8, run__budget_seconds=1e-6, **seldom),
        run(tmp_path, rounds=8, run__target_accuracy=1e-3, **seldom),
    ]
    for result in ends:
        assert list(result.metrics[-1]["models"]) == ["server", "cnn-w0.5", "resnet8-w0.0625", "consensus"]
        about = json.loads((result.run_dir / "last" / "config.json").read_text(encoding="utf-8"))["training"]
        assert (about["round"], about["accuracy"]) == (result.summary["rounds"], result.metrics[-1]["accuracy"])
        assert result.accuracy == result.metrics[-1]["accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedet", "dsfl"])
def test_a_run_stops_at_the_last_round_that_fits_its_budget(tmp_path, method):
    short = check.quick(config.method_class(method))
    changes = {"method.name": method, "rounds": 6, **{key.replace(".", "__"): value for key, value in short.items()}}
    changes["method"] = changes.pop("method.name")
    whole = fedet.run(check.SMALL, out=tmp_path, **changes)
    sent = [entry["params_total"] for entry in whole.metrics]
    for budget, fits in ((sent[2], 3), (sent[2] - 1, 2), (sent[3] + 1, 4), (1, 1)):
        part = fedet.run(check.SMALL, out=tmp_path, run__budget_params=budget, **changes)
        assert (part.summary["rounds"], part.summary["stopped"]) == (fits, "budget_params")
        assert part.metrics[-1]["params_total"] == sent[fits - 1]


def test_seconds_of_an_overlapped_evaluation_count_once(tmp_path, monkeypatch):
    slow = 0.4
    real = evaluation._scores
    monkeypatch.setattr(evaluation, "_scores", lambda *a: (time.sleep(slow), real(*a))[1])
    begin = time.perf_counter()
    result = run(tmp_path, rounds=3, run__workers=1)
    took = time.perf_counter() - begin
    assert sum(entry["seconds"]["round"] for entry in result.metrics) < took
    for entry in result.metrics:
        seconds = entry["seconds"]
        assert seconds["round"] == pytest.approx(seconds["clients"] + seconds["server"] + seconds["evaluate"], abs=1e-6)
    assert all(entry["seconds"]["server"] < slow for entry in result.metrics)


def test_a_state_that_is_gone_is_forgotten_even_in_a_lost_round(tmp_path):
    ready = built(tmp_path)
    store = ClientStore(tmp_path / "c")
    for c in ready.clients:
        store.stage(c.id, {"own": {"w": torch.ones(1)}})
    store.commit(0)

    class Forgetful(InProcess):
        def send(self, number, tasks):
            return Delivery({}, failures=[Failure(k, "raised", "no state") for k in tasks], lost_states=sorted(tasks))

    entry, _, _ = rounds.run_round(ready, store, rounds.Snapshot(ready.method.init(ready.env)), Forgetful(ready))
    store.commit(1)
    assert entry["lost"]
    assert all(store.get(k) == {} for k in entry["cohort"])
    assert all(store.get(c.id) for c in ready.clients if c.id not in entry["cohort"])


def test_a_round_for_which_nobody_can_be_chosen_is_lost(tmp_path):
    ready = built(tmp_path)

    class Deserted(InProcess):
        def start_round(self, number):
            return [ClientInfo(c.id, c.arch, 0) for c in super().start_round(number)]

    start = rounds.Snapshot(ready.method.init(ready.env))
    entry, _, after = rounds.run_round(ready, ClientStore(tmp_path / "c"), start, Deserted(ready))
    assert entry["lost"]
    assert entry["cohort"] == []
    assert entry["why_lost"] == "no client is available"
    assert check.same(after.state, start.state)


def test_so_many_bans_that_too_few_are_left_lose_the_round(tmp_path):
    """The number of replies that a round needs is not lowered to that of the clients that are left."""
    ready = built(tmp_path, **{"run.ban_after": 1, "run.cohort": 4, "flower.min_replies": 3})
    start = rounds.Snapshot(ready.method.init(ready.env), set_aside=dict.fromkeys(range(4), 1))
    entry, _, after = rounds.run_round(ready, ClientStore(tmp_path / "c"), start, InProcess(ready))
    assert (entry["lost"], entry["cohort"]) == (True, [4, 5])
    assert entry["why_lost"] == "2 of 3 clients needed can be chosen"
    assert check.same(after.state, start.state)
    few = replace(start, set_aside=dict.fromkeys(range(3), 1))
    assert not rounds.run_round(ready, ClientStore(tmp_path / "d"), few, InProcess(ready))[0]["lost"]


def test_divergence_names_client_and_round_and_keeps_the_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"round 1: client \d+ sent non-finite values"):
        run(tmp_path, method__client__lr=1e9)
    (folder,) = (p for p in (tmp_path / "runs").iterdir() if p.name != ".cache")
    fields, _ = checkpoint.load(folder / "last" / "checkpoint.safetensors")
    assert fields["round"] == 0
    with pytest.raises(Diverged, match="server's state is no longer finite"):
        run(tmp_path, method__server__lr=1e30)


# Resume


def test_rerun_is_bit_identical_and_another_seed_is_not(tmp_path):
    a, b, c = run(tmp_path, "a"), run(tmp_path, "b"), run(tmp_path, "c", seed=1)
    assert_same_run(a.run_dir, b.run_dir)
    assert bits(a.run_dir)[0] != bits(c.run_dir)[0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_interrupted_and_resumed_is_bit_identical(tmp_path, every):
    whole = run(tmp_path, "a", rounds=5, run__checkpoint_every=every)

    def stop(entry):
        if entry["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="fedet resume"):
        run(tmp_path, "b", rounds=5, run__checkpoint_every=every, callbacks=fedet.Callbacks(round=stop))
    (folder,) = (p for p in (tmp_path / "b").iterdir() if p.name != ".cache")
    assert len(metrics.read(folder / "metrics.jsonl")) == 3
    resumed = session.resume(folder)
    assert resumed.summary["rounds"] == 5
    assert_same_run(whole.run_dir, resumed.run_dir)


def test_interrupt_inside_a_round_abandons_it(tmp_path):
    whole = run(tmp_path, "a", rounds=3)

    def stop(stage, done, total):
        if stage == "distil" and len(list((tmp_path / "b").glob("*/metrics.jsonl"))):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(tmp_path, "b", rounds=3, callbacks=fedet.Callbacks(stage=stop))
    (folder,) = (p for p in (tmp_path / "b").iterdir() if p.name != ".cache")
    assert len(metrics.read(folder / "metrics.jsonl")) == 1
    assert_same_run(whole.run_dir, session.resume(folder).run_dir)


def test_resume_makes_a_run_longer(tmp_path, monkeypatch):
    long, short = run(tmp_path, "a", rounds=4), run(tmp_path, "b", rounds=2)
    reads, load = [], checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda path: reads.append(path.name) or load(path))
    longer = session.resume(short.run_dir, rounds=4)
    assert reads.count("checkpoint.safetensors") == 2  # once to know which of the two is whole, and once for its fields
    assert_same_run(long.run_dir, longer.run_dir)


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    result = run(tmp_path)
    before = bits(result.run_dir)[:2]
    assert session.resume(result.run_dir).summary["rounds"] == 3
    assert bits(result.run_dir)[:2] == before


def start(tmp_path, name, *more):
    command = [sys.executable, "-m", "fedet", "run", str(tmp_path / "small.toml"), "--out", str(tmp_path / name), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_kill_at_random_moments_then_resume_is_bit_identical(tmp_path):
    cfg = config.load(SMALL, {"run.rounds": 8})
    (tmp_path / "small.toml").write_text(cfg.to_toml(), encoding="utf-8")
    whole = fedet.run(tmp_path / "small.toml", out=tmp_path / "a")
    process = start(tmp_path, "b")
    rng, killed = random.Random(seed_of(0, "kill")), 0
    while killed < 1:
        for line in process.stderr:
            if line.startswith("round"):
                break
        else:
            break
        time.sleep(rng.random() * 0.15)
        process.kill()
        process.wait()
        process.stderr.close()
        killed += 1
        (folder,) = (p for p in (tmp_path / "b").iterdir() if p.name != ".cache")
        process = subprocess.Popen(
            [sys.executable, "-m", "fedet", "resume", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    process.communicate()
    assert process.returncode == 0
    assert killed >= 1
    assert_same_run(whole.run_dir, folder)


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
def test_sigint_writes_a_checkpoint_and_exits_130(tmp_path):
    (tmp_path / "small.toml").write_text(config.load(SMALL, {"run.rounds": 500}).to_toml(), encoding="utf-8")
    process = start(tmp_path, "b", "--set", "run.checkpoint_every=1000")
    for line in process.stderr:
        if line.startswith("round 3"):
            process.send_signal(signal.SIGINT)
            break
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    (folder,) = (p for p in (tmp_path / "b").iterdir() if p.name != ".cache")
    assert f"fedet resume {folder}" in text
    assert "Traceback" not in text
    fields, _ = checkpoint.load(folder / "last" / "checkpoint.safetensors")
    assert fields["round"] == len(metrics.read(folder / "metrics.jsonl")) >= 3


# Folders


def test_nothing_is_overwritten(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert first.run_dir != second.run_dir
    assert_same_run(first.run_dir, second.run_dir)


def test_a_folder_in_use_is_refused(tmp_path):
    result = run(tmp_path)
    with RunFolder(result.run_dir).locked():
        with pytest.raises(FedetError, match="in use by another process"):
            session.resume(result.run_dir)
        with pytest.raises(FedetError, match="in use by another process"):
            run(tmp_path)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    result = run(tmp_path)
    checkpoint = result.run_dir / "last" / "checkpoint.safetensors"
    (result.run_dir / "last" / "previous-checkpoint.safetensors").unlink()  # otherwise the run would go on from it
    good = checkpoint.read_bytes()
    for bad, words in (
        (good[: len(good) // 2], "damaged"),
        (b"", "damaged"),
        (good[:-1] + bytes([good[-1] ^ 1]), "checksum"),
        ((result.run_dir / "best" / "model.safetensors").read_bytes(), "is not a checkpoint"),
    ):
        checkpoint.write_bytes(bad)
        with pytest.raises(FedetError, match=words):
            session.resume(result.run_dir, rounds=9)
        assert checkpoint.read_bytes() == bad  # nothing is lost by the attempt
    other = fedet.run(SMALL, out=tmp_path / "other", data__alpha=0.7)
    checkpoint.write_bytes((other.run_dir / "last" / "checkpoint.safetensors").read_bytes())
    with pytest.raises(FedetError, match="belong to different configurations"):
        session.resume(result.run_dir, rounds=9)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    ready = built(tmp_path, **{"run.rounds": 4})
    folder = RunFolder.new(tmp_path / "runs", ready.config)
    folder.begin(ready, "")
    real = checkpoint.save_file

    def full(tensors, path, metadata=None):
        if len(folder.metrics()) == 3:
            raise OSError(28, "No space left on device")
        return real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(FedetError, match="No space left on device"):
        loop.run(ready, folder, InProcess(ready))
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert checkpoint.load(folder.checkpoint)[0]["round"] == 2
    assert session.resume(folder.path).summary["rounds"] == 4


def test_client_state_survives_memory_limits_and_checkpoints(tmp_path):
    store = ClientStore(tmp_path / "c", budget=100)
    for k in range(5):
        store.stage(k, {"own": {"w": torch.full((10,), float(k))}})
    store.commit(1)
    assert len(store._cache) < 5
    store.stage(2, {"own": {"w": torch.full((10,), 22.0)}})
    assert store.get(2)["own"]["w"][0] == 22
    store.rollback()
    assert store.get(2)["own"]["w"][0] == 2
    files = store.flush(1)
    store.sweep()
    again = ClientStore(tmp_path / "c", budget=100)
    again.restore(json.loads(json.dumps(files)))
    assert again.clients() == [0, 1, 2, 3, 4]
    assert [again.get(k)["own"]["w"][0].item() for k in range(5)] == [0, 1, 2, 3, 4]
    assert len(again._cache) == 2
    assert again.get(7) == {}
    again.stage(3, {})
    assert again.clients() == [0, 1, 2, 4]
    again.commit(2)
    assert (again.get(3), sorted(again.flush(2))) == ({}, ["0", "1", "2", "4"])


def test_choosing_among_a_thousand_times_as_many_clients_costs_milliseconds_more(tmp_path):
    few, many = built(tmp_path, **{"data.clients": 100}), built(tmp_path, **{"data.clients": 100_000})
    best = {}
    for name, ready in (("few", few), ("many", many)):
        times = []
        for n in range(1, 21):
            begin = time.perf_counter()
            rounds.select(ready, ready.clients, n)
            times.append(time.perf_counter() - begin)
        best[name] = min(times)
    assert best["many"] < best["few"] + 0.02  # making one object per client and round would take longer than this


SUICIDE = """
import json, os, random, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import fedet
source, out, calls = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def stage(*_):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)

fedet.run(source, out=out, callbacks=fedet.Callbacks(stage=stage))
"""


QUICK = ("fedet", "scaffold")


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
@pytest.mark.parametrize(
    "method",
    [pytest.param(m.name, marks=[] if m.name in QUICK else [pytest.mark.slow]) for m in (*METHODS, *REFERENCES)],
)
def test_every_method_survives_kill_9(tmp_path, method):
    short = check.quick(config.method_class(method))
    source = config.load(check.SMALL, {"method.name": method, "run.rounds": 5, **short})
    (tmp_path / "small.toml").write_text(source.to_toml(), encoding="utf-8")
    steps = []
    whole = fedet.run(tmp_path / "small.toml", out=tmp_path / "a", callbacks=fedet.Callbacks(stage=lambda *_: steps.append(1)))
    moment = random.Random(seed_of(0, "kill", method)).randrange(len(steps) // 3, len(steps))
    killed = subprocess.run(
        [sys.executable, "-c", SUICIDE, tmp_path / "small.toml", tmp_path / "b", str(moment)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (p for p in (tmp_path / "b").iterdir() if p.name != ".cache")
    assert 1 <= len(metrics.read(folder / "metrics.jsonl")) < 5
    session.resume(folder)
    assert_same_run(whole.run_dir, folder)
