"""The command line on good and on bad input: what it prints where, its exit codes, and that it leaves other runs alone."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import SMALL, TOML

from fedet import api, cli
from fedet.cli import progress
from fedet.engine import session
from fedet.errors import tracebacks
from fedet.storage import checkpoint, metrics
from fedet.storage.model_folder import load_model

UNWANTED = ("FEDET_DATA", "PYTHONUNBUFFERED")
ENV = {key: value for key, value in os.environ.items() if key not in UNWANTED} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of small.toml; copy it before changing it."""
    return api.run(SMALL, out=tmp_path_factory.mktemp("finished"), name="small", rounds=2).run_dir


def tree(folder):
    """Every file below a folder and what it holds, apart from caches and locks."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name not in (".lock", ".pid"))
    return {str(path): path.read_bytes() for path in files if ".cache" not in path.parts}


def timeless(run_dir):
    """A run's metrics without its times."""
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in metrics.read(Path(run_dir) / "metrics.jsonl")]


# Bad input

BAD = [
    (["--set", "data.alphaa=1"], 2, "data.alphaa is not a known key (did you mean 'alpha'?)"),
    (["--set", "data.augment.flop=true"], 2, "data.augment.flop is not a known key (did you mean 'flip'?)"),
    (["--set", "models.asignment=uniform"], 2, "models.asignment is not a known key (did you mean 'assignment'?)"),
    (["--set", "models.server.widht=2"], 2, "models.server.widht is not a known key (did you mean 'width'?)"),
    (["--set", 'models.clients=[{name="cnn",widht=2.0}]'], 2, "widht is not a known key (did you mean 'width'?)"),
    (["--set", "run.round=3"], 2, "run.round is not a known key (did you mean 'rounds'?)"),
    (["--set", "method.lamb=0.1"], 2, "method.lamb is not a known key (did you mean 'lam'?)"),
    (["--set", "method.client.lrr=1"], 2, "method.client.lrr is not a known key (did you mean 'lr'?)"),
    (["--set", "methods.fedavg.client.lrr=1"], 2, "methods.fedavg.client.lrr is not a known key (did you mean 'lr'?)"),
    (["--set", "methods.fedavgg.client.lr=1"], 2, "no method is called 'fedavgg' (did you mean 'fedavg'?)"),
    (["--set", "dta.alpha=1"], 2, "'dta.alpha' is not a known key (did you mean 'data'?)"),
    (["--set", "out=elsewhere"], 2, "'out' is not a known key"),
    (["--set", "config=x"], 2, "'config' is not a known key"),
    (["--set", ".=3"], 2, "'.' is not a known key"),
    (["--set", "run.rounds=abc"], 2, "run.rounds = 'abc': input should be a valid integer"),
    (["--set", 'run.rounds="5"'], 2, "run.rounds = '5': input should be a valid integer"),
    (["--set", "run.rounds=1.5"], 2, "run.rounds = 1.5: input should be a valid integer"),
    (["--set", "run.rounds=true"], 2, "run.rounds = True: input should be a valid integer"),
    (["--set", "data.augment.flip=1"], 2, "data.augment.flip = 1: input should be a valid boolean"),
    (["--set", "data.alpha=big"], 2, "data.alpha = 'big': input should be a valid number"),
    (["--set", "data.name=7"], 2, "data.name = 7: input should be a valid string"),
    (["--set", "method.client.batch=1.5"], 2, "method.client.batch = 1.5: input should be a valid integer"),
    (["--set", "method.client.lr=true"], 2, "method.client.lr = True: input should be a valid number"),
    (["--set", "method.client=3"], 2, "method.client = 3: it is a table; set its keys instead (method.client.KEY)"),
    (["--set", "data=3"], 2, "data.name = 3: input should be a valid string"),
    (["--set", "data.split=7"], 2, "data.split = 7: it is a list; write it as [7]"),
    (
        ["--set", "data.partition=dirichlett"],
        2,
        "data.partition = 'dirichlett': input should be 'dirichlet', 'equal', 'iid' or 'natural'",
    ),
    (["--set", "data.split=[7,1]"], 2, "data.split has too few entries"),
    (["--set", "run.threads=100000"], 2, "run.threads = 100000: input should be less than or equal to 1024"),
    (["--set", "run.cohort=7"], 2, "run.cohort = 7 is more than data.clients = 6"),
    (["--set", "data.alpha=0"], 2, "data.alpha = 0: input should be greater than 0"),
    (["--set", "data.alpha=-1.0"], 2, "data.alpha = -1.0: input should be greater than 0"),
    (["--set", "data.alpha=nan"], 2, "data.alpha = nan: input should be a finite number"),
    (["--set", "method.client.lr=nan"], 2, "method.client.lr = nan: input should be a finite number"),
    (["--set", "data.public=none"], 2, "method 'fedet' needs public data and there is none: set data.public"),
    (["--set", "data.split=[7,0,3]"], 2, "data.split = [7, 0, 3] leaves none for the server: set it to [7, 1, 3], for example"),
    (["--set", "data.public=digitss"], 2, "no data set is called 'digitss' (did you mean 'digits'?)"),
    (["--set", "data.public=folder:nowhere"], 3, "nowhere"),
    (
        ["--method", "fedgems", "--set", "data.public=digits"],
        2,
        "needs labelled public data and data.public = 'digits'",
    ),
    (["--set", "data.clients=4000", "--set", "run.cohort=3900"], 2, "of 4000 clients have data"),
    (["--set", "models.assignment=given"], 2, "models.assignment needs models.given"),
    (
        ["--set", "models.assignment=given", "--set", 'models.given=["cnn-w0.5"]'],
        2,
        "no client has the architecture 'resnet8-w0.0625'",
    ),
    (
        ["--set", "models.assignment=given", "--set", 'models.given=["cnn-w5"]'],
        2,
        "'cnn-w5', which is not among models.clients (did",
    ),
    (["--set", "models.assignment=capability"], 2, "models.assignment needs models.budgets"),
    (
        ["--set", "models.assignment=capability", "--set", "models.budgets=[9]"],
        2,
        "a budget of 9 parameters fits no architecture",
    ),
    (["--set", "models.assignment=capability", "--set", "models.budgets=[999999999]"], 2, "no client has the architecture"),
    (
        ["--set", 'models.clients=["cnn","cnn"]'],
        2,
        "models: two architectures are named 'cnn': give one of them another label",
    ),
    (["--set", "models.clients=[]"], 2, "models.clients = []"),
    (["--set", "models.server=resnet99"], 2, "no model is called 'resnet99' (did you mean 'resnet8'?)"),
    (["--set", 'models.clients=["cnm"]'], 2, "no model is called 'cnm' (did you mean 'cnn'?)"),
    (["--set", "data.name=digitz"], 2, "no data set is called 'digitz' (did you mean 'digits'?)"),
    (["--set", "data.name=cifar10"], 3, "or get it with `fedet data fetch cifar10 --dir DIR`"),
    (["--set", "data.name=cifar10", "--data-dir", "nowhere"], 3, "get it with `fedet data fetch cifar10 --dir nowhere`"),
    (["--set", "data.name=cifar10", "--data-dir", "~nobody0/x"], 3, "get it with `fedet data fetch cifar10 --dir"),
    (["--method", "fedavgg"], 2, "no method is called 'fedavgg' (did you mean 'fedavg'?); known: "),
    (["--set", "name=../up"], 2, "name = '../up': it becomes part of the run folder's name"),
    (["--set", "run.device=cuda:9"], 2, "run.device = 'cuda:9' is not available"),
    (["--set", "run.patience=2"], 2, "run.patience needs a validation split: set data.val_fraction"),
    (["--set", "rounds"], 2, "--set 'rounds': write it as a.b=value"),
    (["--set", "=3"], 2, "--set '=3': write it as a.b=value"),
    (["--rounds", "-1"], 2, "run.rounds = -1: input should be greater than or equal to 1"),
    (["--rounds", "0"], 2, "run.rounds = 0: input should be greater than or equal to 1"),
    (["--seed", "-1"], 2, "run.seed = -1: input should be greater than or equal to 0"),
    (["--out", "small.toml/x"], 1, "can't create the directory small.toml/x"),
    (["--out", "small.toml"], 1, "can't create the directory small.toml/"),
    (["--out", "/proc/fedet"], 1, "can't create the directory /proc/fedet"),
    (["--method", "nowhere.py:Mine"], 2, "nowhere.py (for a method) does not exist"),
    (["--method", "no_such_module:Mine"], 2, "module 'no_such_module' (for a method) failed on import: ModuleNotFoundError"),
    (["--method", "own.py:Missing"], 2, "has no 'Missing' to use as a method"),
    (["--method", "own.py:garbage"], 2, "is not a subclass of fedet.Method"),
    (["--method", "own.py:"], 2, "is not a valid reference to a method"),
    (["--set", "models.server=own.py:missing"], 2, "has no 'missing' to use as a model"),
    (["--set", "models.server=raises.py:model"], 2, "raises.py (for a model) failed on import: ZeroDivisionError"),
    (["--set", "models.server=leaves.py:model"], 2, "leaves.py (for a model) failed on import: SystemExit"),
    (["--set", "models.server=own.py:broken"], 2, "does not run on a batch of shape (2, 1, 8, 8)"),
    (["--set", "models.server=own.py:garbage"], 2, "it must return a torch.nn.Module"),
    (["--set", "data.name=own.py:garbage"], 3, "it must be a tuple (inputs, labels)"),
    (["--set", "data.name=own.py:unequal"], 3, "3 inputs but 2 labels; one is needed for each input"),
    (["--set", "data.name=own.py:fails"], 3, "failed: ValueError: two lines"),
    (["--set", "data.name=own.py:garbage", "--set", "data.options.x=1"], 2, "has no parameter for data.options.x"),
    (["--set", "data.options.x=1"], 2, "digits takes none"),
]
OWN = """
from torch import nn
def garbage(): return 3
def unequal(): return [[1.0], [2.0], [3.0]], [0, 1]
def fails(): raise ValueError("two\\nlines")
def broken(): return nn.Linear(3, 3)
"""


