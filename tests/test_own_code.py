"""When the user's own code fails, the lines of that code are shown: from any process, in Python and on the command line."""

import traceback

import pytest
import torch

from fedet import check
from fedet import config as configuration
from fedet.engine import comparison, session
from fedet.errors import ConfigError, DataError, FedetError, tracebacks

OWN = """\
from dataclasses import dataclass

from torch import nn

from fedet.methods.fedavg import FedAvg


def rows():
    return {}["no such column"]


def data():
    return rows()


class Net(nn.Module):
    def __init__(self, input_shape):
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x):
        if self.training:
            raise RuntimeError("wrong shape")
        return self.layer(x.flatten(1))


def unbuildable():
    raise TypeError("no width")


@dataclass(frozen=True)
class Server(FedAvg):
    def round(self, state, r, env):
        raise RuntimeError("nothing to average")


@dataclass(frozen=True)
class AtClients(FedAvg):
    def local(self, down, client):
        raise RuntimeError("no batch")
"""
LOCAL = ("in local", 'raise RuntimeError("no batch")')
FORWARD = ("in forward", 'raise RuntimeError("wrong shape")')
MODEL = ("--set", 'models.clients=["own.py:Net"]')


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("args", "code", "lines", "sentence"),
    [
        (["--set", "data.name=own.py:data"], 3, ["in data", "in rows", '{}["no such column"]'], "KeyError: 'no such column'"),
        (["--set", "models.server=own.py:unbuildable"], 2, ["in unbuildable", 'raise TypeError("no width")'], "TypeError: no"),
        (["--method", "own.py:Server"], 1, ["in round", "nothing to average"], "fedet: RuntimeError: nothing to average"),
        (["--method", "own.py:AtClients"], 1, [*LOCAL, "raised for client"], "fedet: RuntimeError: no batch"),
        (MODEL, 1, [*FORWARD, "raised for client"], "fedet: RuntimeError: wrong shape"),
        ([*MODEL, "--set", "run.workers=1"], 1, FORWARD, "round 1: RuntimeError: wrong shape"),
    ],
)
def test_the_command_line_shows_the_lines_of_own_code(fedet, own, args, code, lines, sentence):
    said = fedet("run", "small.toml", "--quiet", *args)
    assert sentence in said.sentence(code)
    assert said.sentence(code).endswith("(FEDET_DEBUG=1 shows the whole traceback)")
    for line in lines:
        assert line in said.err
    assert "own.py" in said.err
    assert "src/fedet" not in said.err
    assert "site-packages" not in said.err


@pytest.mark.parametrize("args", [["--method", "own.py:AtClients"], [*MODEL, "--set", "run.workers=1"]])
def test_debugging_shows_the_whole_traceback(fedet, own, monkeypatch, args):
    monkeypatch.setenv("FEDET_DEBUG", "1")
    said = fedet("run", "small.toml", "--quiet", *args)
    assert said.code == 1
    assert "Traceback (most recent call last)" in said.err
    assert "fedet/methods/" in said.err  # frames between the engine and the user's code
    assert "own.py" in said.err
    assert said.err.splitlines()[-1].startswith("fedet: ")


def test_runs_side_by_side_show_them_too(own, tmp_path):
    small = {**check.SMALL, "run": {**check.SMALL["run"], "rounds": 1}}
    with pytest.raises(FedetError, match="RuntimeError: wrong shape") as caught:
        comparison.compare(
            small, methods=["fedet", "feddf"], jobs=2, out=tmp_path / "runs", models__clients=[f"{own}:Net"], run__workers=0
        )
    assert FORWARD[1] in "".join(traceback.format_exception(caught.value))


def test_a_worker_that_can_not_build_the_experiment_says_why(tmp_path):
    once = tmp_path / "once.py"
    once.write_text(  # works once: in this process, not in the worker
        "import numpy as np\nfrom pathlib import Path\n"
        "def data():\n"
        "    flag = Path(__file__).with_name('used')\n"
        "    if flag.exists(): raise OSError('the file is locked')\n"
        "    flag.touch()\n"
        "    return np.random.default_rng(0).normal(size=(300, 1, 8, 8)).astype('float32'), np.arange(300) % 3\n",
        encoding="utf-8",
    )
    config = configuration.load({**check.SMALL, "method": {"name": "fedavg"}}, {"data.name": f"{once}:data", "run.workers": 2})
    with pytest.raises(
        DataError, match=r"a worker process can't build the experiment: .*OSError: the file is locked"
    ) as caught:
        session.run_config(config, tmp_path / "runs")
    assert "raise OSError" in "".join(traceback.format_exception(caught.value))


def test_errors_keep_their_type_and_details_between_processes():
    for kind in (ConfigError, DataError, FedetError):
        error = tracebacks.from_message(tracebacks.to_message(kind("text")), "client 3, round 1")
        assert (type(error), str(error), tracebacks.details(error)) == (kind, "client 3, round 1: text", "")
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    message = tracebacks.to_message(caught.value)
    assert tracebacks.place(caught.value).startswith("test_own_code.py:")
    assert message["text"].startswith("RuntimeError: ")
    assert "torch.zeros(2) @ torch.zeros(3)" in message["details"]
    assert "torch.zeros(2) @ torch.zeros(3)" in tracebacks.details(tracebacks.from_message(message))
