"""What the commands do, from Python: run, resume, compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedet import config as configuration
from fedet import engine, experiment, pool, report, results, transport
from fedet.config import SHORT, Config, Source
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.export import load_model
from fedet.models import Model
from fedet.record import Record
from fedet.runfolder import COMPARISON, RunFolder, cache
from fedet.state import write_text


@dataclass(frozen=True)
class Watch:
    """Who is told of progress: each finished round, and the stages inside one."""

    started: Callable[[Config, Path, int], None] = lambda config, path, done: None
    round: Callable[[Record], None] = lambda record: None
    stage: Callable[[str, int, int], None] = lambda stage, done, total: None


@dataclass(frozen=True)
class Result:
    """A finished run."""

    run_dir: Path
    summary: Record

    @property
    def accuracy(self) -> float:
        """Test accuracy of the server's model after the last round; NaN if it was never evaluated."""
        return _or_nan(self.summary["accuracy"])

    @property
    def best_accuracy(self) -> float:
        """Its best over the rounds."""
        return _or_nan(self.summary["best_accuracy"])

    @property
    def traffic(self) -> dict[str, int]:
        """Parameters and bytes sent up and down."""
        return {key: self.summary[key] for key in ("params_up", "params_down", "bytes_up", "bytes_down")}

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.run_dir / "report.html"

    @cached_property
    def metrics(self) -> list[Record]:
        """One record per round."""
        return RunFolder(self.run_dir).metrics()

    @cached_property
    def model(self) -> Model:
        """The best server model, ready to use."""
        return load_model(self.run_dir)


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


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments to configuration keys: short names, `data__alpha` for `data.alpha`, or nested tables."""
    return {
        key.replace("__", ".") if isinstance(value, Mapping) else SHORT.get(key, key.replace("__", ".")): value
        for key, value in values.items()
        if value is not None
    }


def run(
    config: Source = None, *, out: str | Path = "runs", watch: Watch | None = None, command: str | None = None, **changes: Any
) -> Result:
    """Run a preset, a file or a mapping with changes such as `method="fedavg"`, `rounds=20`, `data__alpha=0.1`."""
    return run_config(configuration.load(config, overrides(changes)), Path(out), watch=watch, command=command)


def run_config(
    config: Config, out: Path, *, name: str | None = None, watch: Watch | None = None, command: str | None = None
) -> Result:
    """Run a loaded configuration in a new folder below `out`."""
    watch = watch or Watch()
    ready = _ready(transport.with_threads(config), cache(out), watch)
    folder = RunFolder.new(out, config, name)
    with folder.locked():
        folder.begin(ready, command or _python_command(config))
        return _go(folder, ready, watch)


def resume(run_dir: str | Path, *, watch: Watch | None = None, rounds: int | None = None) -> Result:
    """Go on with a run from its last checkpoint, if asked to another number of rounds."""
    watch = watch or Watch()
    folder = RunFolder.existing(Path(run_dir))
    with folder.locked():
        config = configuration.load(folder.path / "config.toml", {} if rounds is None else {"run.rounds": rounds})
        ready = _ready(config, cache(folder.path.parent), watch)
        if rounds is not None:
            _lengthen(folder, config)
        return _go(folder, ready, watch)


def _ready(config: Config, cache: Path, watch: Watch) -> experiment.Experiment:
    """Build everything a run needs, so that what can't be is refused before a folder is made or changed."""
    ready = experiment.build(config, cache, watch.stage)
    for arch in ready.env.modules.names:
        ready.env.modules.num_params(arch)
    return ready


def _lengthen(folder: RunFolder, config: Config) -> None:
    """Write down the new number of rounds, once it is clear that the run can go on."""
    done = (folder.restore() or {"round": 0})["round"]
    if config.run.rounds < done:
        raise ConfigError(f"{folder.path} has done {done} rounds already: --rounds can only make a run longer")
    write_text(folder.path / "config.toml", config.to_toml())


