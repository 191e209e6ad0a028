"""A worker process that is given tasks and replies, one JSON line each way."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, Protocol

STOP_SECONDS = 10.0
"""How long to wait for a killed process. One in an uninterruptible system call ends when that does; nobody waits for it."""


class ProcessDied(Exception):
    """The process has ended."""


class Process(Protocol):
    """What is needed of a process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def stdin(self) -> Any:
        """Its standard input."""
        ...

    @property
    def stdout(self) -> Any:
        """Its standard output."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code, or raise `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""
        ...


class ChildProcess:
    """A process and the messages to and from it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or raise `ProcessDied`."""
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: the pipe was closed, as `stop` does
            raise ProcessDied from error

    def receive(self) -> dict[str, Any]:
        """Wait for a message, or raise `ProcessDied`."""
        try:
            line = self.process.stdout.readline()
        except (OSError, ValueError) as error:
            raise ProcessDied from error
        if not line.endswith("\n"):
            raise ProcessDied
        return dict(json.loads(line))

    def interrupt(self) -> None:
        """Ask it to stop as Ctrl-C would; where a process can't be sent that signal, end it: its last checkpoint stays."""
        try:
            self.process.send_signal(signal.SIGINT)
        except ValueError:  # Windows
            self.process.kill()
        except OSError:
            pass

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended or is about to, or None if it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(STOP_SECONDS)
        return None

    def stop(self) -> None:
        """End it now."""
        self.process.kill()
        if self.exit_code() is None:
            return  # a thread may wait for its output, and closing that would wait for the thread
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
