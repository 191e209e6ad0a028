"""The campaigns of benchmarks/faults.py and soak.py, shortened: killed runs resume to the same bits and nothing is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def campaign(script, *options):
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, FOLDER / script, *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        cwd=FOLDER,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits():
    said = campaign("faults.py", "--kills", "3", "--methods", "scaffold", "--rounds", "3", "--no-faults")
    assert "3 of 3 kills resumed to the same bits" in said
    assert "left behind: 0 processes, 0 files in shared memory" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["fedet", "scaffold", "dsfl", "fedgkt"])
def test_every_fault_ends_in_the_same_bits_or_in_a_sentence(method):
    said = campaign("faults.py", "--kills", "10", "--methods", method)
    assert "10 of 10 kills resumed to the same bits" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_soak_leaks_nothing():
    said = campaign("soak.py", "--minutes", "3", "--kill-every", "0.5")
    assert "memory and open files are flat" in said
