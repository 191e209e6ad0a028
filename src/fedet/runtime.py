"""How this process runs: threads inside torch's operators, memory that is kept, and imports that cost less.

Importing this module imports nothing large: command lines and helper processes use it before, or without, torch.
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
    """Whether `FEDET_PORTABLE=1` asks to do without what only Linux has (forked workers, files in memory); no result changes."""
    return os.environ.get("FEDET_PORTABLE") == "1"


@contextlib.contextmanager
def limit_threads(number: int | None) -> Iterator[None]:
    """Use this many threads inside torch's operators, or leave their number as it is.

    The number is part of a result's bits: thread count changes floating-point rounding.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_freed_memory(idle: int = 512 << 20, largest: int = 32 << 20) -> bool:
    """Let glibc keep up to `idle` freed bytes and serve blocks of up to `largest` bytes from its heap; False elsewhere.

    By default activations and gradients go back to the system after each step and are mapped again in the next: hundreds of
    page faults, up to a seventh of a small model's step. No result changes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(M_TRIM_THRESHOLD, idle)) and bool(mallopt(M_MMAP_THRESHOLD, largest))
    return False


@contextlib.contextmanager
def no_garbage_collection(freeze: bool = False) -> Iterator[None]:
    """Pause the garbage collector: during large imports it traverses all that torch holds again and again, in vain.

    `freeze` also exempts what was imported for good, which saves half a second at the interpreter's exit. It is for programs
    of our own: in somebody else's process their objects would be exempted, too.
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
    """Run one of our modules in a process of its own, with one thread inside torch's operators."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )


def lazy_exports(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports a name's module when it is first asked for; '' marks a submodule itself."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not names[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
