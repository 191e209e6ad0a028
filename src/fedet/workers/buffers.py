"""Tensors between processes of one machine: a memory-mapped file, written on one side and read on the other; no pickle.

Files lie in `/dev/shm`, that is in memory, where there is such a folder. Its size is limited (64 MB by default in a container),
and writing to a mapped page for which there is no space kills the process (SIGBUS). So space is reserved before it is used,
and a buffer that does not fit moves to the temporary folder; a symbolic link at its old path tells the reader.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor

from fedet.core import Weights
from fedet.errors import FedetError
from fedet.runtime import keep_freed_memory, portable

Header = dict[str, dict[str, list[Any]]]
"""For each group and name: type, shape and offset in the file."""
ALIGN = 64
GROWTH = 1 << 16
"""A file's size is a multiple of this, so that tensors that grow a little need no larger file."""
SHARED_MEMORY = Path("/dev/shm")
LOCK = ".lock"
ABANDONED = 60.0
"""Seconds after which a hidden folder that nobody has locked may be removed."""
HIDDEN = ".fedet-"
"""What the name of a folder starts with that may not be locked yet."""
_in_use: dict[Path, filelock.FileLock] = {}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SharedBuffer:
    """One direction between two processes. A message stays until the next one is written."""

    def __init__(self, path: Path) -> None:
        keep_freed_memory()  # copies of models come and go with every message
        self.path = path
        path.touch()
        self._map: mmap.mmap | None = None
        self._mapped: tuple[int, int, int] | None = None

    def write(self, groups: Mapping[str, Weights]) -> Header:
        """Put these tensors into the file and return where they are."""
        header: Header = {}
        offset = 0
        for group, tensors in groups.items():
            header[group] = {}
            for name, tensor in tensors.items():
                header[group][name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
                offset += -(-tensor.nbytes // ALIGN) * ALIGN
        self._reserve(offset)
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                if tensor.numel() and (into := self._view(*header[group][name])).data_ptr() != tensor.data_ptr():
                    into.copy_(tensor)
        return header

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """A float tensor inside the buffer: filled, then written as the only one, it needs no copy."""
        self._reserve(4 * torch.Size(shape).numel())
        return self._view("float32", list(shape), 0)

    def read(self, header: Header, copy: bool = True) -> dict[str, Weights]:
        """The tensors that the other side wrote: copies, or views of the buffer, which are valid until the next message."""
        self._remap()
        views = {group: {name: self._view(*entry) for name, entry in tensors.items()} for group, tensors in header.items()}
        if not copy:
            return views
        return {group: {name: view.clone() for name, view in tensors.items()} for group, tensors in views.items()}

    def close(self) -> None:
        """Release the file; the system unmaps it when the last tensor that views it is gone."""
        self._map = self._mapped = None

    def _view(self, kind: str, shape: list[int], offset: int) -> Tensor:
        dtype, count = _DTYPES[kind], torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def _reserve(self, size: int) -> None:
        """Make the file at least this large, in the temporary folder if there is no space where it is."""
        if self.path.stat().st_size < size:
            size = -(-size // GROWTH) * GROWTH
            try:
                _grow(self.path, size)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                self._move(size)
        self._remap()

    def _move(self, size: int) -> None:
        """Go on in a new file of this size in the temporary folder; what was in the buffer is not kept."""
        if self.path.is_symlink():
            raise _no_space(size)  # it has moved before
        try:
            descriptor, name = tempfile.mkstemp(prefix="fedet-")
            os.close(descriptor)
            with _removed_on_error(Path(name)) as target:
                _grow(target, size)
                link = self.path.with_name(f"{self.path.name}.link")
                link.symlink_to(target)
                link.replace(self.path)
        except OSError as error:
            raise _no_space(size) from error

    def _remap(self) -> None:
        """Map the whole file, unless that is what is mapped already."""
        stat = self.path.stat()
        file_now = stat.st_dev, stat.st_ino, stat.st_size
        if stat.st_size and self._mapped != file_now:
            self.close()
            with self.path.open("r+b") as file:
                self._map, self._mapped = mmap.mmap(file.fileno(), stat.st_size), file_now


def create_folder() -> Path:
    """A new folder for buffers, in memory where the system offers that; it is marked as in use until this process ends."""
    if not portable():
        with contextlib.suppress(OSError):  # there is none, it can't be written to, or it is full
            _remove_abandoned()
            hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=SHARED_MEMORY))
            lock = filelock.FileLock(hidden / LOCK)
            lock.acquire(timeout=0)
            folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))  # locked since before it has this name
            _in_use[folder] = lock
            return folder
    return Path(tempfile.mkdtemp(prefix="fedet-"))


def _remove_abandoned() -> None:
    """Remove folders of processes that were killed together with their workers, which otherwise remove them."""
    for lock in [*SHARED_MEMORY.glob(f"fedet-*/{LOCK}"), *SHARED_MEMORY.glob(f"{HIDDEN}*/{LOCK}")]:
        with contextlib.suppress(OSError, filelock.Timeout):
            if not lock.parent.name.startswith(HIDDEN) or time.time() - lock.stat().st_mtime > ABANDONED:
                with filelock.FileLock(lock).acquire(timeout=0):
                    remove_folder(lock.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder of buffers, those that moved to the temporary folder included."""
    if folder in _in_use:
        _in_use.pop(folder).release()
    for path in folder.rglob("*"):
        if path.is_symlink():
            path.resolve().unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def describe_location() -> str:
    """Where buffers will be, for a person."""
    temporary = tempfile.gettempdir()
    if portable() or not os.access(SHARED_MEMORY, os.W_OK):
        return f"not available: workers use {temporary}"
    free = shutil.disk_usage(SHARED_MEMORY).free
    return f"{free / 2**20:,.0f} MB free in {SHARED_MEMORY}; workers use {temporary} for what does not fit"


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[Path]:
    try:
        yield path
    except BaseException:
        path.unlink()
        raise


def _no_space(size: int) -> FedetError:
    return FedetError(
        f"workers need {size / 2**20:,.0f} MB for one message but {SHARED_MEMORY} and {tempfile.gettempdir()} are full: "
        "free some, or set TMPDIR to a folder on a larger disk"
    )


def _grow(path: Path, size: int) -> None:
    """Make a file this large, with space reserved for all of it where the system can do that."""
    with path.open("r+b") as file:
        if sys.platform == "linux" and not portable():
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        file.truncate(size)
