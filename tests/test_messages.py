"""Wrong input and what is said about it: one table of commands, each with its sentence and its exit code."""

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import TOML

from fedet import api, cli
from fedet.cli import program
from fedet.data import decode
from fedet.engine import divergence
from fedet.errors import ConfigError, DataError

OWN = """\
import dataclasses

import fedet
import numpy as np
from torch import nn


def strings():
    return np.zeros((9, 2), "float32"), np.array(["a", "b", "c"] * 3)


def negative():
    return np.zeros((9, 2), "float32"), np.arange(9) - 1


def nans():
    return np.full((9, 2), np.nan, "float32"), np.arange(9) % 3


def table():
    return np.zeros((99, 2), "float32"), np.arange(99) % 3


def three():
    return np.zeros((3, 2), "float32"), np.arange(3)


def flat(input_shape):
    return nn.Flatten(0)


class Forgetful(nn.Module):
    def forward(self, x):
        return self.layer(x)


@dataclasses.dataclass(frozen=True)
class Unfinished(fedet.Method):
    def init(self, env):
        return {}


class NotAMethod:
    pass
"""

TABLE = [  # command, exit code, sentence
    ("run small.toml --set data.split=[7,0,2]", 2, "data.split = [7, 0, 2] leaves none for the server: set it to [7, 1, 2]"),
    ("run small.toml --set data.public=none", 2, "set data.public (now 'none') to 'split', another data set, a folder or a"),
    ("run small.toml --set rouns=3", 2, "'rouns' is not a known key (did you mean 'rounds'?)"),
    ("run small.toml --set workers=2", 2, "'workers' is not a known key (did you mean 'run.workers'?)"),
    ("run small.toml --set client.lr=100", 2, "'client.lr' is not a known key (did you mean 'method.client.lr'?)"),
    ("run small.toml --set data.alpa=1", 2, "data.alpa is not a known key (did you mean 'alpha'?)"),
    ("run small.toml --set data.name=digitss", 2, "no data set is called 'digitss' (did you mean 'digits'?)"),
    ("run small.toml --set models.server=resnet9", 2, "no model is called 'resnet9' (did you mean 'resnet8'?)"),
    ("run small.toml --method fedett", 2, "no method is called 'fedett' (did you mean 'fedet'?)"),
    ("run digit", 2, "'digit' is neither a file nor a preset (did you mean 'digits'?)"),
    ("run small.toml --rounds 0", 2, "run.rounds = 0: input should be greater than or equal to 1"),
    ("run small.toml --set run.cohort=99", 2, "run.cohort = 99 is more than data.clients = 6: lower run.cohort or raise"),
    ("run small.toml --set run.device=gpu", 2, "run.device = 'gpu' is not available: use 'cpu', or 'auto'"),
    ("run small.toml --set data.partition=natural", 2, "data.partition = 'natural' needs users and digits has none"),
    ("run small.toml --set data.name=cifar10", 3, "get it with `fedet data fetch cifar10 --dir DIR`"),
    ("run small.toml --set data.name=text:tweets.parquet", 3, "tweets.parquet does not exist"),
    ("run small.toml --set data.name=own.py:strings", 3, "the labels of {own}:strings have type <U1: return numbers"),
    ("run small.toml --set data.name=own.py:negative", 3, "a label of {own}:negative is -1: labels start at 0"),
    ("run small.toml --set data.name=own.py:nans", 3, "the inputs of {own}:nans contain NaN or infinite values"),
    (
        "run small.toml --set data.name=own.py:three",
        2,
        "leaves none of 3 examples: raise the second number or use more data",
    ),
    ("run small.toml --set data.name=own.py:table", 2, "image models need inputs of shape (channels, height, width)"),
    ("run small.toml --set data.name=own.py:missing", 2, "own.py has no 'missing' to use as a data set"),
    ("run small.toml --method own.py:NotMethod", 2, "to use as a method (did you mean 'NotAMethod'?)"),
    ("run small.toml --set data.name=mine.csv", 2, "a table is read by a function of yours that returns inputs and labels"),
    ("run small.toml --set models.server=own.py:flat", 2, "its output must have two or more dimensions, the batch first"),
    ("run small.toml --set models.server=own.py:Forgetful", 2, "AttributeError: 'Forgetful' object has no attribute 'layer'"),
    ("run small.toml --method own.py:NotAMethod", 2, "own.py:NotAMethod' is not a subclass of fedet.Method"),
    ("run small.toml --method own.py:Unfinished", 2, "own.py:Unfinished' does not define local, models, round: see docs"),
    ("run small.toml --set models.server=__main__:Net", 2, "'__main__:Net' exists only in the program that defines it"),
    (
        "run small.toml --set method.client.lr=1e30",
        4,
        "non-finite values in 'model.body.convs.0.0.weight': lower method.client.lr",
    ),
    ("run small.toml --tracker json", 2, "is no tracker, it has no 'init': use tensorboard, mlflow, or a module with init"),
    ("run small.toml --tracker nothere", 1, "the tracker needs the package nothere (No module named 'nothere'): pip install"),
    ("run small.toml --set data.clients=0", 2, "data.clients = 0: input should be greater than or equal to 1"),
    ("run small.toml --set method=5", 2, "method = 5 is not a method: give a name"),
    ("run small.toml --set data.public=folder:nowhere", 3, "nowhere, which does not exist"),
    ("compare small.toml --methods fedet --jobs 1 --seeds 0,0", 2, "give at least one, without duplicates"),
    ("resume nowhere", 1, "nowhere is not a run folder: it has no config.toml"),
    ("compare small.toml --methods fedet,fedet", 2, "'fedet' is listed twice"),
]


