"""Flower's own programs: how they are started, read from and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedet.errors import FedetError

OnLine = Callable[[str, str], None]
"""Called with the name of a program and a line of its output."""
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "PYTHONUNBUFFERED": "1",
}
"""No telemetry, Ray stays on this machine, and work starts soon after it arrives."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
HTTP_LOG = re.compile(r"^INFO:|^INFO :$|uvicorn|lifespan|Lifespan")
"""Lines of the web servers inside Flower's programs, one for every request."""


def environment(home: Path | None) -> dict[str, str]:
    """The environment in which Flower's programs find each other and use this home."""
    binaries = str(Path(sys.executable).parent)
    found = os.environ | ENVIRONMENT | {"PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")])}
    return found | ({"FLWR_HOME": str(home)} if home else {})


def start(command: Sequence[object], home: Path | None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start a program in its own session, so that Ctrl-C reaches only this process."""
    return subprocess.Popen(
        [str(part) for part in command],
        env=environment(home),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """A program's output, line by line, until it ends."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            text = ANSI.sub("", line).strip()
            if text and not HTTP_LOG.search(text):
                yield text


def end(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Ask processes to end, wait, and kill what is left of them and their children."""
    import psutil

    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(family, timeout=max(0.1, until - time.monotonic()))  # they end when their parent does
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def flwr(arguments: Sequence[str], home: Path | None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run one command of Flower's command line."""
    command = [shutil.which("flwr", path=environment(home)["PATH"]) or "flwr", *arguments]
    try:
        return subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise FedetError(
            f"`flwr {' '.join(arguments)}` took longer than {timeout:g} s: check that the SuperLink is running"
        ) from None


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    """The end of a command's output, as one line."""
    lines = [ANSI.sub("", line).strip() for line in (done.stdout + "\n" + done.stderr).splitlines()]
    words = [line.strip("│╭╮╰╯─ ") for line in lines]
    return " ".join([word for word in words if word][-6:]) or f"exit code {done.returncode}"
