"""A search gives every method the same number of trials and chooses by validation accuracy."""

import csv
import tomllib

import pytest
import tomli_w
from test_study import SMALL, in_process  # noqa: F401 - a fixture

from fedet import config
from fedet.errors import ConfigError, Interrupted
from fedet.study import runner, sweep, sweep_pages
from fedet.study.records import Store

OVER = ["method.client.lr=0.001,0.3", "method.client.steps=2,4"]


@pytest.fixture
def base(tmp_path):
    (tmp_path / "small.toml").write_text(tomli_w.dumps(SMALL), encoding="utf-8")
    return str(tmp_path / "small.toml")


def do(found, folder, notify=lambda what, run: None):
    store = Store(folder / "records")
    return sweep.search(
        found, store.get, lambda runs: runner.run(runs, store, folder / "runs", jobs=1, notify=notify)
    ), store  # fmt: skip


def test_a_grid_has_every_combination_and_a_draw_repeats_none():
    space = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False]}
    grid = sweep.settings(space, None)
    assert len(grid) == 12
    drawn = sweep.settings(space, 7)
    assert drawn == sweep.settings(space, 7)
    assert len({tuple(setting.values()) for setting in drawn}) == 7
    assert all(setting in grid for setting in drawn)


def test_values_are_read_as_toml_and_a_key_may_be_for_one_method(base):
    space = sweep.space(
        ["method.client.lr=0.1,1e-3", "data.split=[[7, 1, 2], [8, 1, 1]]", "fedet:method.lam=0,0.5", "moon:method.mu=1"],
        config.load(base),
    )
    assert space == {"method.client.lr": [0.1, 0.001], "data.split": [[7, 1, 2], [8, 1, 1]], "method.lam": [0, 0.5]}


def test_the_papers_grid_has_the_keys_of_the_method():
    for method, keys in (("fedet", 7), ("fedavg", 3), ("fedprox", 3)):
        assert len(sweep.space(["paper-images"], config.load("cifar10-paper", {"method.name": method}))) == keys
    best = {"method.client.lr": 0.1, "method.client.batch": 64, "method.client.steps": 30, "method.lam": 0.05}
    space = sweep.space(["paper-images"], config.load("cifar10-paper"))
    assert all(value in space[key] for key, value in best.items())


def test_every_method_gets_the_same_number_of_trials(base):
    found = sweep.prepare(base, [*OVER, "fedet:method.lam=0,0.5"], methods=["fedavg", "fedet"], trials=3)
    assert [trial.method for trial in found.trials] == ["fedavg"] * 3 + ["fedet"] * 3
    with pytest.raises(ConfigError, match=r"different numbers of settings \(fedavg 4, fedet 8\)"):
        sweep.prepare(base, [*OVER, "fedet:method.lam=0,0.5"], methods=["fedavg", "fedet"])
    with pytest.raises(ConfigError, match="only 4 settings"):
        sweep.prepare(base, OVER, trials=5)
    with pytest.raises(ConfigError, match="paper-images"):
        sweep.prepare(base, ["paper-image"])


@pytest.mark.parametrize(
    ("over", "options", "words"),
    [
        (["method.client.lr=0.1,0.10"], {}, "0.1 is there twice"),
        (["data.alpha=[0.5, 0.1, 0.5]"], {}, "0.5 is there twice"),
        (["run.seed=0,1"], {}, "run.seed can't be searched: use --seeds"),
        (["run.rounds=1,2"], {}, "run.rounds can't be searched"),
        (["run.target_accuracy=0.5,0.6"], {}, "run.target_accuracy can't be searched"),
        (["method.lam=0,1"], {"changes": {"run.target_accuracy": 0.5}}, "by its test accuracy, which no search may see"),
        (["method.name=fedet,fedavg"], {}, "use --methods"),
        (["data.val_fraction=0.1,0.2"], {}, "the same validation split"),
        ([*OVER, "fedavgg:method.client.lr=0.1"], {"methods": ["fedavg"]}, "'fedavgg' is not searched .did you mean 'fedavg'"),
        (OVER, {"seeds": []}, "give at least one"),
        (OVER, {"seeds": [1, 1]}, "without duplicates"),
    ],
)
def test_what_would_count_or_compare_wrongly_is_refused(base, over, options, words):
    with pytest.raises(ConfigError, match=words):
        sweep.prepare(base, over, **options)


