"""What is no error but probably not meant gets a warning: shown once, kept in the result and in the report."""

import os
import signal
import warnings
from pathlib import Path

import pytest

from fedet import check, experiment
from fedet import config as configuration
from fedet.engine import run_warnings, session
from fedet.engine.callbacks import Callbacks
from fedet.errors import FedetWarning, tracebacks

OWN = """\
import numpy as np
from torch import nn

rng = np.random.default_rng(0)


def made(labels, users=None):
    return (rng.normal(size=(len(labels), 4)).astype("float32"), labels) + (() if users is None else (users,))


def fine():
    return made(np.arange(300) % 3)


def gaps():
    return made(np.array([0, 3, 9000])[np.arange(300) % 3])


def single():
    return made(np.zeros(300, dtype=int))


def rare():  # one user alone has class 2, and is in the test part with seed 0
    users = np.arange(300) // 30
    return made(np.where(users == USER, 2, np.arange(300) % 2), users)


def net(input_shape, hidden=8):
    return nn.Sequential(nn.Linear(input_shape[0], hidden), nn.ReLU())
"""
GAPS = "8,998 of the labels 0 to 9,000 never occur"
SMALLER = "the server's model 'large' has"
CHANCE = "is no better than chance: its accuracy is"


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace("USER", "4"), encoding="utf-8")
    return tmp_path / "own.py"


def small(own, data="fine", server=64, **changes):
    models = {
        "clients": [{"name": f"{own}:net", "label": "small"}],
        "server": {"name": f"{own}:net", "label": "large", "options": {"hidden": server}},
        "feature_width": 16,
        "representation_width": 8,
    }
    asked = {"data": {"name": f"{own}:{data}", "clients": 4}, "models": models, "run": {"rounds": 1, "cohort": 2, "threads": 1}}
    method = {"name": "fedet", "client": {"steps": 1}, "server": {"steps": 1}}
    return configuration.load({**asked, "method": method}, changes)


def found(config, tmp_path):
    return run_warnings.before(experiment.build(config, tmp_path))


def test_what_is_as_it_should_be_is_silent(own, tmp_path):
    assert found(small(own), tmp_path) == []
    assert run_warnings.before(experiment.build(configuration.load(check.SMALL), tmp_path)) == []


@pytest.mark.parametrize(
    ("data", "server", "words"),
    [
        ("gaps", 64, f"{GAPS} in .*own.py:gaps, and the models have 9,001 outputs: number the classes from 0 without gaps"),
        ("single", 64, "all examples of .*own.py:single have the label 0: there is nothing to learn"),
        ("fine", 4, f"{SMALLER} .* fewer than the clients' 'small' with .*: method 'fedet' is meant for a server model"),
    ],
)
def test_data_and_models_that_are_hardly_meant(own, tmp_path, data, server, words):
    (text,) = found(small(own, data, server), tmp_path)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(text)


def test_a_class_that_no_client_has(own, tmp_path):
    natural = {"data.partition": "natural", "data.clients": 3}
    seeds = [found(small(own, "rare", **natural, **{"run.seed": seed}), tmp_path) for seed in range(6)]
    told = ["no client has examples of class 2: no model can learn to recognise it from the clients"]
    assert told in seeds
    assert [] in seeds


def test_a_smaller_server_is_fine_where_it_trains_the_clients_model(own, tmp_path):
    assert found(small(own, server=4, **{"method.name": "fedavg"}), tmp_path) == []


def test_a_model_that_stays_at_chance_is_named_at_the_end(own, tmp_path):
    built = experiment.build(small(own), tmp_path)  # labels that have nothing to do with the inputs
    scores = {"lost": False, "models": {"server": 0.9, "small": 0.35, "consensus": 0.3}}
    (text,) = run_warnings.after(built, [scores] * run_warnings.ROUNDS)
    assert text.startswith(f"after {run_warnings.ROUNDS} rounds the model 'small' {CHANCE} 0.350")
    assert run_warnings.after(built, [scores] * (run_warnings.ROUNDS - 1)) == []


def test_python_warns_the_caller_and_the_result_keeps_it(own, tmp_path):
    with pytest.warns(FedetWarning, match=GAPS) as caught:
        result = session.run_config(small(own, "gaps"), tmp_path / "runs")
    assert [warning.filename for warning in caught] == [__file__]
    assert [GAPS in text for text in result.summary["warnings"]] == [True]
    assert GAPS in (result.run_dir / "report.html").read_text(encoding="utf-8")
    with pytest.warns(FedetWarning, match=GAPS):
        again = session.resume(result.run_dir, rounds=2)
    assert again.summary["warnings"] == result.summary["warnings"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedetWarning)
        with pytest.raises(FedetWarning):
            session.run_config(small(own, "gaps"), tmp_path / "runs")


def test_the_command_line_shows_each_once_and_also_if_quiet(fedet, own):
    Path("own.toml").write_text(small(own, "gaps", 4).to_toml(), encoding="utf-8")
    said = fedet("run", "own.toml", "--quiet", "--json")
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["warning", "warning"]
    assert len(said.json["warnings"]) == 2
    said = fedet("compare", "own.toml", "--methods", "fedet,fedavg", "--jobs", "2")
    assert said.code == 0
    assert said.err.count(GAPS) == said.err.count(SMALLER) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
def test_a_worker_that_was_killed_and_replaced_is_told(tmp_path):
    config = configuration.load(check.SMALL, {"run.workers": 1, "run.rounds": 2})
    told, rounds = [], []

    def kill_once(entry):
        rounds.append(entry)
        if len(rounds) == 1:
            os.kill(pids[0], signal.SIGKILL)

    pids = []
    real = session.Pool.__init__

    def noted(pool, *args):
        real(pool, *args)
        pids.append(pool.workers[0].process.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Pool, "__init__", noted)
        result = session.run_config(config, tmp_path, callbacks=Callbacks(round=kill_once, warning=told.append))
    assert len(rounds) == 2
    assert told == result.summary["warnings"]
    assert told
    assert all("died and was replaced, which changes no result" in text for text in told)


def test_code_that_no_other_process_can_import_runs_in_this_one(own, tmp_path, monkeypatch):
    import __main__

    monkeypatch.setattr(__main__, "only_here", lambda input_shape: __import__("torch").nn.Flatten(), raising=False)
    told = []
    config = small(own, **{"models.clients": [{"name": "__main__:only_here", "label": "mine"}], "run.workers": 2})
    result = session.run_config(config, tmp_path / "runs", callbacks=Callbacks(warning=told.append))
    assert result.summary["rounds"] == 1
    assert told[0].startswith("worker processes can't import '__main__:only_here': the run uses this process alone")


def test_libraries_are_not_the_users_code():
    assert tracebacks.in_library(os.__file__)
    assert tracebacks.in_library(pytest.__file__)
    assert tracebacks.in_library(tracebacks.__file__)
    assert not tracebacks.in_library(__file__)
