"""`fedet bound`: the terms of Theorem 1 for a run's clients, against the definitions."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedet import check, config, train
from fedet.cli.program import app
from fedet.engine import session
from fedet.errors import ConfigError, FedetError
from fedet.study import bound


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bound")
    return session.run_config(config.load(check.SMALL, {"method.name": "fedet", "run.rounds": 2}), out)


def test_terms_are_those_of_the_definitions_and_the_run_is_unchanged(run):
    before = {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file() and path.name != "bound.json"}
    found = bound.of_run(run.run_dir, cohorts=2, delta=0.1)
    assert {path: path.read_bytes() for path in before} == before
    experiment = session.build(config.load(run.run_dir / "config.toml"), run.run_dir / ".cache", session.Callbacks())
    counts = experiment.data.label_counts()
    test = np.bincount(experiment.data.test.labels.numpy(), minlength=counts.shape[1]) / len(experiment.data.test)
    w = train.evaluate(session.load_model(run.run_dir / "last"), experiment.data.test).accuracy
    for c in found.clients:
        assert c.examples == counts[c.client].sum()
        assert c.sample_size == pytest.approx(np.sqrt(np.log(10) / c.examples))
        assert c.discrepancy == pytest.approx(np.abs(counts[c.client] / c.examples - test).sum() / 2)
        assert 0 <= c.empirical <= 1
        assert 1 - w <= c.joint <= 2 - w
        assert c.total == pytest.approx(c.empirical + c.sample_size + c.discrepancy + c.joint)
    assert len(found.cohorts) == 2
    for cohort in found.cohorts:
        assert cohort.bound >= cohort.test_error  # in so small a run the bound is far from tight
    (_, last), (_, again) = (bound._probe(bound.replay.of_run(run.run_dir), 3, delta) for delta in (0.1, 0.5))
    # The theorem's sqrt(log 1/delta) and the lemma's sqrt(log(2/delta) / 2): 1.517427 and 1.223873 at 0.1, equal at 0.5.
    assert (last.bound - last.with_lemma) / (last.bound - again.bound) == pytest.approx(
        (1.517427 - 1.223873) / (1.517427 - 0.832555), rel=1e-4
    )
    assert again.with_lemma == pytest.approx(again.bound)


def test_weights_of_one_cohort_have_mean_one_and_repeat(run):
    first, again = (bound.of_run(run.run_dir, cohorts=1) for _ in range(2))
    assert np.mean([c.weight for c in first.clients]) == pytest.approx(1, abs=1e-3)
    assert first == again


def test_spearman_is_the_correlation_of_ranks():
    assert bound.spearman([1, 2, 3, 4], [10, 20, 40, 80]) == (1.0, 0.0)
    assert bound.spearman([1, 2, 3, 4], [8, 4, 2, 1]) == (-1.0, 0.0)
    rho, p = bound.spearman([1, 2, 2, 5, 9], [2.0, 1.0, 3.0, 3.0, 7.0])
    assert rho == pytest.approx(0.763158, abs=1e-6)  # ranks 1, 2.5, 2.5, 4, 5 and 2, 1, 3.5, 3.5, 5
    assert p == pytest.approx(0.133339, abs=1e-5)
    assert bound.spearman([1, 1, 1], [1, 2, 3]) is None
    assert bound.spearman([1, 2], [1, 2]) is None


def test_the_command_writes_what_it_found_and_the_report_shows_it(run):
    result = CliRunner().invoke(app, ["bound", str(run.run_dir), "--cohorts", "1", "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((run.run_dir / "bound.json").read_text())
    assert found["correlations"].keys() == {"total", *bound.TERMS}
    assert "Theorem 1" in (run.run_dir / "report.html").read_text()


def test_what_can_not_be_computed_is_said(run, tmp_path):
    with pytest.raises(ConfigError, match=r"at most 0\.5"):
        bound.of_run(run.run_dir, delta=0.7)
    with pytest.raises(FedetError, match="is not a run folder"):
        bound.of_run(tmp_path)
    other = session.run_config(config.load(check.SMALL, {"method.name": "fedavg", "run.rounds": 1}), tmp_path)
    with pytest.raises(ConfigError, match="'fedavg' has no weighted consensus"):
        bound.of_run(other.run_dir)


def test_ranks_of_equal_values_are_shared():
    assert bound._ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    assert torch.tensor(bound._ranks([5.0])).tolist() == [1.0]
