"""Where worker processes come from: one imports everything, as early as possible, and the others are copies of it.

Importing torch takes a second of a core. The first worker begins with it while its parent still does the same, and for the
others there is no need: where processes can be copied (Linux) it makes them from itself, before it has any second thread.
Elsewhere, and for a worker that takes a dead one's place, each is started and imports for itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TextIO

from fedet.config.sources import nested, read_layers
from fedet.runtime import spawn_module
from fedet.workers.process import Process

WORKER = "fedet.workers.worker"


class ForkedWorker:
    """A process that another of ours made. It is not our child: a handle stands for it, and its exit code is unknown."""

    UNKNOWN = -1

    def __init__(self) -> None:
        there, here = os.pipe()
        self.stdin: TextIO = os.fdopen(here, "w")
        back, away = os.pipe()
        self._answers = os.fdopen(back)
        self.ends = there, away

    @cached_property
    def stdout(self) -> TextIO:
        """What it says, after its first words: its number, which it says as soon as it is there."""
        _ = self.pid
        return self._answers

    @cached_property
    def pid(self) -> int:
        """Its number; 0 if it never came to be."""
        return int(self._answers.readline() or 0)

    @cached_property
    def _handle(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(self.pid) if self.pid else None
        return None

    def poll(self) -> int | None:
        """Something if it is gone."""
        return self.UNKNOWN if self._gone(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if not self._gone(timeout):
            raise subprocess.TimeoutExpired(WORKER, timeout or 0)
        return self.UNKNOWN

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it is still there."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def _gone(self, timeout: float | None) -> bool:
        return self._handle is None or bool(select.select([self._handle], [], [], timeout)[0])

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            os.close(self.__dict__["_handle"])


class ForkServer:
    """A worker that was started, and the line by which it is handed the ends of its copies."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        if not _can_copy():
            self.process = spawn_module(WORKER)
            return
        self._control, other = socket.socketpair()
        with other:
            self.process = spawn_module(WORKER, str(other.fileno()), pass_fds=(other.fileno(),))

    def copies(self, number: int) -> list[Process]:
        """So many copies; they come to be when it has done its imports."""
        if self._control is None:
            return [spawn_module(WORKER) for _ in range(number)]
        copies = [ForkedWorker() for _ in range(number)]
        with self._control:
            for copy in copies:
                socket.send_fds(self._control, [b"."], copy.ends)
                for end in copy.ends:
                    os.close(end)
        return list(copies)

    def end(self) -> None:
        """It is not needed."""
        if self._control:
            self._control.close()
        self.process.kill()
        self.process.communicate()


_waiting: list[ForkServer] = []


def expect(source: Any, changes: Mapping[str, Any]) -> None:
    """Start a worker if this configuration asks for some; what is wrong with it is said when it is loaded.

    `FEDET_EARLY=0` in the environment turns this off: many short programs that end with an error are faster without.
    """
    with contextlib.suppress(Exception):
        if os.environ.get("FEDET_EARLY") != "0" and not _waiting and _workers(source, nested(changes)):
            _waiting.append(ForkServer())


def forget() -> None:
    """End a worker that was expected and not needed."""
    while _waiting:
        _waiting.pop().end()


def processes(number: int) -> list[Process]:
    """So many workers' processes."""
    try:
        first = _waiting.pop()
    except IndexError:
        first = ForkServer()
    return [first.process, *first.copies(number - 1)]


def _workers(source: Any, changes: Mapping[str, Any]) -> Any:
    """What `run.workers` will be: in the changes, or in the topmost layer that sets it."""
    tables = [*read_layers(source), changes]
    return next((t["run"]["workers"] for t in reversed(tables) if "workers" in t.get("run", {})), 0)


def _can_copy() -> bool:
    with contextlib.suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        return sys.platform == "linux"
    return False
