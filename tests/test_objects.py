"""Objects where a name is taken: data, models and methods from a program or a notebook, with and without worker processes."""

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from terminal import SMALL, TOML, caller
from torch import nn

import fedet
from fedet.config import loading, objects
from fedet.data import Dataset
from fedet.errors import ConfigError, DataError, FedetWarning
from fedet.methods.fedavg import FedAvg


def digits():
    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8)[:600], labels[:600]


class Net(nn.Module):
    def __init__(self, input_shape, hidden=16):
        super().__init__()
        self.layer = nn.Linear(64, hidden)

    def forward(self, x):
        return self.layer(x.flatten(1))


def wide(input_shape):
    return Net(input_shape, hidden=64)


@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = "mine"
    extra: float = 0.5


OWN = {"data": digits, "models__clients": [Net], "models__server": wide}


@pytest.fixture
def command_line(tmp_path, monkeypatch, capsys):
    yield from caller(tmp_path, monkeypatch, capsys)


def run(out, **changes):
    return fedet.run(SMALL, out=out, rounds=2, progress=False, **changes)


def same(a, b):
    for x, y in zip(a.metrics, b.metrics, strict=True):
        assert {k: v for k, v in x.items() if k != "seconds"} == {k: v for k, v in y.items() if k != "seconds"}


def test_objects_of_a_file_are_named_and_reach_workers_and_the_command_line(tmp_path, command_line):
    alone, pooled = run(tmp_path / "a", **OWN), run(tmp_path / "b", **OWN, run__workers=2)
    same(alone, pooled)
    text = (alone.run_dir / "config.toml").read_text(encoding="utf-8")
    assert f'name = "{__file__}:digits"' in text
    assert f'name = "{__file__}:Net"' in text
    assert set(alone.metrics[-1]["models"]) == {"server", "Net", "consensus"}
    assert isinstance(alone.model.body, Net)
    assert command_line("resume", alone.run_dir, "--rounds", "3", "--json", "--quiet").json["rounds"] == 3
    with pytest.raises(ConfigError, match=r"was started with another models.clients: pass what was passed to fedet.run"):
        fedet.resume(alone.run_dir, rounds=4, models__clients=[wide])


def test_arrays_data_sets_and_functions_give_the_same_run(tmp_path):
    images, labels = digits()
    expected = run(tmp_path / "a", data=digits)
    ours = Dataset("mine", torch.from_numpy(images), torch.from_numpy(labels), 10)
    torchs = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    for number, given in enumerate([(images, labels), ours, torchs, lambda: (images, labels)]):
        same(expected, run(tmp_path / str(number), data__name=given))
    with pytest.raises(DataError, match="600 inputs but 3 labels"):
        run(tmp_path, data=(images, labels[:3]))
    with pytest.raises(ConfigError, match="an object of type object is no data"):
        run(tmp_path, data=object())


def test_arrays_reach_workers_through_a_file_and_the_run_resumes_from_the_command_line(tmp_path, command_line):
    expected = run(tmp_path / "a", data=digits, run__workers=0)
    pooled = run(tmp_path / "b", data=digits(), run__workers=2)
    same(expected, pooled)
    (file,) = (tmp_path / "b" / ".cache").glob("object-*.npz")
    assert command_line("resume", pooled.run_dir, "--rounds", "3", "--json", "--quiet").json["rounds"] == 3
    file.unlink()
    said = command_line("resume", pooled.run_dir, "--rounds", "4", "--quiet").sentence(2)
    assert "'arrays', a data set, was passed from Python as an object that no file names: pass it again" in said
    assert "fedet.resume(RUN, data__name=arrays)" in said
    images, labels = digits()
    with pytest.raises(ConfigError, match=r"was started with another data.name"):
        fedet.resume(pooled.run_dir, rounds=4, data=(images, (labels + 1) % 10), progress=False)
    assert fedet.resume(pooled.run_dir, rounds=4, data=(images, labels), progress=False).summary["rounds"] == 4