@pytest.mark.parametrize(("args", "code", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_sentence_and_leaves_no_trace(fedet, finished, args, code, words):
    shutil.copytree(finished, "runs/kept")
    for name, text in (("own.py", OWN), ("raises.py", "1 / 0"), ("leaves.py", "raise SystemExit(0)")):
        Path(name).write_text(text, encoding="utf-8")
    before = tree("runs")
    said = fedet("run", "small.toml", *args)
    assert words in said.sentence(code)
    assert all(line.startswith("  ") for line in said.err.splitlines()[:-1])  # lines of the user's own code
    assert said.out == ""
    assert tree("runs") == before
    assert [path.name for path in Path("runs").iterdir() if path.name != ".cache"] == ["kept"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--nope"], "No such option"),
        (["run", "--rounds", "many"], "'many' is not a valid integer"),
        (["run", "a.toml", "b.toml"], "unexpected extra argument"),
        (["compare", "--seeds", "abc"], "expected whole numbers separated by commas, got 'abc'"),
        (["models", "--classes", "1"], "1 is less than 2"),
        (["models", "--input", "big"], "expected whole numbers separated by commas, got 'big'"),
        (["data", "fetch", "cifar10", "--source", "mirror"], "'mirror' is not one of"),
        (["nothing"], "No such command 'nothing'"),
        (["export"], "Missing argument"),
    ],
)
def test_usage_errors_are_clicks(fedet, args, words):
    said = fedet(*args)
    assert said.code == 2
    assert words in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data\nalpha = 1", "bad.toml is not valid TOML"),
        ("\x00", "bad.toml is not valid TOML"),
        ("base = 'digits'\n[data]\nalfa = 1", "data.alfa is not a known key (did you mean 'alpha'?)"),
        ("base = 'digits'\n[method.client]\nlrr = 1", "method.client.lrr is not a known key (did you mean 'lr'?)"),
        (
            "base = 'digits'\n[methods.fedet.server]\nstep = 1",
            "methods.fedet.server.step is not a known key (did you mean 'steps'?)",
        ),
        ("base = 'digits'\n[modls]\nx = 1", "modls is not a known key (did you mean 'models'?)"),
        ("[modls]\nx = 1", "modls is not a known key (did you mean 'models'?)"),
        ("[data]\nalpha = 1", "models is missing: set it, or build on a preset with base = 'digits'"),
        ("base = 'digits'\nmethod = 'fedavg'", "method must be a table with a name"),
        ("base = 'digits'\nmethods = 3", "methods must hold one table per method"),
        ("base = 'digits'\n[run]\nrounds = '3'", "run.rounds = '3': input should be a valid integer"),
        ("base = 'digitss'", "'digitss' is neither a file nor a preset (did you mean 'digits'?)"),
        ("base = 'bad.toml'", "circular base: "),
        ("base = 3", "base = 3: it must be the name of a preset or of another file"),
    ],
)
def test_bad_files(fedet, text, words):
    Path("bad.toml").write_text(text, encoding="utf-8")
    assert words in fedet("run", "bad.toml").sentence(2)
    assert not Path("runs").exists()


