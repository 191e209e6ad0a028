"""Flower's own programs: how they are started, listened to and ended."""

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

Say = Callable[[str, str], None]
"""Shows a line of someone's: who, what."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "PYTHONUNBUFFERED": "1",
}
"""Nothing calls home, Ray stays on this machine, and work begins soon after it arrives."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CHATTER = re.compile(r"^INFO:|^INFO :$|uvicorn|lifespan|Lifespan")
"""Lines of the web servers inside Flower's programs: every request is one."""


def environment(home: Path | None) -> dict[str, str]:
    """Flower's programs find each other, one private home, and no reason to call anyone."""
    binaries = str(Path(sys.executable).parent)
    found = os.environ | QUIET | {"PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")])}
    return found | ({"FLWR_HOME": str(home)} if home else {})


def start(command: Sequence[object], home: Path | None, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start one of them in its own session, so that Ctrl-C is ours to deal with."""
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
    """What it says, line by line, until it ends."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            text = COLOUR.sub("", line).strip()
            if text and not CHATTER.search(text):
                yield text


def end(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Ask processes to end, wait, and kill whatever is left of them and of what they started."""
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
    _, alive = psutil.wait_procs(family, timeout=max(0.1, until - time.monotonic()))  # they look after their parent
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def flwr(arguments: Sequence[str], home: Path | None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """One command of Flower's command line, to its end."""
    command = [shutil.which("flwr", path=environment(home)["PATH"]) or "flwr", *arguments]
    try:
        return subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise FedetError(f"`flwr {' '.join(arguments)}` took longer than {timeout:g} s: is the SuperLink there?") from None


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a command said, as one line."""
    lines = [COLOUR.sub("", line).strip() for line in (done.stdout + "\n" + done.stderr).splitlines()]
    words = [line.strip("│╭╮╰╯─ ") for line in lines]
    return " ".join([word for word in words if word][-6:]) or f"exit code {done.returncode}"
