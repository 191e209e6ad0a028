"""The benchmarks keep up with the package: every one can be imported and says how it is used."""

import importlib
import platform
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
LIBRARIES = {"bare", "blaze", "common", "drive", "plain"}
HELP = """
import contextlib, importlib, io, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv = [name, "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(name).main()
    assert "--json" in said.getvalue() or "--data-dir" in said.getvalue(), name
"""


def test_every_benchmark_starts():
    scripts = sorted({path.stem for path in FOLDER.glob("*.py")} - LIBRARIES)
    assert scripts
    done = subprocess.run(
        [sys.executable, "-c", HELP, FOLDER, *scripts], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("peers")
    for name in ("peers", *LIBRARIES):
        sys.modules.pop(name, None)


def given(**options):
    return Namespace(**{"python": sys.executable, "pfllib": None, "blazefl": None, "blazefl_python": None} | options)


def test_a_peer_that_can_not_run_says_what_it_needs(peers, monkeypatch):
    assert peers.reason("blazefl", given()) == "give a checkout with --blazefl"
    assert peers.reason("pfllib", given(pfllib="here")) is None
    monkeypatch.setitem(peers.NEEDS, "blazefl", ["torch", "no_such_package"])
    why = peers.reason("blazefl", given(blazefl="here", python="no-such-python", blazefl_python=sys.executable))
    assert why == f"needs torch and no_such_package under {Path(sys.executable).name}"


def test_only_blazefl_has_an_interpreter_of_its_own(peers):
    args = given(python="other", blazefl_python="free")
    assert [peers.interpreter(name, args) for name in ("fedet", "flower", "blazefl")] == [sys.executable, "other", "free"]
    assert peers.interpreter("blazefl", given(python="other")) == "other"


def test_the_versions_of_an_interpreter(peers):
    assert peers.versions(sys.executable).startswith(f"Python {platform.python_version()}")
    assert peers.versions(sys.executable).endswith(f"torch {torch.__version__}")
