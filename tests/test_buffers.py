"""Tensors between processes: nobody dies for want of shared memory, and nothing stays behind."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from fedet import check
from fedet.errors import FedetError
from fedet.workers import buffers
from fedet.workers.buffers import SharedBuffer

SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import fedet
settings = json.loads(sys.argv[2])
result = fedet.run(settings["config"], out=sys.argv[1], **settings["changes"])
print("\\nDONE", json.dumps([hashlib.sha256((Path(result.run_dir) / "best" / "model.safetensors").read_bytes()).hexdigest(),
                           sorted(str(p) for p in Path("/dev/shm").glob("fedet-*"))]))
"""
IN_SMALL_MEMORY = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'


def run(out, workers, env=(), prefix=()):
    """A run with models of a megabyte, in a process of its own: its weights' digest, and what it left in /dev/shm."""
    quick = {"method.client.steps": 2, "method.client.batch": 8, "method.server.steps": 2, "method.server.batch": 8}
    changes = {"method": "fedet", "rounds": 2, "run.workers": workers, "models.feature_width": 2048, **quick}
    settings = {"config": check.SMALL, "changes": changes}
    (out / "tmp").mkdir(parents=True)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT, str(out), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(out / "tmp"), **dict(env)},
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    digest, left = json.loads(done.stdout.partition("DONE")[2])
    assert not list((out / "tmp").iterdir())
    return digest, left


@pytest.fixture
def small_memory(tmp_path, monkeypatch):
    """256 KB of shared memory."""
    place = tmp_path / "memory"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    monkeypatch.setattr(buffers, "SHARED_MEMORY", place)
    yield place
    gc.collect()  # tensors that view a file there
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(buffers.tempfile, "tempdir", str(place))
    return place


@pytest.mark.slow
def test_a_pool_with_little_shared_memory_gives_the_same_bits_and_leaves_nothing(tmp_path):
    small = ["unshare", "--mount", "sh", "-c", IN_SMALL_MEMORY, "sh"]
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a /dev/shm of its own needs root")
    plenty, little = run(tmp_path / "plenty", workers=2), run(tmp_path / "little", workers=2, prefix=small)
    assert plenty[0] == little[0]
    assert little[1] == []


def test_a_buffer_that_does_not_fit_moves_and_its_reader_follows(small_memory, temporary):
    folder = buffers.create_folder()
    here, there = SharedBuffer(folder / "m"), SharedBuffer(folder / "m")
    seen = []
    for count in (1000, 100_000, 300_000, 10):
        sent = {"x": {"w": torch.randn(count)}}
        seen.append((sent, there.read(here.write(sent), copy=False)))
        assert check.same(seen[-1][1], sent)
    assert len(list(temporary.iterdir())) == 1
    tensor = here.allocate((500_000,)).fill_(3.0)
    assert check.same(there.read(here.write({"x": {"w": tensor}})), {"x": {"w": torch.full((500_000,), 3.0)}})
    buffers.remove_folder(folder)
    assert not list(temporary.iterdir())
    assert not list(small_memory.iterdir())


def test_no_space_anywhere_is_told_in_a_sentence(small_memory, monkeypatch):
    monkeypatch.setattr(buffers.tempfile, "tempdir", str(small_memory))
    folder = buffers.create_folder()
    buffer = SharedBuffer(folder / "m")
    with pytest.raises(FedetError, match="set TMPDIR to a folder on a larger disk"):
        buffer.write({"x": {"w": torch.zeros(1_000_000)}})
    assert not [path for path in small_memory.iterdir() if path.is_file()]
    buffers.remove_folder(folder)


def test_shared_memory_that_cannot_be_used_is_not(tmp_path, monkeypatch, temporary):
    monkeypatch.setattr(buffers, "SHARED_MEMORY", tmp_path / "nowhere")
    assert buffers.create_folder().parent == temporary
    assert buffers.describe_location() == f"not available: workers use {temporary}"


def test_the_location_is_described(small_memory, temporary):
    assert buffers.describe_location() == f"0 MB free in {small_memory}; workers use {temporary} for what does not fit"


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(buffers, "SHARED_MEMORY", tmp_path)
    mine = buffers.create_folder()
    abandoned, foreign, new = (tmp_path / name for name in ("fedet-old", "fedet-foreign", ".fedet-new"))
    for folder in (abandoned, foreign, new):
        folder.mkdir()
    for folder in (abandoned, new):
        (folder / buffers.LOCK).touch()
    other = buffers.create_folder()
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, other.name, foreign.name, new.name}
    for folder in (mine, other):
        buffers.remove_folder(folder)
        assert not folder.exists()
