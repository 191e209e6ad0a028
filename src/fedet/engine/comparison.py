"""Several runs on the same ground: compare methods or configurations, one after the other or side by side."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import psutil

from fedet import config as configuration
from fedet import experiment
from fedet.config import Config
from fedet.config.sources import Source, overrides
from fedet.engine.callbacks import Callbacks
from fedet.engine.session import Result, build, run_or_resume
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.reporting import report, results
from fedet.storage.checkpoint import write_text
from fedet.storage.run_folder import COMPARISON, RunFolder, cache_folder
from fedet.workers import side_by_side


@dataclass(frozen=True)
class Comparison:
    """Several runs on the same ground."""

    folder: Path
    results: list[Result]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / "report.html"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per method or configuration."""
        return results.comparison_rows([results.read_run(result.run_dir) for result in self.results])


def compare(
    configs: Source | list[Source] | tuple[Source, ...] = None,
    *,
    methods: Iterable[str] | None = None,
    seeds: Iterable[int] = (0,),
    out: str | Path = "runs",
    equal_traffic: bool = False,
    jobs: int | None = None,
    callbacks: Callbacks | None = None,
    command: str | None = None,
    **changes: Any,
) -> Comparison:
    """Run methods or configurations for the same seeds, so on the same partitions, cohorts and initial weights.

    With `equal_traffic` all others stop when they have sent as many parameters as the first. `jobs` runs go on at once (as
    many as there are cores, if left out). Called again, it takes what is finished from disk and goes on with the rest.
    """
    sources = list(configs) if isinstance(configs, list | tuple) else [configs]
    seeds = list(seeds)
    entries = _entries(sources, list(methods or []), changes)
    _check(entries, seeds, Path(out), jobs)
    folder = Path(out) / f"{COMPARISON}{next(iter(entries.values())).name}-{_digest(entries, seeds, equal_traffic)}"
    found: dict[tuple[int, str], Result] = {}
    first, *others = entries
    for wave in ([first], others) if equal_traffic else ([*entries],):
        keys = [(seed, label) for seed in seeds for label in wave]
        tasks = []
        for seed, label in keys:
            changed: dict[str, Any] = {"run.seed": seed}
            if equal_traffic and label != first:
                sent = found[seed, first].traffic
                changed["run.budget_params"] = sent["params_up"] + sent["params_down"]
            config = configuration.load(entries[label].model_dump(mode="json"), changed)
            tasks.append(Task(config, folder, f"{label}-s{seed}", command))
        try:
            found |= dict(zip(keys, _play(tasks, jobs, callbacks or Callbacks()), strict=True))
        except Interrupted as stop:
            raise Interrupted(f"{stop}, or with the whole comparison by the same command") from None
        except KeyboardInterrupt:
            raise Interrupted(f"stopped, with checkpoints in {folder}; go on by the same command") from None
    done = [found[seed, label] for seed in seeds for label in entries]
    runs = [results.read_run(result.run_dir) for result in done]
    report.write_comparison(folder, runs)
    listing = {"runs": [result.run_dir.name for result in done], "seeds": seeds, "command": command}
    write_text(folder / "comparison.json", json.dumps(listing, indent=1) + "\n")
    return Comparison(folder, done)


def write_report(folder: Path) -> Path:
    """Write the report of a run or of a comparison again."""
    listing = folder / "comparison.json"
    if not listing.is_file():
        return report.write_run(folder)
    try:
        names = list(json.loads(listing.read_text(encoding="utf-8"))["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedetError(f"{listing} is damaged ({error}): run the same comparison again, it takes what is finished") from None
    return report.write_comparison(folder, [results.read_run(folder / name) for name in names])


def _check(entries: Mapping[str, Config], seeds: list[int], out: Path, jobs: int | None) -> None:
    """Refuse what can't be before the first of many runs rather than in the middle of the night."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds = {seeds}: give at least one, none twice, none negative")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: at least one run goes on at a time")
    for config in entries.values():
        build(
            config.model_copy(update={"run": config.run.model_copy(update={"seed": seeds[0]})}), cache_folder(out), Callbacks()
        )


def _entries(sources: list[Source], methods: list[str], changes: Mapping[str, Any]) -> dict[str, Config]:
    if methods == ["all"]:
        from fedet.methods import METHODS

        methods = [cls.name for cls in METHODS]
    entries: dict[str, Config] = {}
    for source in sources:
        for asked in [{"method.name": method} for method in methods] or [{}]:
            config = configuration.load(source, overrides({**changes, **asked}))
            short = config.method["name"].rpartition(":")[2]
            label = short if len(sources) == 1 else (f"{config.name}-{short}" if methods else config.name)
            if label in entries:
                raise ConfigError(f"'{label}' is listed twice: name each method or configuration once")
            entries[label] = config
    return entries


@dataclass(frozen=True)
class Task:
    """One run of a comparison."""

    config: Config
    folder: Path
    name: str
    command: str | None

    def finished(self) -> Result | None:
        """What is on disk, if the run came to its end; the report is what a run writes last."""
        there = RunFolder(self.folder / self.name)
        if not (there.path / "report.html").is_file() or not there.result()["stopped"]:
            return None
        return Result(there.path, there.result())


def _play(tasks: Sequence[Task], jobs: int | None, callbacks: Callbacks) -> list[Result]:
    """Do what is not done yet: one after the other, or side by side where there are cores for it."""
    todo = [task for task in tasks if task.finished() is None]
    at_once = _jobs(todo) if jobs is None else jobs
    if min(at_once, len(todo)) < 2:
        for task in todo:
            run_or_resume(task.config, task.folder, task.name, callbacks, task.command)
    else:
        _side_by_side(todo, at_once, callbacks)
    return [task.finished() or _missing(task) for task in tasks]


def _side_by_side(tasks: Sequence[Task], at_once: int, callbacks: Callbacks) -> None:
    spare = (os.cpu_count() or 1) // at_once
    watches = [callbacks.for_another_run() if callbacks.for_another_run else callbacks for _ in tasks]

    def hear(place: int, message: Mapping[str, Any]) -> None:
        if "started" in message:
            path, done = message["started"]
            watches[place].started(tasks[place].config, Path(path), done)
        elif "round" in message:
            watches[place].round(message["round"])
        else:
            watches[place].stage(*message["stage"])

    plain = []
    for task in tasks:
        config = task.config
        if config.run.threads is None:  # one each: more threads than cores only get in each other's way
            config = config.model_copy(update={"run": config.run.model_copy(update={"threads": 1})})
        mine = 0 if spare < 2 or config.run.workers == 0 else spare
        told = {"config": config.model_dump(mode="json"), "folder": str(task.folder), "name": task.name}
        plain.append(told | {"command": task.command, "workers": mine})
    side_by_side.play(plain, at_once, hear)


def _jobs(tasks: Sequence[Task]) -> int:
    """One run per core, if each keeps to one core and there are some 2 GB for each."""
    if any((t.config.run.threads or 1) > 1 or experiment.device(t.config.run.device) != "cpu" for t in tasks):
        return 1
    return min(os.cpu_count() or 1, max(1, int(psutil.virtual_memory().available) // 2**31))


def _missing(task: Task) -> NoReturn:
    raise FedetError(f"{task.folder / task.name} has no result: run the same comparison again")


def _digest(entries: Mapping[str, Config], seeds: list[int], equal_traffic: bool) -> str:
    parts = [f"{label} {config.digest()} {config.run.rounds}" for label, config in entries.items()]
    return hashlib.blake2b(f"{parts} {seeds} {equal_traffic}".encode(), digest_size=4).hexdigest()
