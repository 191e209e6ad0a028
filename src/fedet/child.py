"""A process of ours that is told what to do and answers, one JSON line each way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Protocol

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Died(Exception):
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


def spawn(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """A module of ours in a process of its own, with one thread inside torch's operators."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C is the parent's to deal with
    )


class Child:
    """A process that is spoken with."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message, or raise `Died`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Died from error

    def hear(self) -> dict[str, Any]:
        """Wait for a message, or raise `Died`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise Died
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
