"""Code from references: what is the user's own runs, what stands in a folder from somebody else runs only if trusted."""

import shutil
import sys
from pathlib import Path

import pytest

from fedet import api, check, config
from fedet.cli import program
from fedet.config import plugins
from fedet.errors import ConfigError

CODE = """
from pathlib import Path
from torch import nn
from fedet.methods.fedavg import FedAvg as Mine
Path(__file__).with_name("was-run").touch()
def body(input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], 8))
"""


@pytest.fixture
def code(tmp_path):
    """A file with somebody's code, which leaves a trace when it is run."""
    path = tmp_path / "theirs" / "code.py"
    path.parent.mkdir()
    path.write_text(CODE, encoding="utf-8")
    return path


def was_run(code):
    return code.with_name("was-run").exists()


def fedet(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["fedet", *map(str, args)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        program.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("reference", ["os:system", "{code}:Mine", "theirs.code:Mine"])
def test_references_are_refused_before_anything_is_imported(code, reference, monkeypatch):
    monkeypatch.syspath_prepend(code.parent.parent)
    with (
        plugins.code_from("a/folder", trust=False),
        pytest.raises(ConfigError, match=r"a/folder asks to run the code in .* pass --trust-code .*trust_code=True"),
    ):
        plugins.resolve(reference.format(code=code), "method")
    assert not was_run(code)


def test_trust_is_given_for_a_block_and_can_be_nested(code):
    reference = f"{code}:Mine"
    with plugins.code_from("outer", trust=False):
        with plugins.code_from("inner", trust=True):
            mine = plugins.resolve(reference, "method")
        with pytest.raises(ConfigError, match="outer"):
            plugins.resolve(reference, "method")
    assert plugins.resolve(reference, "method") is mine
    assert was_run(code)


def test_a_configuration_read_from_a_strangers_folder_runs_no_code(code):
    for key, value in (("method.name", f"{code}:Mine"), ("methods", {"os:system": {}})):
        with plugins.code_from("folder", trust=False), pytest.raises(ConfigError, match="folder asks to run"):
            config.load(check.SMALL, {key: value})
    assert not was_run(code)


@pytest.fixture
def stranger(code, tmp_path):
    """The folder of a run that somebody else made with a method and models of their own."""
    changes = {"method": f"{code}:Mine", "rounds": 1, "models": {"server": {"name": f"{code}:body", "label": "large"}}}
    made = api.run(check.SMALL, out=tmp_path / "made", **changes).run_dir
    shutil.move(made, tmp_path / "run")
    code.with_name("was-run").unlink()
    for name in [name for name in sys.modules if name.startswith("fedet_plugin_code_")]:
        del sys.modules[name]
    return tmp_path / "run"


@pytest.mark.parametrize("which", ["best", "last"])
def test_export_of_a_strangers_run_needs_trust(stranger, code, which, monkeypatch, capsys):
    args = ("export", stranger, stranger.with_name("model"), "--which", which)
    status, message = fedet(monkeypatch, capsys, *args)
    assert status == 2
    assert "if you trust its author, pass --trust-code" in message
    assert not was_run(code)
    assert not stranger.with_name("model").exists()
    assert fedet(monkeypatch, capsys, *args, "--trust-code") == (0, "")
    assert was_run(code)
    assert (stranger.with_name("model") / "model.safetensors").is_file()


def test_a_report_runs_no_code(stranger, code, monkeypatch, capsys):
    (stranger / "report.html").unlink()
    assert fedet(monkeypatch, capsys, "report", stranger) == (0, "")
    assert (stranger / "report.html").is_file()
    assert not was_run(code)


def test_the_users_own_code_needs_no_flag(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(config.load(check.SMALL, {"run.rounds": 1}).to_toml(), encoding="utf-8")
    assert fedet(monkeypatch, capsys, "run", "own.toml", "--method", "theirs/code.py:Mine", "-q") == (0, "")
    assert was_run(code)
    (run_dir,) = Path("runs").glob("*-Mine-*")
    assert fedet(monkeypatch, capsys, "resume", run_dir, "--rounds", "2", "-q") == (0, "")
