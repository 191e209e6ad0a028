"""Wrong input and what is said about it: one table of commands, each with its sentence and its exit code."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from terminal import TOML

from fedet import api, cli
from fedet.cli import program
from fedet.data import decode
from fedet.engine import divergence
from fedet.errors import ConfigError, DataError, FedetError

OWN = """\
import dataclasses

import fedet
import numpy as np
import torch
from fedet.core import Payload
from fedet.methods.fedavg import FedAvg
from torch import nn

GOOD = np.zeros((90, 1, 8, 8), "float32")
CLASSES = np.arange(90) % 3


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


def frame():
    import pandas

    table = pandas.DataFrame({"size": [1.0] * 90, "town": ["x"] * 90, "kind": CLASSES})
    return table.drop(columns="kind"), table["kind"]


def gaps():
    import pandas

    table = pandas.DataFrame({"size": [1.0] * 90, "age": [None, 2.0] * 45})
    return table, CLASSES


def huge():
    return GOOD.astype("float64") + 1e39, CLASSES


def floats():
    return GOOD, CLASSES.astype("float64")


def unlabelled():
    return GOOD, np.where(CLASSES > 0, 1.0, np.nan)


def uneven():
    return [[1, 2], [3]], [0, 1]


def shorter():
    return GOOD, CLASSES[:-1]


def forgotten():
    GOOD, CLASSES


def leaves():
    raise SystemExit(3)


class Half(nn.Module):
    def forward(self, x):
        return x.flatten(1).half()


class Pair(nn.Module):
    def forward(self, x):
        return x.flatten(1), 3


class FewRows(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:1]


def request(state, cohort):
    return {c.id: Payload({"model": state}) for c in cohort}


class NoState(FedAvg):
    def init(self, env):
        pass


class NoNewState(FedAvg):
    def round(self, state, r, env):
        r.exchange(request(state, r.cohort))


class NoReply(FedAvg):
    def local(self, down, client):
        pass


class BareReply(FedAvg):
    def local(self, down, client):
        return down.tensors


class Keeps(FedAvg):
    def local(self, down, client):
        client.state["rounds"] = 3
        return down


class NoModels(FedAvg):
    def models(self, state, env):
        pass


class EmptyModels(FedAvg):
    def models(self, state, env):
        return {}


class BareModels(FedAvg):
    def models(self, state, env):
        return {"server": state}


class OddModels(FedAvg):
    def models(self, state, env):
        return {"server": (env.large, torch.zeros(3))}


class WholeClients(FedAvg):
    def round(self, state, r, env):
        return r.exchange({c: Payload({"model": state}) for c in r.cohort})


class BareRequests(FedAvg):
    def round(self, state, r, env):
        return r.exchange({c.id: {"model": state} for c in r.cohort})


class NoGroups(FedAvg):
    def round(self, state, r, env):
        return r.exchange({c.id: Payload(state) for c in r.cohort})


class ListOfRequests(FedAvg):
    def round(self, state, r, env):
        return r.exchange([Payload({"model": state})])