def test_an_object_that_no_file_names_runs_in_this_process_with_a_word(tmp_path):
    def local(input_shape):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16))

    with pytest.warns(FedetWarning, match="worker processes can't import 'local': the run uses this process alone"):
        result = run(tmp_path, models__clients=[local, "cnn"], models__server=lambda: nn.Flatten(), run__workers=2)
    assert set(result.metrics[-1]["models"]) == {"server", "local", "cnn", "consensus"}
    assert isinstance(result.model.body, nn.Flatten)
    with pytest.raises(ConfigError, match="'lambda', a model, was passed from Python as an object"):
        fedet.load_model(result.run_dir, trust_code=True)
    assert isinstance(fedet.load_model(result.run_dir, own=lambda: nn.Flatten()).body, nn.Flatten)
    with pytest.raises(ConfigError, match=r"pass it again, as in fedet.resume"):
        fedet.resume(result.run_dir, rounds=3, progress=False)
    again = {"models__clients": [local, "cnn"], "models__server": lambda: nn.Flatten(), "workers": 0}
    assert fedet.resume(result.run_dir, rounds=3, progress=False, **again).summary["rounds"] == 3
    with pytest.raises(ConfigError, match=r"another models.server"):
        fedet.resume(result.run_dir, rounds=4, progress=False, **again | {"models__server": lambda: nn.Identity()})


def test_a_method_as_an_instance_brings_its_values(tmp_path):
    mine = Mine(extra=0.25, client=replace(FedAvg().client, lr=0.02, steps=2))
    result = run(tmp_path, method=mine)
    stored = loading.load(result.run_dir / "config.toml").method
    assert (stored["name"], stored["extra"], stored["client"]["lr"]) == (f"{__file__}:Mine", 0.25, 0.02)
    own = FedAvg(client=replace(FedAvg().client, lr=0.03, steps=2))
    builtin = run(tmp_path, method=own)
    assert builtin.summary["method"] == "fedavg"
    same(builtin, run(tmp_path, method={"name": "fedavg", **asdict(own)}))
    with pytest.raises(ConfigError, match=r"is not a method: give a name, or a subclass of fedet.Method"):
        run(tmp_path, method=Net)


def test_a_comparison_takes_objects_too(tmp_path):
    small = {**SMALL, "data": {**SMALL["data"], "name": digits}}
    outcome = fedet.compare(small, methods=[FedAvg, Mine(), "fedet"], out=tmp_path, rounds=1, jobs=2, progress=False)
    assert [row["label"] for row in outcome.rows] == ["fedavg", "Mine", "fedet"]
    with pytest.warns(FedetWarning, match="can't import 'lambda'"):
        alone = fedet.compare(small, methods=["fedet"], models__clients=[lambda: nn.Flatten()], out=tmp_path, rounds=1, jobs=2)
    assert alone.results[0].summary["rounds"] == 1


def test_fingerprints_follow_the_code_and_not_the_place():
    def made(size):
        return lambda: size

    with objects.scope():
        first, other, again = (objects.reference_of(made(size)) for size in (1, 2, 1))
        scope = {}
        exec("class A:\n    x = 1\n    def f(self): return 2", scope)  # not importable
        a = objects.reference_of(scope["A"])
        exec("\n\nclass A:\n    x = 1\n    def f(self): return 2", scope)
        b = objects.reference_of(scope["A"])
        exec("class A:\n    x = 1\n    def f(self): return 3", scope)
        c = objects.reference_of(scope["A"])
    assert first == again != other
    assert a == b != c
    with pytest.raises(ConfigError, match="only a name can be used here"):
        loading.load("digits", {"data.name": lambda: None})


def test_a_script_passes_its_own_functions(tmp_path):
    (tmp_path / "small.toml").write_text(TOML, encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "from torch import nn\nimport fedet\n"
        "def net(): return nn.Flatten()\n"
        "result = fedet.run('small.toml', models__clients=[net], run__workers=2, rounds=1)\n"
        "print(sorted(result.metrics[-1]['models']))\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "['consensus', 'net', 'server']\n"), done.stderr
    assert done.stderr.count("FedetWarning: worker processes can't import 'net'") == 1
    assert "accuracy" not in done.stderr  # no progress where standard error is no terminal
