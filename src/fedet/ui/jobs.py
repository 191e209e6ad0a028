"""Runs that the page starts: programs of their own, stopped as by Ctrl-C, so that they write a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedet import config as configuration
from fedet.config.sources import overrides, presets
from fedet.errors import ConfigError, FedetError
from fedet.methods import METHODS, REFERENCES
from fedet.reporting.run_data import find_runs
from fedet.storage.run_folder import RunFolder

PATIENCE = 60.0
"""How many seconds a stopped run has for its checkpoint before the page ends without it."""


@dataclass
class Job:
    """A program that was started from the page."""

    number: int
    what: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        """Whether the program has not ended."""
        return self.process.poll() is None

    def folder(self, root: Path) -> Path | None:
        """The run folder that the program has made or taken up, or None if it has not come so far."""
        return next((path for path in find_runs(root) if RunFolder(path).last_owner() == self.process.pid), None)

    def last_words(self) -> str:
        """The last line that the program wrote: the reason if it failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("fedet: ") if lines else ""


@dataclass
class Jobs:
    """All programs that were started from the page."""

    root: Path
    jobs: dict[int, Job] = field(default_factory=dict)

    @cached_property
    def logs(self) -> Path:
        """A folder for what the programs write, made for the first of them."""
        return Path(tempfile.mkdtemp(prefix="fedet-ui-"))

    def start(self, form: Mapping[str, str]) -> Job:
        """Start a run from a preset; mistakes are told before anything starts."""
        preset, method = form.get("preset", ""), form.get("method", "")
        if preset not in presets():
            raise ConfigError(f"there is no preset '{preset}'")
        if method not in method_names():
            raise ConfigError(f"there is no method '{method}'")
        numbers = {name: number(form, name) for name in ("rounds", "seed") if form.get(name)}
        configuration.load(preset, overrides({"method": method, **numbers}))
        options = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        return self._run(f"{method} on {preset}", ["run", preset, "--method", method, *options, "--out", str(self.root)])

    def resume(self, folder: Path) -> Job:
        """Continue a run from its last checkpoint."""
        if RunFolder(folder).owner() is not None:
            raise FedetError(f"{folder.name} is running already")
        return self._run(f"{folder.name}, resumed", ["resume", str(folder)])

    def stop(self, folder: Path) -> None:
        """Ask a run to write a checkpoint and end; only one that was started here, whatever its files say."""
        job = self.of(folder)
        if job is None:
            raise FedetError(f"{folder.name} was not started from this page: stop it where it was started")
        _interrupt(job.process)

    def of(self, folder: Path) -> Job | None:
        """The program that works on this run now, if it was started here."""
        pid = RunFolder(folder).owner()
        return next((job for job in self.jobs.values() if job.process.pid == pid and job.running), None)

    def close(self) -> list[Job]:
        """Stop all programs, wait for their checkpoints, remove what they wrote here, and return them."""
        running = [job for job in self.jobs.values() if job.running]
        for job in running:
            _interrupt(job.process)
        for job in running:
            try:
                job.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                job.process.kill()
        if self.jobs:
            shutil.rmtree(self.logs, ignore_errors=True)
        return running

    def _run(self, what: str, arguments: Sequence[str]) -> Job:
        place = len(self.jobs) + 1
        log = self.logs / f"{place}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedet", *arguments, "--quiet"], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,  # a Ctrl-C in the terminal is for the page, which then stops its runs itself
                env=os.environ | {"NO_COLOR": "1"},
            )  # fmt: skip
        self.jobs[place] = Job(place, what, process, log)
        return self.jobs[place]


def method_names() -> list[str]:
    """The methods that a run can be started with: those of the package, because a name of a file would run its code."""
    return [cls.name for cls in (*METHODS, *REFERENCES)]


def number(form: Mapping[str, str], name: str) -> int:
    """A whole number of a form."""
    try:
        return int(form[name])
    except ValueError:
        raise ConfigError(f"{name} = '{form[name]}': it must be a whole number") from None


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    process.terminate() if sys.platform == "win32" else process.send_signal(signal.SIGINT)
