"""Build the source distribution and the wheel into a folder, byte for byte the same for the same files.

python .ci/dist.py DIST [SOURCE]

Times are SOURCE_DATE_EPOCH, by default that of the last commit. Nothing is downloaded: setuptools is the installed one.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "results", "__pycache__", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def main(out: Path, source: Path = ROOT) -> None:
    """Build from a copy, in which nothing is left of an earlier build."""
    out.mkdir(parents=True, exist_ok=True)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or last_commit(source)
    with tempfile.TemporaryDirectory() as work:
        copy = shutil.copytree(source, Path(work, "source"), ignore=LEFT_OUT)
        shutil.copyfile(source / ".importlinter", copy / ".importlinter")
        built = Path(work, "built")
        built.mkdir()
        env = os.environ | {"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"}
        for step in ("build_sdist", "build_wheel"):  # each in a new process: setuptools keeps state
            command = [sys.executable, "-c", BUILD, step, str(built)]
            subprocess.run(command, cwd=copy, env=env, check=True, stdout=subprocess.DEVNULL)
        for made in sorted(built.iterdir()):
            content = made.read_bytes()
            (out / made.name).write_bytes(normalised(content, int(epoch)) if made.name.endswith(".tar.gz") else content)
            print(out / made.name)


def last_commit(source: Path) -> str:
    """The time of the last commit."""
    command = ["git", "-C", str(source), "log", "-1", "--format=%ct"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def normalised(archive: bytes, epoch: int) -> bytes:
    """A .tar.gz with the same files, sorted, without the times, owners and permissions of this machine."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as old, tarfile.open(fileobj=tar, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(tar.getvalue(), mtime=epoch)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