class NoLayout(FedAvg):
    def expected_reply(self, down, client, env):
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
    (
        "run small.toml --set data.name=own.py:strings",
        3,
        "(they are text, such as 'a'): number the classes from 0, as numpy.unique",
    ),
    ("run small.toml --set data.name=own.py:negative", 3, "a label of {own}:negative is -1: labels start at 0"),
    ("run small.toml --set data.name=own.py:huge", 3, "contain values beyond 3.4e38, the largest of float32: scale them"),
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
    ("compare small.toml --methods fedet --jobs 1 --seeds 0,0", 2, "give at least one whole number, without duplicates"),
    ("resume nowhere", 2, "nowhere is not a run folder: there is no such folder; `fedet runs` lists"),
    ("resume .", 2, ". is not a run folder: it has no config.toml"),
    ("resume several", 2, "several is not a run folder, but there are runs in it: give one of them, such as several/one"),
    ("resume compared", 2, "compared is not a run folder but a comparison's: repeat its `fedet compare`"),
    ("compare small.toml --methods fedet,fedet", 2, "'fedet' is listed twice"),
    ("compare small.toml --methods all,fedet", 2, "'all' means all ten, so it stands alone"),
    ("compare small.toml --methods fedet --out small.toml", 1, "can't create the directory small.toml/compare-small-"),
    ("run ''", 2, "'' is neither a file nor a preset"),
    ("run several", 2, "'several' is a folder without config.toml: give a TOML file, the folder of a run or a preset"),
    ("run binary.toml", 2, "binary.toml is not a configuration: it is not text in UTF-8"),
    ("study small.toml", 2, "small.toml is not a plan, it has neither bases nor grids"),
    ("data fetch cifar", 2, "'cifar' can't be fetched or verified (did you mean 'cifar10'?)"),
    ("run small.toml --rounds -1", 2, "run.rounds = -1: input should be greater than or equal to 1"),
    ("run small.toml --set lr=0.1", 2, "'lr' is not a known key (did you mean 'method.client.lr'?)"),
    ("run small.toml --set method.client.learning_rate=1", 2, "is not a known key: the keys are lr, batch, steps, optimiser"),
    ("run small.toml --set models.clients=cnn", 2, "models.clients = 'cnn': it is a list; write it as [\"cnn\"]"),
    ("run small.toml --set models.clients=[cnn,resnet8]", 2, 'it is a list; write it as ["cnn", "resnet8"]'),
    ("run small.toml --set models.clients=[]", 2, "models.clients = []: give at least one"),
    ("run small.toml --set models.clients=[5]", 2, "models.clients.0 = 5: give the name of a model, or a table that has one"),
    ("run small.toml --set data.split=[7,3]", 2, "data.split has too few entries: it needs 3"),
    ("run small.toml --set data.split=7", 2, "data.split = 7: it is a list; write it as [7]"),
    ("run small.toml --set run.robust=yes", 2, "it is a table; set its keys instead (run.robust.KEY); or use 'on' or 'off'"),
    ("run small.toml --set data.name=own.py", 2, "'own.py': name the function in the file, too, as own.py:NAME"),
    ("run small.toml --set models.server=own.py", 2, "name the function or class in the file, too, as own.py:NAME"),
    ("run small.toml --method own.py", 2, "'own.py': name the class in the file, too, as own.py:NAME"),
    ("run small.toml --set data.name=own.py:GOOD", 2, "is an object of type ndarray: give a function that returns inputs and"),
    (
        "run small.toml --set data.name=own.py:frame",
        3,
        "are not all numbers (the column 'town' is not): drop what is no number",
    ),
    (
        "run small.toml --set data.name=own.py:gaps",
        3,
        "contain NaN or infinite values (the column 'age' is affected): fill them in",
    ),
    ("run small.toml --set data.name=own.py:floats", 3, "are float64: return integers from 0, such as labels.astype('int64')"),
    ("run small.toml --set data.name=own.py:unlabelled", 3, "are float64: some are missing, drop these rows"),
    ("run small.toml --set data.name=own.py:uneven", 3, "the inputs of {own}:uneven are not all of the same shape"),
    (
        "run small.toml --set data.name=own.py:shorter",
        3,
        "{own}:shorter: 90 inputs but 89 labels; one is needed for each input",
    ),
    ("run small.toml --set data.name=own.py:forgotten", 3, "{own}:forgotten returned nothing (None): it must be a tuple"),
    ("run small.toml --set data.name=own.py:leaves", 3, "{own}:leaves failed: SystemExit: 3"),
    ("run small.toml --set models.server=own.py:Half", 2, "own.py:Half' returns float16: its output must be float32"),
    ("run small.toml --set models.server=own.py:Pair", 2, "own.py:Pair' returns a tuple: its output must be one tensor"),
    ("run small.toml --set models.server=own.py:FewRows", 2, "to (1, 64): its output must have two or more dimensions"),
    ("run small.toml --method own.py:NoState", 1, "the request for client 1 has nothing (None) as its group 'model'"),
    ("run small.toml --method own.py:NoNewState", 1, "'NoNewState.round' returned nothing (None): return the new state"),
    ("run small.toml --method own.py:NoReply", 1, "the reply of 'NoReply.local' is nothing (None): it must be a Payload"),
    ("run small.toml --method own.py:BareReply", 1, "is an object of type dict: it must be a Payload, such as Payload("),
    ("run small.toml --method own.py:Keeps", 1, "client.state, as 'Keeps.local' left it, has an object of type int as its"),
    ("run small.toml --method own.py:NoModels", 1, "'NoModels.models' returned nothing (None): return a dict of (architecture"),
    ("run small.toml --method own.py:EmptyModels", 1, "'EmptyModels.models' returned no model: return one, such as"),
    (
        "run small.toml --method own.py:BareModels",
        1,
        "has an object of type dict as 'server': it must be (architecture, weights)",
    ),
    ("run small.toml --method own.py:OddModels", 1, "the model 'server' has an object of type Tensor as its group 'weights'"),
    ("run small.toml --method own.py:WholeClients", 1, "an object of type ClientInfo, which is no client's id: use c.id"),
    (
        "run small.toml --method own.py:BareRequests",
        1,
        "the request for client 1 is an object of type dict: it must be a Payload",
    ),
    ("run small.toml --method own.py:NoGroups", 1, "has an object of type Tensor as its group 'body."),
    ("run small.toml --method own.py:ListOfRequests", 1, "r.exchange was given an object of type list: give it a dict"),
    ("run small.toml --method own.py:NoLayout", 1, "what 'NoLayout.expected_reply' returns is nothing (None): it must be"),
]


