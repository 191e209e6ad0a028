"""How a process runs: threads inside torch's operators, the memory allocator, imports, child processes.

This module imports nothing large: the command line and child processes use it before torch, or without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment of processes whose operators use one thread each."""


def portable() -> bool:
    """Whether `FEDET_PORTABLE=1` turns off what only Linux has: forked workers and files in memory. No result changes."""
    return os.environ.get("FEDET_PORTABLE") == "1"


def mapped_files_grow() -> bool:
    """Whether a file can grow while another process maps it, as buffers between processes do; on Windows it can't."""
    return os.name != "nt"


@contextlib.contextmanager
def limit_threads(number: int | None) -> Iterator[None]:
    """Use this many threads inside torch's operators; None leaves the number as it is.

    Thread count changes floating-point rounding, so it is part of what determines a result.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait_briefly() -> None:
    """Before torch is imported: let OpenMP's threads sleep after some 50 microseconds instead of spinning for milliseconds.

    Alone on a machine that makes no difference. Beside other programs, threads spin while the one they wait for has no core: a
    run of tiny models took 55 s instead of 19. No result changes.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


@cache
def keep_freed_memory(idle: int = 512 << 20, largest: int = 32 << 20) -> bool:
    """Let glibc keep up to `idle` freed bytes and serve blocks of up to `largest` bytes from its heap; False elsewhere.

    By default activations and gradients are returned to the system after each step and mapped again in the next: hundreds of
    page faults, which take up to a seventh of a small model's step. No result changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(M_TRIM_THRESHOLD, idle)) and bool(mallopt(M_MMAP_THRESHOLD, largest))
    return False


@contextlib.contextmanager
def no_garbage_collection(freeze: bool = False) -> Iterator[None]:
    """Pause the garbage collector: during large imports it traverses all of torch's objects repeatedly and finds nothing.

    `freeze` also exempts what was imported from later collections, which saves half a second at exit. It is for our own
    programs: in a user's process it would exempt the user's objects, too.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        gc.enable()


def spawn_module(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """Run one of our modules in a new process, with one thread inside torch's operators."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=pass_fds,
        start_new_session=True,  # the parent alone handles Ctrl-C
    )


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports names on first use: each name's module, or '' if the name is a module itself."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not names[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def package_version() -> str:
    """The installed version of fedet, or "source" for a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedet")
    except PackageNotFoundError:
        return "source"
