"""Start or resume one run; `comparison` does several."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedet import config as configuration
from fedet import experiment as experiments
from fedet import runtime
from fedet.config import Config, objects, plugins
from fedet.config.sources import nested
from fedet.core import Transport
from fedet.engine import loop, rounds, run_warnings
from fedet.engine.callbacks import Callbacks
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError
from fedet.experiment import Experiment
from fedet.models import Model
from fedet.reporting import notebook, report
from fedet.storage.files import write_text
from fedet.storage.metrics import Record
from fedet.storage.model_folder import load_model
from fedet.storage.run_folder import RunFolder, cache_folder
from fedet.trust import attacks
from fedet.workers.pool import Pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run."""

    run_dir: Path
    summary: Record
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Functions and classes that were passed to the run, by their references in the configuration."""

    @property
    def accuracy(self) -> float:
        """Test accuracy of the server's model after the last round; NaN if it was never evaluated."""
        return _or_nan(self.summary["accuracy"])

    @property
    def best_accuracy(self) -> float:
        """The best test accuracy over the rounds."""
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
        with objects.scope(self.objects):
            return load_model(self.run_dir, trust_code=True)  # the run was the caller's own

    def to_pandas(self) -> Any:
        """The metrics as a pandas data frame, one row per round."""
        return notebook.frame(self.metrics)

    def plot(self) -> Figure:
        """A matplotlib figure of the accuracy of every model over the rounds."""
        return notebook.accuracy_plot(self.run_dir)

    def __repr__(self) -> str:
        return notebook.run_line(self.summary, self.run_dir)

    def _repr_html_(self) -> str:
        return notebook.run_table(self.run_dir)


def run_config(
    config: Config,
    out: Path,
    *,
    name: str | None = None,
    callbacks: Callbacks | None = None,
    command: str | None = None,
    workers: int | None = None,
) -> Result:
    """Run a loaded configuration in a new folder below `out`; `workers`, if given, overrides the configured number."""
    callbacks = callbacks or Callbacks()
    experiment = build(experiments.with_fixed_threads(config), cache_folder(out), callbacks)
    folder = RunFolder.new(out, config, name)
    with folder.locked():
        return _run(folder, experiment, callbacks, workers, lambda: folder.begin(experiment, command))


def resume(
    run_dir: str | Path,
    *,
    callbacks: Callbacks | None = None,
    rounds: int | None = None,
    workers: int | None = None,
    passed: Mapping[str, Any] | None = None,
) -> Result:
    """Resume a run from its last checkpoint; `rounds` extends it, `passed` are the objects that no file names."""
    callbacks = callbacks or Callbacks()
    folder = RunFolder.existing(Path(run_dir))
    with folder.locked():
        _check_passed(folder.path / "config.toml", passed or {})
        config = configuration.load(folder.path / "config.toml", {} if rounds is None else {"run.rounds": rounds})
        experiment = build(config, cache_folder(folder.path.parent), callbacks)
        done = folder.finished_rounds()
        if rounds is not None:
            _extend(folder, config, done)
        return _run(folder, experiment, callbacks, workers)


def run_or_resume(
    config: Config, folder: Path, name: str, callbacks: Callbacks | None, command: str | None, workers: int | None = None
) -> Result:
    """Start a run, or resume it if its folder already exists, for more rounds than it was started for if there are more."""
    existing = RunFolder(folder / name)
    if not (existing.path / "config.toml").is_file():
        return run_config(config, folder, name=name, callbacks=callbacks, command=command, workers=workers)
    more = config.run.rounds if config.run.rounds > existing.config().run.rounds else None
    return resume(existing.path, callbacks=callbacks, rounds=more, workers=workers)


def build(config: Config, cache: Path, callbacks: Callbacks) -> Experiment:
    """Build everything a run needs, so that errors are reported before a folder is created or changed."""
    experiment = experiments.build(config, cache, callbacks.stage)
    attacks.check(experiment)
    for arch in experiment.env.model_cache.names:
        experiment.env.model_cache.num_params(arch)
    return experiment


