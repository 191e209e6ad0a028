"""The benchmarks keep up with the package: every one can be imported and says how it is used."""

import subprocess
import sys
from pathlib import Path

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
