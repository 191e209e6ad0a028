"""Compare methods or configurations under the same conditions, in runs one after the other or side by side."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from fedet import config as configuration
from fedet import experiment
from fedet.config import Config
from fedet.config.sources import Source, overrides
from fedet.engine.callbacks import Callbacks
from fedet.engine.session import Result, build, run_or_resume
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.reporting import report, results
from fedet.reporting.run_data import read_run
from fedet.storage.files import read_json, write_json
from fedet.storage.records import ComparisonRecord
from fedet.storage.run_folder import COMPARISON, RunFolder, cache_folder
from fedet.workers import side_by_side


@dataclass(frozen=True)
class Comparison:
    """Several finished runs under the same conditions."""

    folder: Path
    results: list[Result]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / "report.html"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per method or configuration."""
        return results.comparison_rows([read_run(result.run_dir) for result in self.results])


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
    """Run methods or configurations for the same seeds, and so on the same partitions, cohorts and initial weights.

    With `equal_traffic` every other run stops at the last round within the number of parameters that the first one sent.
    `jobs` is how many runs are in progress at once (by default one per core). Called again, it keeps the runs that are
    finished and resumes the others.
    """
    sources = list(configs) if isinstance(configs, list | tuple) else [configs]
    seeds = list(seeds)
    entries = _entries(sources, list(methods or []), changes)
    _check(entries, seeds, Path(out), jobs)
    folder = Path(out) / f"{COMPARISON}{next(iter(entries.values())).name}-{_digest(entries, seeds, equal_traffic)}"
    first, *others = entries
    waves = [[first], others] if equal_traffic else [[*entries]]
    runs_at_once = _jobs(list(entries.values())) if jobs is None else jobs
    threads = _threads(folder, min(runs_at_once, len(seeds) * max(map(len, waves))))
    listing = {"runs": [f"{label}-s{seed}" for seed in seeds for label in entries], "seeds": seeds, "command": command}
    write_json(folder / "comparison.json", listing | {"threads": threads})
    found: dict[tuple[int, str], Result] = {}
    for wave in waves:
        planned = {}
        for seed, label in ((seed, label) for seed in seeds for label in wave):
            changed: dict[str, Any] = {"run.seed": seed, "run.threads": entries[label].run.threads or threads}
            if equal_traffic and label != first:
                sent = found[seed, first].traffic
                changed["run.budget_params"] = sent["params_up"] + sent["params_down"]
            config = configuration.load(entries[label].model_dump(mode="json"), changed)
            planned[seed, label] = PlannedRun(config, folder, f"{label}-s{seed}", command)
        found |= dict(zip(planned, _run(list(planned.values()), runs_at_once, callbacks or Callbacks()), strict=True))
    done = [found[seed, label] for seed in seeds for label in entries]
    report.write_comparison(folder, [read_run(result.run_dir) for result in done])
    return Comparison(folder, done)


def write_report(folder: Path) -> Path:
    """Write the report of a run or of a comparison again; runs of a comparison that have not started are left out."""
    listing = folder / "comparison.json"
    if not listing.is_file():
        return report.write_run(folder)
    try:
        names = read_json(listing, ComparisonRecord)["runs"]
    except FedetError as error:
        raise FedetError(f"{error}; run the same comparison again, it keeps the runs that are finished") from None
    started = [folder / Path(name).name for name in names if (folder / Path(name).name / "config.toml").is_file()]
    return report.write_comparison(folder, [read_run(path) for path in started])


def _threads(folder: Path, runs_at_once: int) -> int:
    """The number of threads of every run: as stored when the comparison first started, or in its first run's configuration.

    It does not depend on how many runs are left, because the thread count changes floating-point rounding.
    """
    with contextlib.suppress(FedetError):  # missing or damaged
        threads = read_json(folder / "comparison.json", ComparisonRecord).get("threads")
        if threads:
            return int(threads)
    for path in sorted(folder.glob("*/config.toml")):  # older versions did not store it
        threads = read_run(path.parent).config.get("run", {}).get("threads")
        if isinstance(threads, int):
            return threads
    return 1 if runs_at_once > 1 else torch.get_num_threads()


def _check(entries: Mapping[str, Config], seeds: list[int], out: Path, jobs: int | None) -> None:
    """Report mistakes before the first run starts, not after hours of them."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds = {seeds}: give at least one, without duplicates or negative numbers")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: it must be at least 1")
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
        for chosen in [{"method.name": method} for method in methods] or [{}]:
            config = configuration.load(source, overrides({**changes, **chosen}))
            short = config.method["name"].rpartition(":")[2]
            label = short if len(sources) == 1 else (f"{config.name}-{short}" if methods else config.name)
            if label in entries:
                raise ConfigError(f"'{label}' is listed twice: name each method or configuration once")
            entries[label] = config
    return entries


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison, which may be finished, unfinished or not started."""

    config: Config
    folder: Path
    name: str
    command: str | None

    def finished(self) -> Result | None:
        """The result, if the run is finished; its report is what a run writes last."""
        run = RunFolder(self.folder / self.name)
        if not (run.path / "report.html").is_file():
            return None
        result = run.result()
        return Result(run.path, result) if result.get("stopped") else None


def _run(planned: Sequence[PlannedRun], runs_at_once: int, callbacks: Callbacks) -> list[Result]:
    """Do the runs that are not finished, one after the other or side by side, and return the results of all."""
    todo = [run for run in planned if run.finished() is None]
    try:
        if min(runs_at_once, len(todo)) < 2:
            for run in todo:
                run_or_resume(run.config, run.folder, run.name, callbacks, run.command)
        else:
            _run_side_by_side(todo, runs_at_once, callbacks)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; or continue the whole comparison with the same command") from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped, with checkpoints in {todo[0].folder}; continue with the same command") from None
    return [run.finished() or _missing(run) for run in planned]


def _run_side_by_side(planned: Sequence[PlannedRun], runs_at_once: int, callbacks: Callbacks) -> None:
    cores = (os.cpu_count() or 1) // runs_at_once
    observers = [callbacks.for_another_run() if callbacks.for_another_run else callbacks for _ in planned]

    def on_message(index: int, message: Mapping[str, Any]) -> None:
        if "started" in message:
            path, done = message["started"]
            observers[index].started(planned[index].config, Path(path), done)
        elif "round" in message:
            observers[index].round(message["round"])
        else:
            observers[index].stage(*message["stage"])

    specs = []
    for run in planned:
        workers = 0 if cores < 2 or run.config.run.workers == 0 else cores
        spec = {"config": run.config.model_dump(mode="json"), "folder": str(run.folder), "name": run.name}
        specs.append(spec | {"command": run.command, "workers": workers})
    side_by_side.run_all(specs, runs_at_once, on_message)


def _jobs(configs: Sequence[Config]) -> int:
    """One run per core, if each of them uses one core and there are about 2 GB of memory for each."""
    if any((config.run.threads or 1) > 1 or experiment.device(config.run.device) != "cpu" for config in configs):
        return 1
    return min(os.cpu_count() or 1, max(1, int(psutil.virtual_memory().available) // 2**31))


def _missing(run: PlannedRun) -> NoReturn:
    raise FedetError(f"{run.folder / run.name} has no result: run the same comparison again")


def _digest(entries: Mapping[str, Config], seeds: list[int], equal_traffic: bool) -> str:
    parts = [f"{label} {config.digest()} {config.run.rounds}" for label, config in entries.items()]
    return hashlib.blake2b(f"{parts} {seeds} {equal_traffic}".encode(), digest_size=4).hexdigest()
