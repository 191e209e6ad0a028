"""References show what was possible: what each trains on, how long, and that nobody else sees it."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedet
from fedet import check, config, experiment, train
from fedet.config import sources
from fedet.core import seed_of
from fedet.engine import export, rounds, run_warnings
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError, FedetError
from fedet.methods import METHODS, REFERENCES
from fedet.storage.client_store import ClientStore
from fedet.storage.run_folder import RunFolder
from fedet.trust import attacks

NAMES = [cls.name for cls in REFERENCES]


def small(method, **changes):
    return {"method.name": method, **check.quick(config.method_class(method)), **changes}


def built(tmp_path, method, **changes):
    return experiment.build(config.load(check.SMALL, small(method, **changes)), tmp_path / "cache")


def play(ready, tmp_path):
    """One round; returns the state after it."""
    before = rounds.Snapshot(ready.method.init(ready.env))
    return rounds.run_round(ready, ClientStore(tmp_path / "clients"), before, InProcess(ready))[2].state


def run(tmp_path, method, **changes):
    return fedet.run(check.SMALL, out=tmp_path, **{key.replace(".", "__"): v for key, v in small(method, **changes).items()})


# What each trains on


@pytest.mark.parametrize("cls", [*METHODS, *REFERENCES], ids=lambda cls: cls.name)
def test_only_references_see_the_pooled_examples(tmp_path, cls):
    ready = built(tmp_path, cls.name)
    assert (ready.env.pooled is not None) == cls.reference
    if ready.env.pooled is not None:
        everything = torch.cat([ready.data.client(k).rows for k in range(len(ready.clients))])
        assert torch.equal(ready.env.pooled.rows.sort().values, everything.sort().values)
        assert not set(everything.tolist()) & {*ready.data.test.rows.tolist(), *ready.data.public.rows.tolist()}


@pytest.mark.parametrize(
    ("method", "attack", "defence"),
    [
        ("local", "each client keeps a model of its own and sends nothing", "'local' lets each client train alone"),
        ("central", "takes nothing from clients", "'central' asks clients for nothing"),
    ],
)
def test_attacks_on_references_are_refused_and_defences_of_them_said_to_do_nothing(tmp_path, method, attack, defence):
    ready = built(tmp_path, method, **{"run.robust": "on"})
    (text,) = [words for words in run_warnings.before(ready) if "run.robust" in words]
    assert defence in text
    assert not any("run.robust" in words for words in run_warnings.before(built(tmp_path, method)))
    with pytest.raises(ConfigError, match=attack):
        attacks.check(built(tmp_path, method, **{"run.attack": "scale"}))


@pytest.mark.parametrize("selection", ["size", "with_replacement"])
def test_central_visits_as_many_samples_as_the_cohorts_draws_would(tmp_path, monkeypatch, selection):
    ready = built(tmp_path, "central", **{"run.selection": selection, "run.cohort": 5, "data.clients": 5})
    visited = []
    monkeypatch.setattr(
        train, "cross_entropy", lambda m, d, i: (visited.append(len(i)), F.cross_entropy(m(d.inputs(i)), d.labels[i]))[1]
    )
    play(ready, tmp_path)
    assert visited == [16] * (5 * 6)  # m * tau batches of b


def test_central_is_sgd_on_the_pooled_examples(tmp_path):
    ready = built(tmp_path, "central", **{"method.client": {"lr": 0.1, "batch": 16, "steps": 2}})
    model = ready.env.build(ready.env.large, ready.env.initial(ready.env.large), "mine")
    seed = seed_of(seed_of(ready.seed, "round", 1), "central")
    pool = ready.data.pooled
    for index in train.batches(len(pool), 16, 6, torch.Generator().manual_seed(seed_of(seed, "batches"))):
        x, y = pool.batch(index)
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    for name, tensor in play(ready, tmp_path).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_public_labels_is_fedet_with_a_consensus_that_is_always_right(tmp_path, monkeypatch):
    """The same batches and views as Fed-ET's distillation without its diversity term, from the same start."""
    server = {"method.server": {"lr": 0.05, "batch": 16, "steps": 4}}
    seen = {}
    real = train.fit

    def fit(model, data, settings, *, seed, loss=None, **rest):
        index = torch.arange(len(data))
        seen[settings.steps] = data.inputs(index), seed
        return real(model, data, settings, seed=seed, loss=loss, **rest)

    ready = built(tmp_path, "public-labels", **server, **{"data.public_view": "fixed"})
    monkeypatch.setattr(train, "fit", fit)
    after = play(ready, tmp_path)
    ours = seen.pop(4)
    play(built(tmp_path, "fedet", **server, **{"data.public_view": "fixed"}), tmp_path)
    assert torch.equal(ours[0], seen[4][0])
    assert ours[1] == seen[4][1]
    labels = ready.data.dataset.labels[ready.data.public.rows]
    model = ready.env.build(ready.env.large, ready.env.initial(ready.env.large), "mine")
    for index in train.batches(len(labels), 16, 4, torch.Generator().manual_seed(seed_of(ours[1], "batches"))):
        gradients = torch.autograd.grad(F.cross_entropy(model(ours[0][index]), labels[index]), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_local_trains_each_client_on_its_own_examples_as_often_as_it_is_chosen(tmp_path):
    ready = built(tmp_path, "local", **{"run.rounds": 4})
    store, snapshot, chosen = ClientStore(tmp_path / "clients"), rounds.Snapshot(ready.method.init(ready.env)), []
    while rounds.ended(ready, snapshot) is None:
        entry, _, snapshot = rounds.run_round(ready, store, snapshot, InProcess(ready))
        store.commit(snapshot.round)
        chosen += [(snapshot.round, k) for k in entry["cohort"]]
    assert snapshot.state["trained"].tolist() == np.bincount([k for _, k in chosen], minlength=6).tolist()
    k = max((k for _, k in chosen), key=lambda k: snapshot.state["trained"][k])
    arch = ready.clients[k].arch
    weights = ready.env.initial(arch)
    for number in (number for number, other in chosen if other == k):
        model = ready.env.build(arch, weights)
        train.fit(model, ready.data.client(k), ready.method.client, seed=seed_of(ready.seed, "client", k, number))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert check.same(store.get(k)["model"], weights)


# What a run of one says


@pytest.mark.parametrize("method", NAMES)
def test_references_send_nothing_and_a_budget_does_not_stop_them(tmp_path, method):
    result = run(tmp_path, method, **{"run.budget_params": 1})
    assert set(result.traffic.values()) == {0}
    assert (result.summary["rounds"], result.summary["stopped"]) == (3, "rounds")
    assert result.summary["reference"] is True
    assert result.summary["c_acc"] == {}  # it would be 0, which says nothing
    assert not any(entry["lost"] or entry["failures"] for entry in result.metrics)


def test_local_is_evaluated_once_over_all_clients_that_trained(tmp_path):
    result = run(tmp_path, "local")
    assert ["accuracy" in entry for entry in result.metrics] == [False, False, True]
    stored, trained = result.summary["stored"]["clients"], {k for entry in result.metrics for k in entry["replied"]}
    assert stored == result.metrics[-1]["stored"]["clients"]
    assert stored["clients"] == len(trained) > 3
    assert stored["mean"] == result.accuracy == result.best_accuracy
    assert stored["worst_tenth"] < stored["mean"] < stored["best"]
    ready = built(tmp_path, "local")
    folder = RunFolder(result.run_dir)
    folder.restore()
    scores = [
        train.evaluate(ready.env.build(ready.clients[k].arch, folder.store.get(k)["model"]), ready.data.test).accuracy
        for k in sorted(trained)
    ]
    assert stored["mean"] == pytest.approx(np.mean(scores))
    assert stored["worst_tenth"] == min(scores)  # a tenth of at most six clients is one
    assert stored["best"] == max(scores)
    sizes = [ready.clients[k].num_examples for k in sorted(trained)]
    assert stored["weighted"] == pytest.approx(np.average(scores, weights=sizes))


@pytest.mark.parametrize("own", [False, True])
def test_local_has_no_model_to_export_and_says_so(own, tmp_path):
    (tmp_path / "own.py").write_text(
        "from fedet.methods.references import Local\nclass Mine(Local):\n    pass\n", encoding="utf-8"
    )
    result = run(tmp_path, f"{tmp_path / 'own.py'}:Mine" if own else "local", **{"run.rounds": 1})
    assert not (result.run_dir / "best").exists()
    for which in ("best", "last"):
        with pytest.raises(FedetError, match="no model at the server to export: each client keeps"):
            export.export_run(result.run_dir, tmp_path / "model", which)


def test_local_with_lost_rounds_only_has_no_accuracy(tmp_path):
    with pytest.warns(fedet.FedetWarning, match="rounds were lost"):
        result = run(tmp_path, "local", **{"run.dropout": 1.0})
    assert all(entry["lost"] for entry in result.metrics)
    assert result.summary["accuracy"] is None
    assert result.report.is_file()


def test_a_client_alone_that_diverges_keeps_its_last_finite_model(tmp_path):
    ready = built(tmp_path, "local", **{"method.client.lr": 1e30, "run.rounds": 1})
    store = ClientStore(tmp_path / "clients")
    entry, _, _ = rounds.run_round(ready, store, rounds.Snapshot(ready.method.init(ready.env)), InProcess(ready))
    assert entry["lost"]
    assert {failure["client"] for failure in entry["failures"]} == set(entry["cohort"])
    assert "diverged" in entry["failures"][0]["why"]
    assert store.clients() == []


@pytest.mark.parametrize("method", ["fedet", "central"])
def test_every_run_records_the_share_of_the_largest_class(tmp_path, method):
    result = run(tmp_path, method, **{"run.rounds": 1})
    labels = built(tmp_path, method).data.test.labels.tolist()
    most = max(labels.count(c) for c in set(labels)) / len(labels)
    assert json.loads((result.run_dir / "result.json").read_text(encoding="utf-8"))["majority"] == pytest.approx(most)


@pytest.mark.parametrize("method", ["central", "public-labels"])
def test_the_checks_about_messages_say_that_they_do_not_apply(method, tmp_path):
    lab = check.Lab(method, {}, tmp_path)
    for outcome in check.run_checks(lab, check.ABOUT_MESSAGES):
        assert outcome.ok
        assert outcome.detail == "does not apply to a reference that exchanges no messages"


@pytest.mark.parametrize("preset", sources.presets())
def test_presets_give_references_the_settings_of_the_runs_beside_them(preset):
    common = config.load(preset, {"method.name": "fedprox"}).method["client"]  # without settings of its own: [method]'s
    for name in ("central", "local"):
        assert config.load(preset, {"method.name": name}).method["client"] == common
    theirs = [config.load(preset, {"method.name": name}).method["server"] for name in ("fedet", "fedet-plus")]
    assert config.load(preset, {"method.name": "public-labels"}).method["server"] in theirs  # a ceiling is trained no worse


# In comparisons

STEPS = {"client": {"steps": 2, "batch": 16}}
SHORT = {**check.SMALL, "methods": {name: {"server": {"steps": 2}} for name in ("fedet", "public-labels")}}


def compare(out, methods, **options):
    return fedet.compare(SHORT, methods=methods, out=out, jobs=1, **{"rounds": 2, "method": STEPS, **options})


def test_a_comparison_adds_references_that_send_nothing_and_do_all_rounds(tmp_path):
    outcome = compare(tmp_path, ["fedet", "fedavg"], seeds=[0, 1], equal_traffic=True, references=True, rounds=3)
    assert [(row["label"], row["n"], row["reference"]) for row in outcome.rows] == [
        *(("fedet", 2, False), ("fedavg", 2, False)),
        *((name, 2, True) for name in [*NAMES, "majority"]),
    ]
    for result in outcome.results:
        if result.summary["reference"]:
            assert (result.summary["rounds"], sum(result.traffic.values())) == (3, 0)
    assert [name.rpartition("-s")[0] for name in listing(outcome)["runs"]] == ["fedet", "fedavg", *NAMES] * 2
    again = compare(tmp_path, ["fedet", "fedavg"], seeds=[0, 1], equal_traffic=True, references=True, rounds=3)
    assert again.folder == outcome.folder
    assert again.rows == outcome.rows  # seconds included: nothing was run again


def listing(outcome):
    return json.loads((outcome.folder / "comparison.json").read_text(encoding="utf-8"))


def test_without_references_a_comparison_is_the_one_it_was(tmp_path):
    outcome = compare(tmp_path, ["fedavg"])
    assert [row["label"] for row in outcome.rows] == ["fedavg"]


def test_hyper_parameters_reach_the_references_that_have_them(tmp_path):
    outcome = compare(tmp_path, ["fedet"], references=True, method={"client": {"steps": 3}, "lam": 0.5})
    tables = {result.summary["method"]: RunFolder(result.run_dir).config().method for result in outcome.results}
    assert [tables[name]["client"]["steps"] for name in ("fedet", "central", "local")] == [3, 3, 3]
    assert "lam" not in tables["public-labels"]


def test_public_labels_is_left_out_with_a_note_where_there_are_none(tmp_path):
    (tmp_path / "unlabelled.py").write_text(
        "import torch\ndef images(n, input_shape):\n    return torch.rand(n, *input_shape)\n", encoding="utf-8"
    )
    changes = {"data__public": f"{tmp_path / 'unlabelled.py'}:images", "data__public_size": 40, "rounds": 1}
    outcome = compare(tmp_path, ["fedavg"], references=True, **changes)
    assert [row["label"] for row in outcome.rows] == ["fedavg", "central", "local", "majority"]
    assert outcome.notes == listing(outcome)["notes"]
    assert "public-labels was left out: it needs public data with labels" in outcome.notes[0]
    assert outcome.notes[0] in outcome.report.read_text(encoding="utf-8").replace("&#39;", "'")


def test_configurations_that_differ_in_the_method_only_share_their_references(tmp_path):
    one = {**SHORT, "name": "one", "method": {"name": "fedavg", **STEPS}}
    two = {**one, "name": "two", "method": one["method"] | {"weights": "examples"}}
    skewed = {**one, "name": "skewed", "data": one["data"] | {"alpha": 0.1}}
    for sources_, names in (([one, two], NAMES), ([one, skewed], [f"{c}-{n}" for c in ("one", "skewed") for n in NAMES])):
        outcome = fedet.compare(sources_, out=tmp_path, jobs=1, rounds=1, references=True)
        assert [name.rpartition("-s")[0] for name in listing(outcome)["runs"]][2:] == names


def test_equal_traffic_needs_a_federated_method(tmp_path):
    with pytest.raises(ConfigError, match="equal traffic needs a federated method"):
        compare(tmp_path, ["central", "local"], equal_traffic=True)
    outcome = compare(tmp_path, ["central", "fedavg", "moon"], equal_traffic=True)
    assert [row["label"] for row in outcome.rows] == ["fedavg", "moon", "central", "majority"]