def _check_passed(stored: Path, passed: Mapping[str, Any]) -> None:
    """Make the objects known, and refuse any that are not those of the run."""
    named = objects.named(nested(passed))
    config = configuration.load(stored)
    given = configuration.load(config.model_dump(mode="json"), named)
    if given.digest() != config.digest():
        before, now = config.model_dump(mode="json"), given.model_dump(mode="json")
        key = next(f"{table}.{key}" for table in named for key in now[table] if now[table][key] != before[table].get(key))
        raise ConfigError(
            f"{stored.parent} was started with another {key}: pass what was passed to fedet.run; an object that no file names "
            "counts as another one if its code or its data has changed"
        )


def _extend(folder: RunFolder, config: Config, done: int) -> None:
    """Store the new number of rounds, once it is certain that the run can be resumed."""
    if config.run.rounds < done:
        raise ConfigError(f"{folder.path} has finished {done} rounds already: --rounds can only make a run longer")
    write_text(folder.path / "config.toml", config.to_toml())


def _run(
    folder: RunFolder,
    experiment: Experiment,
    callbacks: Callbacks,
    workers: int | None,
    begin: Callable[[], None] = lambda: None,
) -> Result:
    result = None
    try:
        callbacks.started(experiment.config, folder.path, len(folder.metrics()))
        result = _run_rounds(folder, experiment, callbacks, workers, begin)
        return result
    finally:
        callbacks.ended(result)


def _run_rounds(
    folder: RunFolder, experiment: Experiment, callbacks: Callbacks, workers: int | None, begin: Callable[[], None]
) -> Result:
    warnings = Warnings(folder, callbacks.warning)
    warnings.add([*(folder.repairs or ()), *run_warnings.before(experiment)])
    transport = _transport(experiment, folder, workers, warnings)
    with runtime.limit_threads(experiment.config.run.threads), transport as (pooled, transported):
        begin()  # while the workers start

        def on_round(entry: Record) -> None:
            warnings.add(_replaced(transported))
            callbacks.told(entry)

        snapshot = loop.run(pooled, folder, transported, on_round)
        warnings.add(_replaced(transported))
    warnings.add(run_warnings.after(experiment, folder.metrics()))
    summary = folder.write_result(experiment, snapshot, rounds.ended(experiment, snapshot))
    report.write_run(folder.path)
    return Result(folder.path, summary, objects.code())


@dataclass(frozen=True)
class Warnings:
    """The warnings of a run: each is recorded in its folder and shown once."""

    folder: RunFolder
    show: Callable[[str], None]
    shown: set[str] = field(default_factory=set)

    def add(self, texts: Iterable[str]) -> None:
        """Record and show those that are new."""
        for text in texts:
            self.folder.warn(text)
            if text not in self.shown:
                self.shown.add(text)
                self.show(text)


def _replaced(transport: Transport) -> list[str]:
    return list(transport.replacements) if isinstance(transport, Pool) else []


@contextlib.contextmanager
def _transport(
    experiment: Experiment, folder: RunFolder, given: int | None, warnings: Warnings
) -> Iterator[tuple[Experiment, Transport]]:
    """Run clients and predictions in this process, or in a pool of workers."""
    workers = num_workers(experiment.config) if given is None else given
    local = plugins.only_in_this_process(experiment.config.model_dump(mode="json"))
    if local and workers:
        warnings.add([cant_import(local[0])])
        workers = 0
    if workers < 1:
        yield experiment, InProcess(experiment)
        return
    cache = cache_folder(folder.path.parent)
    experiments.share_arrays(experiment.config, cache)
    with contextlib.closing(Pool(experiment, cache, workers)) as pool:
        yield replace(experiment, env=replace(experiment.env, predictor=pool)), pool


def cant_import(reference: str) -> str:
    """A warning about an object that only this process has."""
    name = objects.shown(reference)
    return f"worker processes can't import '{name}': the run uses this process alone; move it to a file to use them"


def num_workers(config: Config) -> int:
    """The configured number; `auto` is one per core, at most one per client of a round.

    With a GPU it is at most four, to keep it busy without exhausting its memory. It is none where buffers can't be shared with
    workers: the run uses this process alone, to the same bits.
    """
    if config.run.workers != "auto":
        return config.run.workers
    if not runtime.mapped_files_grow():
        return 0
    cores = os.cpu_count() or 1
    most = cores if experiments.device(config.run.device) == "cpu" else 4
    return min(most, cores, config.run.cohort)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
