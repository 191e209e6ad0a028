"""`fedet audit`: membership inference against definitions, and that DP-SGD makes a difference."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedet import check, config, experiment
from fedet.cli.program import app
from fedet.engine import session
from fedet.errors import FedetError
from fedet.study import audit


def load(method="fedet", **changes):
    steps = {"method.client": {"lr": 0.3, "batch": 16, "steps": 3, "clip": 1.0}}
    return config.load(check.SMALL, {"method.name": method, "run.rounds": 1, **steps, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return session.run_config(load(), tmp_path_factory.mktemp("audit"))


def test_auc_is_the_share_of_pairs_in_order():
    members, others = np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0])
    pairs = [(m > o) + (m == o) / 2 for m in members for o in others]
    assert audit.auc(members, others) == pytest.approx(np.mean(pairs))
    assert audit.auc(others, others) == 0.5
    assert audit.auc(np.ones(3), np.zeros(4)) == 1.0


def test_true_positives_are_counted_above_what_one_in_a_hundred_others_exceeds():
    others = np.arange(200.0)  # two may exceed the threshold: it is 197
    assert audit.true_positives(np.array([197.0, 197.5, 300.0, 0.0]), others) == 0.5
    assert audit.true_positives(np.array([199.0, 200.0]), np.arange(50.0) + 150) == 0.5  # of 50 none may


def test_the_curve_rises_from_none_to_all():
    rng = np.random.default_rng(0)
    points = audit.roc(rng.normal(1, 1, 300), rng.normal(0, 1, 400))
    false, true = zip(*points, strict=True)
    assert false[0] == true[0] == 0
    assert false[-1] == 1
    assert list(false) == sorted(false)
    assert list(true) == sorted(true)


def test_log_odds_are_finite_where_the_probability_rounds_to_one():
    logits = torch.tensor([[2.0, 0.0, 0.0], [90.0, 0.0, -5.0]])
    p = torch.softmax(logits[0].double(), dim=0)[0]
    phi = audit.log_odds(logits, torch.tensor([0, 0]))
    assert float(phi[0]) == pytest.approx(float(torch.log(p / (1 - p))))
    assert float(phi[1]) == pytest.approx(90, abs=0.01)


def test_members_and_others_have_the_same_labels(tmp_path):
    data = experiment.build(load(), tmp_path).data
    members, others = audit.matched(data.client(1), data.test, seed=1)
    assert torch.equal(members.labels.bincount(minlength=10), others.labels.bincount(minlength=10))
    assert set(members.rows.tolist()) <= set(data.client(1).rows.tolist())
    assert set(others.rows.tolist()) <= set(data.test.rows.tolist())
    assert len(members) > 10


def test_the_command_writes_what_it_found_and_the_report_shows_it(run):
    before = {path: path.read_bytes() for path in run.run_dir.rglob("*.safetensors")}
    result = CliRunner().invoke(app, ["audit", str(run.run_dir), "--cohorts", "1", "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((run.run_dir / "audit.json").read_text())
    assert [(a["target"], a["attack"]) for a in found["attacks"]] == [
        (target, attack) for target in ("clients", "server") for attack in ("loss", "ratio")
    ]
    assert len(found["clients"]) == 3
    assert not found["private"]
    page = (run.run_dir / "report.html").read_text()
    assert "Membership inference" in page
    assert (run.run_dir / "plots" / "audit.svg").is_file()
    assert {path: path.read_bytes() for path in before} == before


def test_an_audit_repeats(run):
    assert audit.of_run(run.run_dir, cohorts=1) == audit.of_run(run.run_dir, cohorts=1)


@pytest.mark.parametrize("method", ["scaffold", "dsfl", pytest.param("fedgkt", marks=pytest.mark.slow)])
def test_models_that_are_not_sent_as_they_are_can_be_attacked(method, tmp_path):
    done = session.run_config(load(method), tmp_path)
    found = audit.of_run(done.run_dir, cohorts=1)
    assert {a.target for a in found.attacks} == {"clients", "server"}


HOLDING_OUT = """
from dataclasses import dataclass, replace

import torch