def test_files_that_are_not_there_or_not_text(fedet):
    assert "'nowhere.toml' is neither a file nor a preset" in fedet("run", "nowhere.toml").sentence(2)
    assert "'digts' is neither a file nor a preset (did you mean 'digits'?)" in fedet("config", "show", "digts").sentence(2)
    Path("bad.toml").write_bytes(b"\xff\xfe")
    assert "bad.toml is not a configuration: it is not text in UTF-8" in fedet("run", "bad.toml").sentence(2)


def test_missing_data_say_how_to_get_them(fedet, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDET_DATA", str(tmp_path))
    words = fedet("run", "small.toml", "--set", "data.name=cifar10").sentence(3)
    assert f"get it with `fedet data fetch cifar10 --dir {tmp_path}`" in words
    monkeypatch.delenv("FEDET_DATA")
    other = fedet("data", "fetch", "fashion-mnist", "--dir", "x", "--source", "npm")
    assert "fashion-mnist has no source 'npm'; known: auto, official, debian" in other.sentence(2)
    assert "no data directory: pass --data-dir DIR, or set FEDET_DATA" in fedet("data", "verify", "cifar10").sentence(3)
    assert "known: cifar10, cifar100, fashion-mnist" in fedet("data", "fetch", "mnist", "--dir", "x").sentence(2)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["resume", "empty"], 2, "empty is not a run folder"),
        (["resume", "nowhere"], 2, "nowhere is not a run folder: there is no such folder"),
        (["report", "empty"], 2, "empty is not a run folder"),
        (["export", "empty", "model"], 2, "empty is not a run folder"),
        (["check", "fedavgg"], 2, "no method is called 'fedavgg' (did you mean 'fedavg'?)"),
        (["models", "--input", "3,32"], 2, "image models need inputs of shape (channels, height, width)"),
        (["data", "show", "--figure", "x.doc"], 2, "--figure x.doc: the file name must end in .png, .svg or .pdf"),
        (["compare", "small.toml", "--methods", "fedet,fedavgg"], 2, "no method is called 'fedavgg'"),
        (["compare", "small.toml", "--methods", "fedet,fedet"], 2, "'fedet' is listed twice"),
        (["compare", "small.toml", "--seeds", ""], 2, "give at least one whole number, without duplicates"),
        (["compare", "small.toml", "--seeds", "0,1,0"], 2, "give at least one whole number, without duplicates"),
        (["compare", "small.toml", "--seeds", "0,-1"], 2, "give at least one whole number, without duplicates"),
        (["compare", "small.toml", "--set", "seeds=1"], 2, "'seeds' is not a known key"),
        (
            ["compare", "small.toml", "--methods", "fedavg,fedet", "--set", "data.public=none"],
            2,
            "method 'fedet' needs public data",
        ),
    ],
)
def test_other_commands_on_bad_input(fedet, args, code, words):
    Path("empty").mkdir()
    assert words in fedet(*args).sentence(code)
    assert not tree("runs")
    assert not tree("empty")


