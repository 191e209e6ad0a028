"""Trackers get the configuration, the numbers of each round, a picture and the model: the real packages, without a network."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import SMALL, caller

import fedet
from fedet.errors import ConfigError, FedetError, FedetWarning
from fedet.tracking import trackers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::PendingDeprecationWarning"
)


@pytest.fixture
def fedet_cli(tmp_path, monkeypatch, capsys):
    yield from caller(tmp_path, monkeypatch, capsys)


def tracked(out, tracker, rounds=2):
    return fedet.run(SMALL, out=out, rounds=rounds, tracker=tracker, progress=False)


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = tracked(tmp_path, "tensorboard")
    fedet.resume(result.run_dir, rounds=3, tracker="tensorboard", progress=False)
    read = events.EventAccumulator(str(result.run_dir / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    read.Reload()
    assert [(event.step, pytest.approx(event.value)) for event in read.Scalars("accuracy")] == [
        (entry["round"], entry["accuracy"]) for entry in fedet.Result(result.run_dir, {}).metrics
    ]
    assert {"models/server", "models/consensus", "seconds/round", "per_client/mean", "per_class/0"} <= set(
        read.Tags()["scalars"]
    )
    assert read.Tags()["images"] == ["accuracy over rounds"]
    texts = {tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert "[data]" in texts["configuration/text_summary"]
    assert str(result.run_dir / "best") in texts["model/text_summary"]


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = tracked(tmp_path / "runs", "mlflow")
    fedet.resume(result.run_dir, rounds=3, tracker="mlflow", progress=False)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlruns.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedet").experiment_id])
    assert (run.info.run_name, run.info.status) == (result.run_dir.name, "FINISHED")
    assert (run.data.params["data.name"], run.data.params["method.name"]) == ("digits", "fedet")
    history = client.get_metric_history(run.info.run_id, "models/server")
    assert [point.step for point in history] == [1, 2, 3]
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert names == {"config.toml", "report.html", "accuracy.png", "model"}
    assert "model/model.safetensors" in {item.path for item in client.list_artifacts(run.info.run_id, "model")}


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    said = {}

    def init(**options):
        run = wandb.init(**options)

        def finish():  # the file is written later, when the process of wandb has time
            said.update(data=run.config["data"]["name"], consensus=run.summary["models/consensus"])
            run.finish()

        return SimpleNamespace(log=run.log, log_artifact=run.log_artifact, finish=finish)

    real = {name: getattr(wandb, name) for name in ("log", "finish", "Image", "Artifact")}
    result = tracked(tmp_path / "runs", SimpleNamespace(init=init, **real))
    assert said["data"] == "digits"
    assert said["consensus"] in [pytest.approx(entry["models"]["consensus"]) for entry in result.metrics]  # of a step it closed
    assert list((result.run_dir / "wandb").glob("offline-run-*/files/media/images/*.png"))


def test_trackio_offline(tmp_path):
    pytest.importorskip("trackio")
    program = f"""
import fedet, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from terminal import SMALL
result = fedet.run(SMALL, out="runs", rounds=2, tracker="trackio", progress=False)
fedet.resume(result.run_dir, rounds=3, tracker="trackio", progress=False)
print("folder", result.run_dir.name)
"""  # in a process of its own: trackio reads where to write to when it is imported
    place = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "goes on without it" not in done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "fedet.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
        said = json.loads(store.execute("select config from configs").fetchone()[0])
    (name,) = [line.removeprefix("folder ") for line in done.stdout.splitlines() if line.startswith("folder ")]
    assert [(run, step) for run, step, text in rows if "models/consensus" in json.loads(text)] == [(name, k) for k in (1, 2, 3)]
    assert any("accuracy over rounds" in json.loads(text) for _, _, text in rows)
    assert said["data"]["name"] == "digits"


class Own:
    """The smallest tracker."""

    def __init__(self):
        self.said = []

    def init(self, project, config):
        self.said.append((project, config["data"]["name"]))

    def log(self, values):
        self.said.append(values["accuracy"])

    def finish(self):
        self.said.append("finished")


def test_anything_with_init_log_and_finish(tmp_path):
    own = Own()
    result = tracked(tmp_path, [own])
    assert own.said == [("fedet", "digits"), *(entry["accuracy"] for entry in result.metrics), "finished"]


def test_each_run_of_a_comparison_is_tracked(tmp_path):
    begun = []

    def init(name):
        run = SimpleNamespace(name=name, rounds=0, finish=lambda: None)
        run.log = lambda values: setattr(run, "rounds", run.rounds + 1)
        begun.append(run)
        return run

    module = SimpleNamespace(init=init, log=None, finish=None)
    module.log = module.finish = lambda *_: pytest.fail("each run has its own")
    fedet.compare(SMALL, methods=["fedet", "fedavg"], rounds=2, out=tmp_path, jobs=2, tracker=module, progress=False)
    assert sorted((run.name, run.rounds) for run in begun) == [("fedavg-s0", 2), ("fedet-s0", 2)]


def test_a_tracker_that_fails_does_not_cost_the_run(tmp_path):
    own = Own()
    own.log = lambda values: 1 / 0
    with pytest.warns(FedetWarning, match="the tracker Own failed, and the run goes on without it: ZeroDivisionError"):
        assert tracked(tmp_path, own).summary["rounds"] == 2
    own.init = lambda: 1 / 0
    with pytest.raises(FedetError, match="the tracker Own can't be started: ZeroDivisionError"):
        tracked(tmp_path, own)


def test_what_is_no_tracker_and_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is no tracker, it has no 'init': use tensorboard, mlflow, or a module"):
        tracked(tmp_path, "json")
    with pytest.raises(FedetError, match=r"needs the package nothere .*: pip install nothere"):
        tracked(tmp_path, "nothere")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(FedetError, match=r"needs the package tensorboard .*: pip install 'fedet\[tensorboard\]'"):
        tracked(tmp_path, "tensorboard")


def test_the_command_line_takes_trackers(fedet_cli):
    pytest.importorskip("tensorboard")
    said = fedet_cli("run", "small.toml", "--tracker", "tensorboard", "--quiet", "--json")
    assert list((Path(said.json["run_dir"]) / "tensorboard").iterdir())
    assert "it has no 'init'" in fedet_cli("run", "small.toml", "--tracker", "json", "--quiet").sentence(2)


def test_numbers_of_a_record():
    record = {"round": 1, "accuracy": 0.5, "loss": None, "models": {"a": 0.5}, "per_class": [0.5, None], "failures": [{}]}
    assert trackers.numbers(record) == {"accuracy": 0.5, "models/a": 0.5, "per_class/0": 0.5, "failures": 1.0}