def _go(folder: RunFolder, ready: experiment.Experiment, watch: Watch) -> Result:
    watch.started(ready.config, folder.path, len(folder.metrics()))
    with transport.threads(ready.config.run.threads), _connected(ready, folder) as connect:
        snapshot = engine.run(ready, folder, watch.round, connect)
    summary = folder.write_result(ready, snapshot, engine.ended(ready, snapshot))
    report.write_run(folder.path)
    return Result(folder.path, summary)


@contextlib.contextmanager
def _connected(ready: experiment.Experiment, folder: RunFolder) -> Iterator[engine.Connect]:
    """How clients are reached: in this process, or in a pool of workers."""
    wanted = ready.config.run.workers
    workers = min(os.cpu_count() or 1, ready.config.run.cohort) if wanted == "auto" else wanted
    if workers < 1:
        yield transport.in_process
        return
    with pool.process_pool(ready, cache(folder.path.parent), workers) as workers_pool:
        yield workers_pool.connect


def compare(
    configs: Source | list[Source] | tuple[Source, ...] = None,
    *,
    methods: Iterable[str] | None = None,
    seeds: Iterable[int] = (0,),
    out: str | Path = "runs",
    equal_traffic: bool = False,
    watch: Watch | None = None,
    command: str | None = None,
    **changes: Any,
) -> Comparison:
    """Run methods or configurations for the same seeds, so on the same partitions, cohorts and initial weights.

    With `equal_traffic` all others stop when they have sent as many parameters as the first. Called again, it takes what
    is finished from disk and goes on with the rest.
    """
    sources = list(configs) if isinstance(configs, list | tuple) else [configs]
    seeds = list(seeds)
    entries = _entries(sources, list(methods or []), changes)
    _check(entries, seeds, Path(out))
    folder = Path(out) / f"{COMPARISON}{next(iter(entries.values())).name}-{_digest(entries, seeds, equal_traffic)}"
    done: list[Result] = []
    for seed in seeds:
        budget: int | None = None
        for label, config in entries.items():
            limits = {"run.budget_params": budget} if budget else {}
            wanted = configuration.load(config.model_dump(mode="json"), {"run.seed": seed, **limits})
            try:
                result = _once(wanted, folder, f"{label}-s{seed}", watch, command)
            except Interrupted as stop:
                raise Interrupted(f"{stop}, or with the whole comparison by the same command") from None
            done.append(result)
            if equal_traffic and budget is None:
                budget = result.traffic["params_up"] + result.traffic["params_down"]
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


def _check(entries: Mapping[str, Config], seeds: list[int], out: Path) -> None:
    """Refuse what can't be before the first of many runs rather than in the middle of the night."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds = {seeds}: give at least one, none twice, none negative")
    for config in entries.values():
        _ready(config.model_copy(update={"run": config.run.model_copy(update={"seed": seeds[0]})}), cache(out), Watch())


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


def _once(config: Config, folder: Path, name: str, watch: Watch | None, command: str | None) -> Result:
    """Run it, go on with it, or take it from disk."""
    existing = RunFolder(folder / name)
    if not (existing.path / "config.toml").is_file():
        return run_config(config, folder, name=name, watch=watch, command=command)
    if (existing.path / "report.html").is_file() and existing.result()["stopped"]:  # the report is what a run writes last
        return Result(existing.path, existing.result())
    return resume(existing.path, watch=watch)


def _digest(entries: Mapping[str, Config], seeds: list[int], equal_traffic: bool) -> str:
    parts = [f"{label} {config.digest()} {config.run.rounds}" for label, config in entries.items()]
    return hashlib.blake2b(f"{parts} {seeds} {equal_traffic}".encode(), digest_size=4).hexdigest()


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _python_command(config: Config) -> str:
    return f"fedet.run({config.name!r})  # with this run's config.toml: fedet run config.toml --seed {config.run.seed}"