def test_damaged_runs_are_told_and_left_as_they_are(fedet, finished):
    checkpoint = Path("copy/last/checkpoint.safetensors")
    for damage, words in (
        (lambda: checkpoint.write_bytes(checkpoint.read_bytes()[:-9]), "is damaged"),
        (lambda: checkpoint.write_bytes(b"not a checkpoint"), "is damaged"),
        (lambda: shutil.copy("copy/best/model.safetensors", checkpoint), "is not a checkpoint of this version of fedet"),
        (
            lambda: Path("copy/config.toml").write_text(TOML.replace("alpha = 1.0", "alpha = 1.5")),
            "belong to different configurations",
        ),
        (lambda: Path("copy/metrics.jsonl").write_text("nonsense\n{}\n"), "line 1, is damaged"),
    ):
        shutil.copytree(finished, "copy")
        Path("copy/last/previous-checkpoint.safetensors").unlink()  # with it, the run would go on from there
        damage()
        before = tree("copy")
        assert words in fedet("resume", "copy", "--rounds", "9").sentence(1)
        assert tree("copy") == before
        shutil.rmtree("copy")


def test_a_run_can_not_be_made_shorter(fedet, finished):
    shutil.copytree(finished, "copy")
    before = tree("copy")
    assert "has finished 2 rounds already" in fedet("resume", "copy", "--rounds", "1").sentence(2)
    assert "greater than or equal to 1" in fedet("resume", "copy", "--rounds", "0").sentence(2)
    assert tree("copy") == before
    assert fedet("resume", "copy", "--rounds", "3", "--json", "-q").json["rounds"] == 3


