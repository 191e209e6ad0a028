"""Start worker processes quickly: the first one imports everything, as early as possible, and the others are forked from it.

Importing torch takes a second of a core. The first worker does it while its parent does the same, and on Linux it then forks
the others from itself, before it has a second thread. Elsewhere, with `FEDET_PORTABLE=1`, and for the replacement of a worker
that died, each worker is started and imports for itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from fedet.config.sources import nested, read_layers
from fedet.runtime import mapped_files_grow, portable, spawn_module
from fedet.workers.process import Process

WORKER = "fedet.workers.worker"


class ForkedWorker:
    """A worker that the fork server makes. It is not our child: it is watched by a pidfd, and its exit code is unknown."""

    UNKNOWN = -1
    GRACE = 1.0
    """Seconds that `kill` waits for one that is still to be forked."""
    _pid: int | None = None
    _pidfd: int | None = None

    def __init__(self) -> None:
        child_input, ours = os.pipe()
        self.stdin: TextIO = os.fdopen(ours, "w")
        ours, child_output = os.pipe()
        self._output = os.fdopen(ours)
        self.child_ends = child_input, child_output
        self._lock = threading.Lock()

    @property
    def stdout(self) -> TextIO:
        """What it writes after its first line, which is its process id."""
        self._find()
        return self._output

    @property
    def pid(self) -> int:
        """Its process id; 0 if it was never forked."""
        self._find()
        return self._pid or 0

    def poll(self) -> int | None:
        """`UNKNOWN` if it has ended, None while it runs or is still to be forked."""
        return self.UNKNOWN if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(WORKER, timeout or 0)
        return self.UNKNOWN

    def kill(self) -> None:
        """End it; one that is forked later finds its input closed and ends by itself."""
        if self._find(self.GRACE):
            self.send_signal(signal.SIGKILL)
        else:
            with contextlib.suppress(OSError):
                self.stdin.close()

    def send_signal(self, sig: int) -> None:
        """Send it a signal if it is running."""
        if self._find(self.GRACE) and self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def _find(self, timeout: float | None = None) -> bool:
        """Read its process id, the first line that it writes; False if that did not come in time."""
        if self._pid is None and self._lock.acquire(timeout=-1 if timeout is None else timeout):
            try:
                if self._pid is None and _readable(self._output, timeout):
                    pid = int(self._output.readline() or 0)
                    with contextlib.suppress(ProcessLookupError):
                        self._pidfd = os.pidfd_open(pid) if pid else None
                    self._pid = pid
            finally:
                self._lock.release()
        return self._pid is not None

    def _ended(self, timeout: float | None) -> bool:
        return self._find(timeout) and (self._pidfd is None or _readable(self._pidfd, timeout))

    def __del__(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


class ForkServer:
    """The first worker, and the socket through which it is given the pipes of those that it forks."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        if not can_fork():
            self.process = spawn_module(WORKER)
            return
        self._control, other = socket.socketpair()
        with other:
            self.process = spawn_module(WORKER, str(other.fileno()), pass_fds=(other.fileno(),))

    def fork(self, number: int) -> list[Process]:
        """Start more workers; they appear when the first one has done its imports."""
        if self._control is None:
            return [spawn_module(WORKER) for _ in range(number)]
        with self._control as control:
            return [_forked(control) or spawn_module(WORKER) for _ in range(number)]

    def stop(self) -> None:
        """End it unused."""
        if self._control:
            self._control.close()
        self.process.kill()
        self.process.communicate()


_prestarted: list[ForkServer] = []


def prestart(source: Any, changes: Mapping[str, Any]) -> None:
    """Start the first worker if this configuration asks for workers; errors in it are reported when it is loaded.

    `FEDET_EARLY=0` in the environment turns this off: many short programs that end with an error are faster without.
    """
    with contextlib.suppress(Exception):
        if os.environ.get("FEDET_EARLY") != "0" and not _prestarted and _configured_workers(source, nested(changes)):
            _prestarted.append(ForkServer())


def discard() -> None:
    """End a prestarted worker that was not needed."""
    while _prestarted:
        _prestarted.pop().stop()


def start_workers(number: int) -> list[Process]:
    """The processes of this many workers, the prestarted one first if it is still running."""
    if _prestarted and _prestarted[0].process.poll() is not None:
        discard()
    server = _prestarted.pop() if _prestarted else ForkServer()
    return [server.process, *server.fork(number - 1)]


def can_fork() -> bool:
    """Whether workers can be forked and watched on this system."""
    if sys.platform != "linux" or portable():
        return False
    with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


def _forked(control: socket.socket) -> ForkedWorker | None:
    """Ask for one more worker; None if the fork server has died."""
    worker = ForkedWorker()
    try:
        socket.send_fds(control, [b"."], worker.child_ends)
        asked = True
    except OSError:
        asked = False
    for end in worker.child_ends:
        os.close(end)
    if asked:
        return worker
    worker.stdin.close()
    worker.stdout.close()
    return None


def _readable(file: int | TextIO, timeout: float | None) -> bool:
    poll = select.poll()  # `select.select` refuses descriptors above 1023
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1000 * timeout))


def _configured_workers(source: Any, changes: Mapping[str, Any]) -> Any:
    """What `run.workers` will be: in the changes, or in the topmost layer that sets it."""
    tables = [*read_layers(source), changes]
    wanted = next((t["run"]["workers"] for t in reversed(tables) if "workers" in t.get("run", {})), 0)
    return wanted if wanted != "auto" or mapped_files_grow() else 0
