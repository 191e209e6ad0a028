"""Configurations: precedence, presets, shared hyper-parameters, and files that say what was resolved."""

import importlib.resources
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedet import check, config
from fedet.config import load, sources
from fedet.errors import ConfigError

SMALL = check.SMALL | {"method": {"name": "fedet", "lam": 0.2, "client": {"steps": 3}, "server": {"steps": 4}}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, and a function that writes files into it."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


# Precedence


def test_preset_then_file_then_override(here):
    preset = load("digits")
    here("mine.toml", "base = 'digits'\n[data]\nalpha = 0.3\n[method.client]\nlr = 0.7\n[run]\nrounds = 7\n")
    mine = load("mine.toml")
    assert (mine.data.alpha, mine.run.rounds, mine.method["client"]["lr"]) == (0.3, 7, 0.7)
    assert mine.data.clients == preset.data.clients
    assert mine.models == preset.models
    assert mine.method["client"]["steps"] == preset.method["client"]["steps"]
    assert mine.name == "mine"
    by_hand = load("mine.toml", {"data.alpha": 0.1, "run": {"rounds": 3}, "method.client.lr": 0.2})
    assert (by_hand.data.alpha, by_hand.run.rounds, by_hand.method["client"]["lr"]) == (0.1, 3, 0.2)
    assert by_hand.run.cohort == mine.run.cohort


def test_a_base_may_be_a_file_beside_it_with_a_base_of_its_own(here):
    here("a/common.toml", "base = 'digits'\nname = 'common'\n[data]\nalpha = 0.3\nclients = 20\n")
    here("a/mine.toml", "base = 'common.toml'\n[data]\nalpha = 0.2\n")
    mine = load("a/mine.toml")
    assert (mine.name, mine.data.alpha, mine.data.clients) == ("mine", 0.2, 20)
    assert load({"base": "a/common.toml", "data": {"clients": 12}}).data.clients == 12


def test_the_default_is_the_digits_preset():
    assert load(None) == load("digits")
    with pytest.raises(ConfigError, match="'' is neither a file nor a preset"):
        load("")  # an empty variable of a script, not a wish for the default


def test_per_method_tables_stand_between_the_file_and_the_command(here):
    here(
        "mine.toml",
        "base = 'digits'\n[method]\nclient = { lr = 0.5, steps = 9 }\n"
        "[methods.fedprox]\nclient = { lr = 0.6 }\nweights = 'examples'\n",
    )
    assert load("mine.toml").method["client"]["lr"] == 0.5
    other = load("mine.toml", {"method.name": "fedprox"}).method
    assert (other["client"]["lr"], other["client"]["steps"], other["weights"]) == (0.6, 9, "examples")
    assert load("mine.toml", {"method.name": "fedprox", "method.client.lr": 0.7}).method["client"]["lr"] == 0.7
    assert load("mine.toml", {"methods.fedprox.client.lr": 0.8, "method.name": "fedprox"}).method["client"]["lr"] == 0.8


def test_another_method_keeps_what_it_shares_and_drops_the_rest(here):
    changed = load(SMALL, {"method.name": "fedavg"}).method
    assert changed["client"]["steps"] == 3
    assert not {"lam", "server"} & changed.keys()
    assert load(SMALL, {"method.lam": 0.4}).method["lam"] == 0.4
    with pytest.raises(ConfigError, match=r"method\.lam is not a known key"):
        load(SMALL, {"method.name": "fedavg", "method.lam": 0.4})
    here("first.toml", load(SMALL).to_toml())
    here("second.toml", "base = 'first.toml'\n[method]\nname = 'fedavg'\nweights = 'examples'\n")
    method = load("second.toml").method
    assert (method["name"], method["client"]["steps"], method["weights"]) == ("fedavg", 3, "examples")


def test_assignments_are_read_as_toml_or_else_as_text():
    texts = ["data.alpha=0.1", "data.name=digits", "run.report_accuracy=[0.5, 0.6]", "data.augment.flip=true", "data.dir=/a=b"]
    assert config.assignments(texts) == {
        "data.alpha": 0.1,
        "data.name": "digits",
        "run.report_accuracy": [0.5, 0.6],
        "data.augment.flip": True,
        "data.dir": "/a=b",
    }


def test_values_of_numpy_and_paths_are_taken(tmp_path):
    mine = load(
        "digits", {"data.alpha": np.float64(0.25), "run.rounds": np.int64(4), "data.dir": tmp_path, "data.split": (6, 2, 2)}
    )
    assert (mine.data.alpha, mine.run.rounds, mine.data.dir, mine.data.split) == (0.25, 4, str(tmp_path), (6.0, 2.0, 2.0))


# Paths


def test_references_count_from_the_file_they_stand_in(here, tmp_path):
    here("conf/model.py", "")
    here("model.py", "")
    here("data.py", "")
    here("pics/x.png", "")
    here(
        "conf/mine.toml", "base = 'digits'\n[models]\nserver = 'model.py:net'\n[data]\nname = 'data.py:make'\ndir = '../pics'\n"
    )
    mine = load("conf/mine.toml", {"models.clients": ["model.py:small"], "data.public": "folder:pics"})
    assert mine.models.server.name == f"{tmp_path}/conf/model.py:net"
    assert mine.data.name == f"{tmp_path}/data.py:make"  # not beside the file, so from the working folder
    assert mine.models.clients[0].name == f"{tmp_path}/model.py:small"
    assert (mine.data.public, mine.data.dir) == (f"folder:{tmp_path}/pics", f"{tmp_path}/pics")


def test_what_is_not_there_or_no_path_stays_as_it_is(here):
    mine = load("digits", {"models.server": "nowhere.py:net", "data.name": "package.module:make", "data.dir": "nowhere"})
    assert (mine.models.server.name, mine.data.name, mine.data.dir) == ("nowhere.py:net", "package.module:make", "nowhere")


# Bases


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_circular_base_is_an_error_also_where_workers_start_early(tmp_path, files):
    for k in range(files):
        (tmp_path / f"{k}.toml").write_text(f"base = '{(k + 1) % files}.toml'\n[run]\nrounds = 2\n", encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if key != "FEDET_EARLY"}
    command = [sys.executable, "-m", "fedet", "run", "0.toml"]
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 2
    assert said.stderr.startswith("fedet: circular base: ")
    assert said.stderr.count("\n") == 1
    assert all(f"{k}.toml" in said.stderr for k in range(files))


# Resolved files


@pytest.mark.parametrize("name", sources.presets())
def test_every_preset_resolves_and_comes_back_the_same(name):
    one = load(name)
    again = load(tomllib.loads(one.to_toml()))
    assert again == one
    assert again.digest() == one.digest()
    assert one.name == name


def test_presets_say_what_they_are():
    for name in sources.presets():
        text = (importlib.resources.files("fedet.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
        assert text.startswith("# "), name


def finite(**bounds):
    return st.floats(allow_nan=False, allow_infinity=False, **bounds)


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1)
VALUES = {
    "name": NAMES,
    "data.alpha": finite(min_value=1e-6, max_value=1e9),
    "data.clients": st.integers(100, 10**6),
    "data.split": st.tuples(finite(min_value=0.1, max_value=9), finite(min_value=0, max_value=9), st.integers(1, 9)),
    "data.dir": st.text(st.characters(exclude_categories=["C"]), min_size=1),
    "data.public_size": st.integers(1, 10**6),
    "data.augment.flip": st.booleans(),
    "data.augment.gray": finite(min_value=0, max_value=1),
    "data.options": st.dictionaries(
        NAMES.filter(lambda key: "." not in key), st.integers() | st.booleans() | st.text() | finite()
    ),
    "models.server": st.sampled_from(["vgg19", {"name": "vgg19", "width": 0.3, "norm": "group", "options": {"a": [1, 2]}}]),
    "models.given": st.lists(NAMES),
    "models.budgets": st.lists(st.integers(1, 10**12)),
    "method.lam": finite(min_value=0),
    "method.client.lr": finite(min_value=0, exclude_min=True),
    "method.client.steps": st.integers(0, 10**6),
    "method.target": st.sampled_from(["hard", "soft"]),
    "run.seed": st.integers(0, 2**63),
    "run.rounds": st.integers(1, 10**6),
    "run.target_accuracy": finite(min_value=0.01, max_value=1),
    "run.report_accuracy": st.lists(finite(min_value=0.01, max_value=1)),
    "run.diverged": st.sampled_from(["stop", "drop"]),
}


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_configuration_comes_back_from_its_file(changes):
    one = load("digits", changes)
    again = load(tomllib.loads(one.to_toml()))
    assert again == one
    assert again.digest() == one.digest()
    assert again.to_toml() == one.to_toml()


def test_the_digest_tells_experiments_apart_but_not_their_length():
    base = load("digits")
    for key, value in (
        ("run.rounds", 3),
        ("run.seed", 4),
        ("run.workers", 2),
        ("run.threads", 3),
        ("data.dir", "/x"),
        ("name", "x"),
    ):
        assert load("digits", {key: value}).digest() == base.digest(), key
    seen = {base.digest()}
    for key, value in (("data.alpha", 0.51), ("method.lam", 0.06), ("run.cohort", 9), ("models.feature_width", 65)):
        seen.add(load("digits", {key: value}).digest())
    assert len(seen) == 5


def test_what_stands_there_is_what_is_checked():
    """A value of another type is never turned into one that fits."""
    for key, value in (
        ("run.rounds", True),
        ("run.rounds", "3"),
        ("run.rounds", 3.0),
        ("data.alpha", "0.5"),
        ("data.augment.flip", "yes"),
        ("method.client.lr", "0.1"),
        ("method.client.steps", False),
        ("name", 3),
    ):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            load("digits", {key: value})
    assert load("digits", {"data.alpha": 1}).digest() == load("digits", {"data.alpha": 1.0}).digest()


def test_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError) as caught:
        load("digits", {"data.alpha": "x" * 1000})
    assert len(str(caught.value)) < 200


def test_a_part_of_a_methods_table_keeps_the_rest():
    server = config.load("digits", {"method.name": "feddf", "method.server.steps": 7}).method["server"]
    assert (server["optimiser"], server["schedule"], server["steps"]) == ("adam", "cosine", 7)


def test_another_server_model_takes_nothing_from_the_one_before(tmp_path):
    (tmp_path / "a.toml").write_text(
        'base = "text-desk"\n[models]\nserver = { name = "lstm", options = { hidden = 16 } }\n', encoding="utf-8"
    )
    server = config.load(tmp_path / "a.toml").models.server
    assert (server.name, server.options) == ("lstm", {"hidden": 16})
    kept = config.load("text-desk", {"models.server.options.layers": 1}).models.server
    assert (kept.name, kept.options["layers"], kept.options["hidden"]) == ("bert-mini", 1, 64)
    assert config.load("digits", {"models.server": {"width": 3.0}}).models.server.name == "cnn"