def test_a_key_may_be_for_a_method_of_the_users_own():
    assert sweep._parts("mine.py:Mine:method.mu=1,2") == ("mine.py:Mine", "method.mu=1,2")
    assert sweep._parts("data.name=mine.py:data,digits") == (None, "data.name=mine.py:data,digits")


def test_halving_starts_with_few_rounds_and_ends_with_all_of_them():
    assert sweep.stages(90, 27) == [4, 10, 30, 90]
    assert sweep.stages(90, 9) == [10, 30, 90]
    assert sweep.stages(90, 2) == [90]
    assert sweep.stages(5, 100) == [5]


@pytest.mark.usefixtures("in_process")
def test_a_search_is_judged_by_validation_and_the_best_configuration_runs(base, tmp_path):
    found = sweep.prepare(base, OVER, methods=["fedavg"], seeds=[0, 1])
    scores, store = do(found, tmp_path)
    records = store.all()
    assert len(records) == 8
    assert {record.config["data"]["val_fraction"] for record in records} == {0.1}
    values = {}
    for record in records:
        setting = record.config["method"]["client"]["lr"], record.config["method"]["client"]["steps"]
        values.setdefault(setting, []).append(max(record.curves["val_accuracy"]))
    assert [score.value.mean for score in scores] == sorted((sum(v) / 2 for v in values.values()), reverse=True)
    written = sweep_pages.write(found, scores, tmp_path / "page", "Search")
    chosen = config.load(written["fedavg"])
    first = scores[0].trial.setting
    assert (chosen.method["client"]["lr"], chosen.method["client"]["steps"]) == tuple(first.values())
    assert (chosen.data.val_fraction, chosen.run.rounds, chosen.run.seed) == (0.0, 3, 0)
    assert tomllib.loads(written["fedavg"].read_text(encoding="utf-8"))["method"]["name"] == "fedavg"
    rows = list(csv.DictReader((tmp_path / "page" / "trials.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["val_accuracy"]) for row in rows] == [score.value.mean for score in scores]
    assert (tmp_path / "page" / "plots" / "sweep-fedavg.svg").is_file()


@pytest.mark.usefixtures("in_process")
def test_successive_halving_continues_the_best_third_and_can_be_stopped(base, tmp_path):
    over = ["method.client.lr=0.0001,0.001,0.3"]
    found = sweep.prepare(base, over, methods=["fedavg"], halving=True, changes={"run.rounds": 9})
    assert found.stages == [3, 9]

    def stop(what, run):
        if what == "round" and run.config.run.rounds == 9:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        do(found, tmp_path, stop)
    told = []
    scores, store = do(found, tmp_path, lambda what, run: told.append((what, run.config.run.rounds)))
    assert [score.rounds for score in scores] == [9, 3, 3]
    assert told[0] == ("resumed", 9)
    assert len(store.all()) == 4
    whole = sweep.prepare(base, ["method.client.lr=0.3"], methods=["fedavg"], changes={"run.rounds": 9})
    alone, other = do(whole, tmp_path / "alone")
    if scores[0].trial.setting == alone[0].trial.setting:
        assert scores[0].value == alone[0].value
        assert store.get(other.all()[0].key).curves["accuracy"] == other.all()[0].curves["accuracy"]


@pytest.mark.usefixtures("in_process")
def test_a_trial_that_diverges_comes_last(base, tmp_path):
    found = sweep.prepare(base, ["method.client.lr=1e30,0.1"], methods=["fedavg"])
    scores, _ = do(found, tmp_path)
    assert [score.trial.setting["method.client.lr"] for score in scores] == [0.1, 1e30]
    assert sweep_pages.table(found, scores).body[1][-2] == "diverged"
    assert sweep.best(scores, "fedavg") == scores[0].trial