@pytest.mark.parametrize(("command", "code", "words"), TABLE, ids=[command for command, _, _ in TABLE])
def test_wrong_input_gets_its_sentence_and_exit_code(fedet, command, code, words):
    own = Path("own.py").resolve()
    own.write_text(OWN, encoding="utf-8")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    for folder, file in (("several/one", "config.toml"), ("compared", "comparison.json")):
        Path(folder).mkdir(parents=True)
        Path(folder, file).touch()
    said = fedet(*shlex.split(command), *(["--quiet"] if command.startswith(("run", "compare")) else []))
    assert words.replace("{own}", str(own)) in said.sentence(code)
    assert said.out == ""


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"rouns": 3}, "rounds"),
        ({"metod": "fedavg"}, "method"),
        ({"workers": 2}, "run__workers"),
        ({"lam": 1.0}, "method__lam"),
        ({"lr": 0.1}, "method__client__lr"),
        ({"data_alpha": 0.1}, "data__alpha"),
    ],
)
def test_python_suggests_what_python_takes(changes, hint, tmp_path):
    with pytest.raises(ConfigError, match=rf"is not a known key \(did you mean '{hint}'\?\)"):
        api.run("digits", out=tmp_path, **changes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"callbacks": print}, "give fedet.Callbacks(round=...), with the functions to be called"),
        ({"models__clients": Path}, "models.clients = Path: it is a list; write it as [Path]"),
        ({"models__clients": [torch.nn.Flatten()]}, "'Flatten' is not a class or function: give one that returns a new module"),
        ({"data__name": np.zeros((9, 1, 8, 8))}, "the data that was passed is an object of type ndarray: it must be a tuple"),
        ({"data": (np.zeros((9, 1, 8, 8)), np.zeros(8, int))}, "the data that was passed: 9 inputs but 8 labels"),
    ],
)
def test_python_says_what_to_pass_instead(given, words, tmp_path):
    with pytest.raises(FedetError, match=re.escape(words)):
        api.run("digits", out=tmp_path, progress=False, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": "fedet"}, "methods = 'fedet': give a list, such as ['fedet', 'fedavg']"),
        ({"seeds": 3}, "seeds = 3: give a list, such as [0, 1, 2]"),
        ({"seeds": ["a"]}, "seeds = ['a']: give at least one whole number"),
    ],
)
def test_a_comparison_in_python_takes_lists(given, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        api.compare("digits", out=tmp_path, progress=False, **given)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "a,b"], "Invalid value for '--seeds': expected whole numbers separated by commas, got 'a,b'"),
        (["--methods", ""], "Invalid value for '--methods': give at least one name."),
    ],
)
def test_a_wrong_option_is_named(fedet, args, words):
    said = fedet("compare", "small.toml", *args)
    assert said.code == 2
    assert words in said.err


def test_verify_takes_the_folder_as_fetch_does(fedet):
    said = fedet("data", "verify", "cifar10", "--dir", "nowhere")
    assert said.code == 3
    assert "missing in nowhere/cifar10" in said.out


def test_a_method_whose_replies_are_all_refused_says_why(fedet):
    Path("own.py").write_text(
        "from fedet.core import Payload\nfrom fedet.methods.fedavg import FedAvg\n\n"
        "class Short(FedAvg):\n    def local(self, down, client):\n        return Payload({'model': {}})\n",
        encoding="utf-8",
    )
    said = fedet("run", "small.toml", "--method", "own.py:Short")
    assert said.code == 0
    few, first = "0 usable replies of 3, 1 needed", "'model' has missing or unexpected tensors, such as 'adapter.0.bias'"
    why = f"{few}; bad reply, client 1: {first}"
    assert f"round 1 LOST ({why})" in said.err
    assert f"warning: 2 of 2 rounds were lost, and the state did not change in them: {why}" in said.err


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