from fedet import train
from fedet.core import Payload, weights_of
from fedet.data import Examples
from fedet.methods.fedavg import FedAvg


@dataclass(frozen=True)
class HoldingOut(FedAvg):
    by_hand: bool = False

    def local(self, down, client):
        model, rows = client.build(client.large, down.tensors["model"]), client.data.rows[::3]
        if self.by_hand:
            mine = Examples(client.data.dataset, rows)
            for index in torch.arange(len(mine)).split(5):
                train.cross_entropy(model, mine, index).backward()
        else:
            mine = replace(client.data, rows=rows)
            train.fit(model, mine, replace(self.client, steps=200), seed=client.seed)
        train.evaluate(model, client.data)
        return Payload({"model": weights_of(model)})
"""
"""A method that trains on every third example, by `fit` or by a loop of its own, and only looks at the others."""


@pytest.fixture
def probed(monkeypatch):
    """The members of every comparison that an audit makes."""
    members, matched = [], audit.matched
    monkeypatch.setattr(audit, "matched", lambda own, test, seed: members.append(own) or matched(own, test, seed))
    return members


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_method_holds_out_is_no_member(tmp_path, probed, by_hand):
    (tmp_path / "own.py").write_text(HOLDING_OUT, encoding="utf-8")
    method = {"name": f"{tmp_path / 'own.py'}:HoldingOut", "by_hand": by_hand, "client": {"lr": 0.1, "batch": 16, "steps": 3}}
    done = session.run_config(config.load(check.SMALL | {"method": method}, {"run.rounds": 1}), tmp_path / "runs")
    found = audit.of_run(done.run_dir, cohorts=1)
    data = experiment.build(load(), tmp_path / "cache").data
    for k, own in zip(found.clients, probed, strict=True):
        assert sorted(own.rows.tolist()) == sorted(data.client(k).rows[::3].tolist())


def test_members_are_the_examples_of_the_steps_that_were_taken(tmp_path, probed):
    """Three batches of sixteen, of some 170 examples; with DP-SGD, those that were drawn."""
    for privacy in ({}, {"privacy.clip": 1.0}):
        done = session.run_config(load("fedavg", **privacy), tmp_path / str(len(privacy)))
        audit.of_run(done.run_dir, cohorts=1)
    sizes = [len(own) for own in probed]
    assert sizes[:3] == [48] * 3
    assert all(30 <= n <= 70 for n in sizes[3:])
    assert all(len(own.rows.unique()) == len(own) for own in probed)


def test_the_server_was_not_trained_on_examples_of_those_that_it_refused(tmp_path):
    settings = {"run.robust": "on", "run.cohort": 6, "run.attack": {"kind": "scale", "share": 0.2, "strength": 1e5}}
    done = session.run_config(load("fedavg", **settings), tmp_path)
    found = {a.target: a for a in audit.of_run(done.run_dir, cohorts=1).attacks if a.attack == "loss"}
    assert found["server"].members < found["clients"].members
    flipped = {**settings, "run.robust": "off", "run.attack": {"kind": "flip", "share": 0.2}}
    lied = session.run_config(load("fedavg", **flipped), tmp_path / "flip")
    assert len(audit.of_run(lied.run_dir, cohorts=1).clients) == 5  # one has trained on labels that are not its own


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FedetError, match="is not a run folder"):
        audit.of_run(tmp_path)


@pytest.mark.slow
def test_dp_sgd_makes_members_harder_to_find_on_overfitted_digits(tmp_path):
    """The comparison of docs/guide/privacy.md."""
    overfitted = {"run.rounds": 1, "run.cohort": 4, "run.workers": 0, "method.client.steps": 60}
    private = {"privacy.clip": 1.0, "privacy.noise": 1.0}
    runs = [session.run_config(config.load("digits", overfitted | more), tmp_path / str(len(more))) for more in ({}, private)]
    plain, noisy = ({a.attack: a.auc for a in audit.of_run(r.run_dir, 2).attacks if a.target == "clients"} for r in runs)
    assert max(plain.values()) > 0.6
    assert max(noisy.values()) < max(plain.values()) - 0.05