@pytest.mark.parametrize(("command", "code", "words"), TABLE, ids=[command for command, _, _ in TABLE])
def test_wrong_input_gets_its_sentence_and_exit_code(fedet, command, code, words):
    own = Path("own.py").resolve()
    own.write_text(OWN, encoding="utf-8")
    said = fedet(*shlex.split(command), *([] if command.startswith("resume") else ["--quiet"]))
    assert words.replace("{own}", str(own)) in said.sentence(code)
    assert said.out == ""


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"rouns": 3}, "rounds"),
        ({"metod": "fedavg"}, "method"),
        ({"workers": 2}, "run__workers"),
        ({"lam": 1.0}, "method__lam"),
    ],
)
def test_python_suggests_what_python_takes(changes, hint, tmp_path):
    with pytest.raises(ConfigError, match=rf"is not a known key \(did you mean '{hint}'\?\)"):
        api.run("digits", out=tmp_path, **changes)


@pytest.mark.parametrize(
    ("module", "words"), [("pyarrow.parquet", "parquet files need pyarrow"), ("PIL.Image", "image files need")]
)
def test_a_missing_package_is_named_with_what_it_is_for(monkeypatch, module, words):
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(DataError, match=rf"{words}.*: pip install 'fedet\[data\]'"):
        decode.extra(module)


def test_divergence_names_the_rate_that_is_too_high():
    from fedet.methods.fedavg import FedAvg
    from fedet.methods.fedet import FedET
    from fedet.train import Training

    method = FedET(client=Training(lr=100.0), server=Training(lr=0.5))
    assert "grew from 1.6 to 80" in str(divergence.at_server(method, 1, (1.6, 80.0), []))
    assert "lower method.client.lr (now 100), or" in str(divergence.at_server(method, 1, (1.6, 80.0), []))
    assert "lower method.server.lr (now 0.5), or" in str(divergence.at_server(method, 1, (1.6, 1.7), []))
    assert "lower method.client.lr (now 0.1), or" in str(divergence.at_client(FedAvg(), 1, "client 3 sent nonsense"))
    assert "lower the learning rates" in str(divergence.at_server(FedAvg(), 1, (1.0, 1.0), []))


@pytest.mark.parametrize(
    ("args", "once"), [(["doctr"], "'doctor'"), (["data", "fech"], "'fetch'"), (["flower", "upp"], "'up'")]
)
def test_a_command_is_suggested_once(fedet, args, once):
    said = fedet(*args)
    assert said.code == 2
    assert said.err.count("Did you mean") == 1
    assert f"Did you mean {once}?" in said.err


def commands():
    """Every command with its group, as it is typed."""
    top = [[command.callback.__name__.rstrip("_")] for command in cli.app.registered_commands]
    groups = {name: group.registered_commands for name, group in program.GROUPS.items()}
    return top + [[name, command.callback.__name__.rstrip("_")] for name, inner in groups.items() for command in inner]


@pytest.mark.parametrize("group", [[], *([name] for name in program.GROUPS)], ids=lambda group: " ".join(["fedet", *group]))
def test_help_lists_commands_with_whole_sentences(fedet, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = fedet(*group, "--help").out.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_explains_every_argument_and_shows_no_markup(fedet, command):
    said = fedet(*command, "--help")
    assert said.code == 0
    assert "\\[" not in said.out
    usage, _, text = said.out.partition("\n")
    for word in usage.split():
        name = word.strip("[].")
        if name.isupper() and name not in ("OPTIONS", "ARGS", "COMMAND"):
            assert f"{name} is " in text or f"{name}s are" in text, f"{name} is not explained"


def test_a_script_whose_model_workers_can_not_import_ends_with_a_sentence_not_twenty_tracebacks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from torch import nn\nimport fedet\n"
        "def net(input_shape): return nn.Flatten()\n"
        "if __name__ == '__main__':\n"
        "    print(fedet.run('small.toml', models__clients=['__main__:net'], run__workers=2, rounds=1).summary['rounds'])\n",
        encoding="utf-8",
    )
    (tmp_path / "small.toml").write_text(TOML, encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert done.stderr.count("FedetWarning: worker processes can't import '__main__:net'") == 1
    assert "Traceback" not in done.stderr
    assert "script.py:5: FedetWarning" in done.stderr
