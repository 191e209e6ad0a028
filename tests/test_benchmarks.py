"""The benchmarks keep up with the package: every one can be imported and says how it is used."""

import importlib
import json
import platform
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fedet.errors import ConfigError
from fedet.study import docs, measurements

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


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("common")
    sys.modules.pop("common", None)


def test_a_measurement_has_its_command_without_paths_and_its_tables(common, monkeypatch, tmp_path, capsys):
    words = ["/a/b/round.py", "--data-dir", str(tmp_path), "--json", "x.json", f"--out={tmp_path}", "--rounds", "3", "--json=y"]
    monkeypatch.setattr(sys, "argv", words)
    common.table(("what", "s"), [("round", 1.5), ("start", 2)])
    common.write(tmp_path / "found.json", {"hardware": {"processor": "P", "cores": 2}, "own": 1})
    found = measurements.read(tmp_path / "found.json")
    assert found.command == "python benchmarks/round.py --data-dir DIR --out=DIR --rounds 3"
    assert measurements.tables(found) == "| what | s |\n| --- | --- |\n| round | 1.5 |\n| start | 2 |"
    assert measurements.tables(found, only=1) == measurements.tables(found)
    assert measurements.tables(found, only=2) == "Not run yet."
    assert measurements.source(found).startswith(
        "- `python benchmarks/round.py --data-dir DIR --out=DIR --rounds 3`.\n- P, 2 cores,"
    )
    assert "round  1.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"), [(None, "there is no measurement"), ("{", "can't read"), ("{}", "command"), ("[1]", "found.json")]
)
def test_a_measurement_that_is_none_gets_a_sentence(tmp_path, text, words):
    if text is not None:
        (tmp_path / "found.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        measurements.read(tmp_path / "found.json")


def test_measurements_in_documents(tmp_path):
    (tmp_path / measurements.FOLDER).mkdir(parents=True)
    content = {"command": "c", "tables": [{"head": ["a"], "rows": [["1"]]}], "hardware": {}}
    (tmp_path / measurements.FOLDER / "some.json").write_text(json.dumps(content), encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text("<!-- results: measurements/some -->\n<!-- end -->\n", encoding="utf-8")
    documents = docs.Documents(tmp_path, tmp_path / "records")
    documents.write()
    assert "| 1 |" in page.read_text(encoding="utf-8")
    page.write_text("<!-- results: measurements/some curves -->\n<!-- end -->\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="a measurement has no view 'curves'"):
        documents.differing()