def test_divergence_names_client_and_round_and_keeps_the_last_good_checkpoint(fedet):
    Path("late.py").write_text(
        "from dataclasses import dataclass\nfrom fedet.methods.fedavg import FedAvg\n\n@dataclass(frozen=True)\n"
        "class Late(FedAvg):\n    name = 'late'\n    def round(self, state, r, env):\n"
        "        bad = {k: t * (float('nan') if r.number == 3 else 1) for k, t in state.items()}\n"
        "        return FedAvg.round(self, bad, r, env)\n",
        encoding="utf-8",
    )
    words = fedet("run", "small.toml", "--rounds", "5", "--method", "late.py:Late").sentence(4)
    assert "round 3: client " in words
    assert "sent non-finite values" in words
    (run_dir,) = Path("runs").glob("small-Late-*")
    assert checkpoint.load(run_dir / "last" / "checkpoint.safetensors")[0]["round"] == 2
    assert [entry["round"] for entry in timeless(run_dir)] == [1, 2]
    assert fedet("export", run_dir, "model", "--which", "last", "--trust-code").code == 0
    assert load_model("model")
    assert "round 3: client " in fedet("resume", run_dir).sentence(4)


def test_a_bug_is_one_line_too_and_shown_in_full_on_request(fedet, monkeypatch):
    def bug(*args, **kwargs):
        raise RuntimeError("first\n  second")

    monkeypatch.setattr(session, "run_config", bug)
    monkeypatch.setattr(tracebacks, "_is_own", lambda file: False)
    said = fedet("run")
    sentence = "fedet: RuntimeError: first second (unexpected; FEDET_DEBUG=1 shows the traceback)\n"
    assert (said.code, said.err) == (1, sentence)
    monkeypatch.setenv("FEDET_DEBUG", "1")
    said = fedet("run")
    assert said.code == 1
    assert said.err.startswith("Traceback")
    assert ", in bug" in said.err
    assert said.err.endswith("\nfedet: RuntimeError: first second\n")


# Other processes and disks


def python(*args, **kwargs):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=ENV, timeout=60, check=False, **kwargs)


