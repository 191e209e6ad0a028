"""Does the runs of a study, one per core side by side, and writes a record when one has ended."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedet import experiment
from fedet.config import Config
from fedet.engine import session
from fedet.engine.callbacks import Callbacks
from fedet.errors import Diverged, FedetError, Interrupted
from fedet.storage.run_folder import RunFolder, cache_folder
from fedet.study import records
from fedet.study.plan import BASE, METHOD, PlannedRun
from fedet.study.records import Record, Store
from fedet.workers import side_by_side


@dataclass
class Running:
    """A run in progress."""

    run: PlannedRun
    round: int = 0
    accuracy: float | None = None
    stage: str = ""
    resumed_at: int = 0
    since: float = field(default_factory=time.monotonic)


@dataclass
class Progress:
    """How far a study is; another thread may read it at any time."""

    runs: Sequence[PlannedRun]
    """Every run once, in the order in which they are done."""
    at_once: int
    finished: dict[str, Record] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Runs that failed for a reason that is not the experiment's, such as lack of memory; they have no record."""
    running: dict[str, Running] = field(default_factory=dict)

    @property
    def left(self) -> list[PlannedRun]:
        """The runs that have not started yet."""
        return [run for run in list(self.runs) if run.key not in {*self.finished, *self.errors, *self.running}]

    def seconds_left(self) -> float | None:
        """The expected time until the end, from the rounds so far; None before the first one."""
        rates = self._rates()
        if not rates:
            return None
        typical = sum(rates.values()) / len(rates)
        work = sum(run.config.run.rounds * rates.get(_kind(run), typical) for run in self.left)
        for now in list(self.running.values()):
            work += max(0, now.run.config.run.rounds - now.round) * rates.get(_kind(now.run), typical)
        return work / self.at_once

    def _rates(self) -> dict[tuple[Any, ...], float]:
        """Seconds per round of each method on each base."""
        spent: dict[tuple[Any, ...], list[float]] = {}
        for run in list(self.runs):
            record = self.finished.get(run.key)
            if record is not None and record.result["rounds"]:
                spent.setdefault(_kind(run), []).append(record.result["seconds"]["total"] / record.result["rounds"])
        for now in list(self.running.values()):
            if now.round > now.resumed_at:
                rate = (time.monotonic() - now.since) / (now.round - now.resumed_at)
                spent.setdefault(_kind(now.run), []).append(rate)
        return {kind: sum(values) / len(values) for kind, values in spent.items()}


Notify = Callable[[str, PlannedRun], None]
"""Called when a run is "started" or "resumed", after a "round", and when it has "finished" or "failed"."""


def run(
    runs: Sequence[PlannedRun],
    store: Store,
    out: Path,
    *,
    jobs: int | None = None,
    discard: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    notify: Notify = lambda what, run: None,
) -> Progress:
    """Do the runs that have no record yet; the same call resumes what was stopped. With `discard`, keep no run folders."""
    progress = progress or prepare(runs, store, jobs)
    todo = progress.left
    if not todo:
        return progress
    _check_data(todo, out)
    for planned in todo:
        _continue_shorter(planned, todo, out)
    follower = _Follower(todo, progress, store, out, discard, notify)
    shared = {"folder": str(out), "command": command, "workers": 0, "plots": False}
    tasks = [{"config": planned.config.model_dump(mode="json"), "name": planned.key, **shared} for planned in todo]
    try:
        side_by_side.run_all(tasks, progress.at_once, follower.message, follower.end)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"stopped: {len(progress.finished)} of {len(progress.runs)} runs are finished, the others have checkpoints in "
            f"{out}; continue with the same command"
        ) from None
    return progress


def prepare(runs: Sequence[PlannedRun], store: Store, jobs: int | None = None) -> Progress:
    """The state of a study before any of its runs is started: those with a record are finished."""
    unique = list({planned.key: planned for planned in runs}.values())
    progress = Progress(unique, jobs or _jobs([planned.config for planned in unique]))
    for planned in unique:
        record = store.get(planned.key)
        if record is not None:
            progress.finished[planned.key] = record
    return progress


class _Follower:
    """Keeps the progress up to date and writes the records; called from one thread per process."""

    def __init__(
        self, todo: Sequence[PlannedRun], progress: Progress, store: Store, out: Path, discard: bool, notify: Notify
    ) -> None:
        self.todo, self.progress, self.store, self.out = todo, progress, store, out
        self.discard, self.notify, self.commit = discard, notify, commit()
        self._lock = threading.Lock()

    def message(self, index: int, message: Mapping[str, Any]) -> None:
        """A run reports that it has started, a round or a stage."""
        planned = self.todo[index]
        with self._lock:
            now = self.progress.running.setdefault(planned.key, Running(planned))
            if "started" in message:
                now.round = now.resumed_at = int(message["started"][1])
                self.notify("resumed" if now.round else "started", planned)
            elif "round" in message:
                now.round, now.stage = message["round"]["round"], ""
                now.accuracy = message["round"].get("accuracy", now.accuracy)
                self.notify("round", planned)
            elif "stage" in message:
                now.stage = str(message["stage"][0])

    def end(self, index: int, error: FedetError | None) -> None:
        """A run has ended: write its record, unless it failed for a reason that is not the experiment's."""
        planned = self.todo[index]
        with self._lock:
            self.progress.running.pop(planned.key, None)
            if error is not None and not isinstance(error, Diverged):
                self.progress.errors[planned.key] = str(error)
            else:
                folder = self.out / planned.key
                failed = str(error) if error else None
                record = records.of_run(folder, planned.config, commit=self.commit, failed=failed)
                self.store.put(record)
                self.progress.finished[planned.key] = record
                if self.discard:
                    shutil.rmtree(folder)
            self.notify("failed" if error else "finished", planned)


def commit() -> str | None:
    """The commit of the source tree that this package runs from, with a plus if it was changed since; None if not known."""
    place = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(place), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")
    return None


def _kind(run: PlannedRun) -> tuple[Any, ...]:
    return run.coordinates.get(BASE), run.coordinates.get(METHOD)


def _check_data(todo: Iterable[PlannedRun], out: Path) -> None:
    """Report missing data before the first run starts, not after hours of others; decode it once for all of them."""
    for planned in {planned.config.data.name: planned for planned in todo}.values():
        session.build(planned.config, cache_folder(out), Callbacks())


def _continue_shorter(planned: PlannedRun, todo: Sequence[PlannedRun], out: Path) -> None:
    """Continue the folder of the same run with fewer rounds, if there is one that nothing else needs."""
    stem = planned.key.rpartition("-r")[0]
    if (out / planned.key).exists():
        return
    found = [(int(rounds.group(1)), path) for path in out.glob(f"{stem}-r*") if (rounds := re.search(r"-r(\d+)$", path.name))]
    needed = {other.key for other in todo}
    shorter = [(rounds, path) for rounds, path in found if rounds < planned.config.run.rounds and path.name not in needed]
    for _, path in sorted(shorter, reverse=True)[:1]:
        with contextlib.suppress(FedetError, OSError), RunFolder.existing(path).locked():  # not if it is in progress
            path.rename(out / planned.key)


def _jobs(configs: Sequence[Config]) -> int:
    """As many as the machine can do; one at a time on a GPU."""
    if any(experiment.device(name) != "cpu" for name in {config.run.device for config in configs}):
        return 1
    return side_by_side.that_fit()
