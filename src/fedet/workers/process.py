"""A process of ours that is told what to do and answers, one JSON line each way."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping
from typing import Any, Protocol


class ProcessDied(Exception):
    """The process is gone."""


class Process(Protocol):
    """What is asked of a process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    @property
    def stdin(self) -> Any:
        """What it reads."""
        ...

    @property
    def stdout(self) -> Any:
        """What it writes."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""
        ...


class ChildProcess:
    """A process that is spoken with."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or raise `Died`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ProcessDied from error

    def receive(self) -> dict[str, Any]:
        """Wait for a message, or raise `Died`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise ProcessDied
        return dict(json.loads(line))

    def interrupt(self) -> None:
        """Ask it to stop as Ctrl-C would."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