def test_a_run_in_use_is_refused_and_stops_by_sigterm(fedet):
    command = [sys.executable, "-m", "fedet", "run", "small.toml", "--rounds", "5000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENV) as other:
        try:
            assert any(line.startswith("round 1 ") for line in other.stderr)
            (run_dir,) = Path("runs").glob("small-*")
            for args in (["resume", run_dir], ["run", "small.toml", "--rounds", "5000"]):
                assert f"{run_dir} is in use by another process (pid {other.pid})" in fedet(*args).sentence(1)
            assert list(Path("runs").glob("small-*")) == [run_dir]
            assert fedet("report", run_dir).code == 0  # reading is always allowed
            assert fedet("export", run_dir, "model", "--which", "last").code == 0
            other.terminate()
            text = other.stderr.read()
        finally:
            other.kill()
    assert other.returncode == 130
    assert f"resume with: fedet resume {run_dir}" in text
    done = checkpoint.load(run_dir / "last" / "checkpoint.safetensors")[0]["round"]
    assert fedet("resume", run_dir, "--rounds", done + 1, "--json").json["rounds"] == done + 1


@pytest.fixture
def disk(tmp_path):
    """A disk of its own that can be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    gc.collect()  # what a failed run mapped from there goes with its traceback
    subprocess.run(["umount", place], check=True)


def fill(path):
    """Write until there is no room left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(fedet, disk):
    run_dir = fedet("run", "small.toml", "--out", disk / "runs", "--rounds", "1", "--json").json["run_dir"]
    good = (Path(run_dir) / "last" / "checkpoint.safetensors").read_bytes()
    ballast = disk / "ballast"
    fill(ballast)
    for args in (["resume", run_dir, "--rounds", "3"], ["run", "small.toml", "--out", disk / "more"]):
        assert "No space left on device" in fedet(*args).sentence(1)
    assert (Path(run_dir) / "last" / "checkpoint.safetensors").read_bytes() == good
    os.truncate(ballast, ballast.stat().st_size - (64 << 10))  # room for some lines, not for a checkpoint
    assert "No space left on device" in fedet("resume", run_dir, "--rounds", "3").sentence(1)
    assert (Path(run_dir) / "last" / "checkpoint.safetensors").read_bytes() == good
    ballast.unlink()
    assert fedet("resume", run_dir, "--rounds", "3", "--json").json["rounds"] == 3
    assert timeless(run_dir) == timeless(fedet("run", "small.toml", "--rounds", "3", "--json").json["run_dir"])


def test_a_closed_or_full_output_is_no_crash():
    with open("/dev/full", "w", encoding="utf-8") as full:
        said = subprocess.run(
            [sys.executable, "-m", "fedet", "config", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENV,
            check=False,
        )
    assert (said.returncode, said.stderr) == (1, "fedet: can't write to standard output: No space left on device\n")


def test_help_is_quick_and_does_without_torch():
    said = python("-X", "importtime", "-m", "fedet", "--help")
    assert said.returncode == 0
    assert "Usage" in said.stdout
    modules = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert "fedet.cli" in modules
    assert not modules & {"torch", "numpy", "pydantic", "matplotlib", "sklearn"}
    code = "import runpy, sys, time; sys.argv = ['fedet', '--help']\ntry: runpy.run_module('fedet', run_name='__main__')\n"
    code += "finally: print(time.process_time(), file=sys.stderr)"
    assert float(python("-c", code).stderr) < 0.8  # seconds of processor time, whatever else the machine does


@pytest.mark.parametrize(
    "name", [None, *(command.callback.__name__ for command in cli.app.registered_commands), "data", "config"]
)
def test_every_command_has_help(fedet, name):
    said = fedet(*([name] if name else []), "--help")
    assert said.code == 0
    assert "Usage: " in said.out


# Output


def test_json_is_one_object_and_progress_one_line_a_round(fedet):
    said = fedet("run", "small.toml", "--rounds", "3", "--seed", "2", "--json")
    summary = said.json
    for key in ("accuracy", "best_accuracy", "best_round", "params_up", "params_down", "bytes_up", "bytes_down", "seconds"):
        assert summary[key] > 0
    assert (summary["method"], summary["data"], summary["seed"], summary["rounds"]) == ("fedet", "digits", 2, 3)
    assert Path(summary["run_dir"]).is_dir()
    first, *rounds = said.err.splitlines()
    assert summary["run_dir"] in first
    assert [line.split("  ")[0] for line in rounds] == ["round 1", "round 2", "round 3"]
    assert "\x1b" not in said.err
    assert json.loads((Path(summary["run_dir"]) / "result.json").read_text()) == summary
    again = fedet("resume", summary["run_dir"], "--json", "--quiet")
    assert again.json == summary | {"seconds": again.json["seconds"]}
    assert again.err == ""


def test_quiet_is_quiet_and_the_tables_are_on_standard_output(fedet):
    said = fedet("run", "small.toml", "--quiet")
    assert (said.code, said.err) == (0, "")
    for words in ("server (cnn-w1.5)", "resnet8-w0.0625", "consensus", "2 rounds", "report.html", "best"):
        assert words in said.out
    assert fedet("run", "small.toml", "--quiet", "--json").err == ""


def test_the_quiet_process_prints_nothing_but_json(tmp_path):
    (tmp_path / "small.toml").write_text(TOML, encoding="utf-8")
    said = python("-m", "fedet", "run", "small.toml", "--rounds", "1", "--json", "--quiet", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert json.loads(said.stdout)["rounds"] == 1


@pytest.mark.parametrize("args", [["--set", "rounds=1"], ["--set", "run.rounds=1"], ["--set", "run.rounds=9", "--rounds", "1"]])
def test_short_names_work_in_set_and_options_win(fedet, args):
    assert fedet("run", "small.toml", *args, "--json", "-q").json["rounds"] == 1


def test_method_by_set_and_by_option(fedet):
    for args in (["--set", "method=fedavg"], ["--method", "fedavg"], ["--set", "method.name=fedavg"]):
        assert 'name = "fedavg"' in fedet("config", "show", "small.toml", *args).out


def test_what_config_show_prints_is_the_same_run(fedet):
    asked = ("small.toml", "--method", "fedavg", "--seed", "3", "--set", "data.alpha=0.4", "--rounds", "1")
    Path("again.toml").write_text(fedet("config", "show", *asked).out, encoding="utf-8")
    assert fedet("config", "show", "again.toml").out == Path("again.toml").read_text(encoding="utf-8")
    first = Path(fedet("run", *asked, "--json", "--out", "a").json["run_dir"])
    again = Path(fedet("run", "again.toml", "--json", "--out", "b").json["run_dir"])
    assert first.name == again.name
    assert timeless(first) == timeless(again)
    assert "digits" in fedet("config", "list").out.split()


# Comparisons


def test_compare_runs_on_equal_ground_and_takes_what_is_finished(fedet, monkeypatch):
    command = ("compare", "small.toml", "--methods", "fedet,fedavg", "--seeds", "0,1", "--jobs", "1")
    first = fedet(*command, "--json").json
    assert [(row["label"], row["n"]) for row in first["rows"]] == [("fedet", 2), ("fedavg", 2)]
    folder = Path(first["report"]).parent
    for seed in (0, 1):
        ours, theirs = (timeless(folder / f"{name}-s{seed}") for name in ("fedet", "fedavg"))
        assert [entry["cohort"] for entry in ours] == [entry["cohort"] for entry in theirs]
        assert (folder / f"fedet-s{seed}/split.npz").read_bytes() == (folder / f"fedavg-s{seed}/split.npz").read_bytes()
    assert timeless(folder / "fedet-s0") != timeless(folder / "fedet-s1")
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*-s?/**/*") if path.is_file()}
    said = fedet(*command)
    assert "round 1" not in said.err
    assert "fedavg" in said.out
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert fedet(*command, "--json").json == first
    assert Path(fedet("report", folder).out.strip()) == folder / "report.html"
    (folder / "comparison.json").write_text("{}", encoding="utf-8")
    assert "comparison.json is damaged" in fedet("report", folder).sentence(1)


def test_an_interrupted_comparison_goes_on(fedet, monkeypatch):
    whole = fedet("compare", "small.toml", "--methods", "fedet,fedavg", "--jobs", "1", "--out", "a", "--json").json
    lines, real = [], progress._line

    def stop_at_the_third(entry):
        lines.append(entry)
        if len(lines) == 3:  # the first round of the second method
            raise KeyboardInterrupt
        return real(entry)

    monkeypatch.setattr(progress, "_line", stop_at_the_third)
    words = fedet("compare", "small.toml", "--methods", "fedet,fedavg", "--jobs", "1", "--out", "b").sentence(130)
    assert "stopped after round 1" in words
    assert "with the same command" in words
    monkeypatch.setattr(progress, "_line", real)
    said = fedet("compare", "small.toml", "--methods", "fedet,fedavg", "--jobs", "1", "--out", "b", "--json")
    assert "from round 2" in said.err
    assert said.err.count("round 1 ") == 0
    for ours, theirs in zip(whole["runs"], said.json["runs"], strict=True):
        assert timeless(ours["run_dir"]) == timeless(theirs["run_dir"])


def test_a_comparison_cut_off_before_a_run_began_uses_the_same_folder(fedet):
    first = fedet("compare", "small.toml", "--rounds", "1", "--json").json
    (run_dir,) = (Path(run["run_dir"]) for run in first["runs"])
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    assert fedet("compare", "small.toml", "--rounds", "1", "--json").json["runs"][0]["run_dir"] == str(run_dir)


def test_equal_traffic_stops_the_second_where_the_first_was(fedet):
    said = fedet("compare", "small.toml", "--methods", "fedet,fedavg", "--rounds", "4", "--equal-traffic", "--json").json
    ours, theirs = said["runs"]
    spent = ours["params_up"] + ours["params_down"]
    sums = [entry["params_total"] for entry in timeless(theirs["run_dir"])]
    assert (ours["stopped"], theirs["stopped"]) == ("rounds", "budget_params")
    assert sums[-1] >= spent > (sums[-2] if len(sums) > 1 else 0)
    assert len(sums) < 4


def test_compare_configurations(fedet):
    Path("other.toml").write_text("base = 'small.toml'\n[data]\nalpha = 0.5\n", encoding="utf-8")
    said = fedet("compare", "small.toml", "other.toml", "--rounds", "1", "--jobs", "1", "--json").json
    assert [Path(run["run_dir"]).name for run in said["runs"]] == ["small-s0", "other-s0"]
    assert len(said["rows"]) == 2


# The other commands


def test_report_of_a_finished_and_an_unfinished_run(fedet, finished):
    shutil.copytree(finished, "copy")
    for name in ("report.html", "result.json"):
        Path("copy", name).unlink()
    assert fedet("report", "copy").out.strip() == "copy/report.html"
    assert "<html" in Path("copy/report.html").read_text(encoding="utf-8")


def test_methods_and_models_are_listed(fedet):
    said = fedet("models")
    assert all(count in said.out for count in ("431,548", "5,224,842", "11,493,642", "20,879,306"))
    rows = fedet("models", "--json", "--classes", "100").json
    assert {row["name"]: row["params"] for row in rows}["cnn"] == 443_158
    names = [row["method"] for row in fedet("methods", "--json").json]
    assert {"fedavg", "fedet", "central", "public-labels", "local"} <= set(names)
    assert all(name in fedet("methods").out for name in names)


def test_data_list_and_show(fedet):
    assert "cifar100" in fedet("data", "list").out
    assert [row["name"] for row in fedet("data", "list", "--json").json][:2] == ["digits", "cifar10"]
    said = fedet("data", "show", "small.toml", "--seed", "3")
    assert said.out.strip() == "runs/digits-dirichlet-s3.png"
    assert Path(said.out.strip()).read_bytes().startswith(b"\x89PNG")
    assert "6 clients, 1258 examples" in said.err
    assert fedet("data", "show", "small.toml", "--figure", "new/who.svg").out == "new/who.svg\n"
    assert "<svg" in Path("new/who.svg").read_text(encoding="utf-8")
    assert "can't write small.toml/x.png" in fedet("data", "show", "small.toml", "--figure", "small.toml/x.png").sentence(1)


def test_doctor(fedet):
    said = fedet("doctor")
    assert said.code == 0
    assert all(word in said.out for word in ("torch", "python", "free disk", "cifar10"))


@pytest.mark.slow
def test_check_passes_ours_and_fails_a_bad_one(fedet):
    said = fedet("check", "fedavg")
    assert said.code == 0
    assert "determinism" in said.out
    Path("bad.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom fedet.methods.fedavg import FedAvg\n\n@dataclass(frozen=True)\n"
        "class Moody(FedAvg):\n    def round(self, state, r, env):\n"
        "        return {k: t + torch.rand(()) / 999 for k, t in FedAvg.round(self, state, r, env).items()}\n",
        encoding="utf-8",
    )
    said = fedet("check", "bad.py:Moody")
    assert said.code == 1
    assert "two runs with the same seed differ" in said.out


# Someone's own model and data

MODEL = """\
from torch import nn

def tiny(input_shape, hidden=12):
    return nn.Sequential(nn.Linear(input_shape[0], hidden), nn.ReLU())
"""
DATA = """\
import numpy as np

def blobs(n=300):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, n)
    return rng.normal(labels[:, None], 0.3, (n, 4)).astype("float32"), labels
"""
CONFIG = """\
data = { name = "data.py:blobs", clients = 5 }
method = { name = "fedet", client = { steps = 2 }, server = { steps = 2 } }
run = { rounds = 2, cohort = 3, threads = 1 }
[models]
clients = ["model.py:tiny", { name = "model.py:tiny", label = "wider", options = { hidden = 20 } }]
server = { name = "model.py:tiny", label = "large", options = { hidden = 64 } }
assignment = "balanced"
feature_width = 16
representation_width = 8
"""


def test_own_model_and_data_run_anywhere_and_resume_elsewhere(fedet, monkeypatch, tmp_path):
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("own.toml", CONFIG)):
        assert name == "own.toml" or text.count("\n") <= 10
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text(text, encoding="utf-8")
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    summary = fedet("run", "../mine/own.toml", "--json").json
    assert summary["arch_params"].keys() == {"tiny", "wider", "large"}
    run_dir = tmp_path / "one" / summary["run_dir"]
    monkeypatch.chdir(tmp_path / "two")
    assert fedet("resume", run_dir, "--rounds", "4", "--json").json["rounds"] == 4
    assert fedet("export", run_dir, "model", "--trust-code").code == 0
    assert load_model("model", trust_code=True).spec["options"] == {"hidden": 64}
    said = fedet("data", "show", tmp_path / "mine" / "own.toml")
    assert said.out.strip() == "runs/blobs-dirichlet-s0.png"
    # By hand, paths count from where one is
    monkeypatch.chdir(tmp_path / "mine")
    asked = ("--set", "data.name=data.py:blobs", "--set", 'models.clients=["model.py:tiny"]', "--method", "fedavg")
    asked += ("--set", 'models.server={name="model.py:tiny",label="big",width=1.0}', "--set", "data.augment.crop=0")
    run_dir = fedet("run", tmp_path / "small.toml", *asked, "--rounds", "1", "--json").json["run_dir"]
    monkeypatch.chdir(tmp_path)
    assert fedet("resume", tmp_path / "mine" / run_dir, "--rounds", "2", "--json").json["rounds"] == 2


def test_an_own_method_from_a_file_resumes_elsewhere(fedet, monkeypatch, tmp_path):
    Path("mine.py").write_text("from fedet.methods.fedavg import FedAvg as Mine\n", encoding="utf-8")
    run_dir = fedet("run", "small.toml", "--method", "mine.py:Mine", "--rounds", "1", "--json").json["run_dir"]
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "two")
    assert fedet("resume", tmp_path / run_dir, "--rounds", "2", "--json").json["rounds"] == 2
