"""What the commands do, from Python: run and resume; `comparison` has the rest."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedet import config as configuration
from fedet import experiment, runtime
from fedet.config import Config
from fedet.engine import exchange, rounds
from fedet.engine.callbacks import Callbacks
from fedet.errors import ConfigError
from fedet.experiment import Experiment
from fedet.models import Model
from fedet.reporting import report
from fedet.storage.files import write_text
from fedet.storage.metrics import Record
from fedet.storage.model_folder import load_model
from fedet.storage.run_folder import RunFolder, cache_folder
from fedet.workers import pool


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


def run_config(
    config: Config,
    out: Path,
    *,
    name: str | None = None,
    callbacks: Callbacks | None = None,
    command: str | None = None,
    workers: int | None = None,
) -> Result:
    """Run a loaded configuration in a new folder below `out`; `workers`, if given, instead of the configured number."""
    callbacks = callbacks or Callbacks()
    built = ready(exchange.with_threads(config), cache_folder(out), callbacks)
    folder = RunFolder.new(out, config, name)
    with folder.locked():
        return _go(folder, built, callbacks, workers, lambda: folder.begin(built, command or _python_command(config)))


def resume(
    run_dir: str | Path, *, callbacks: Callbacks | None = None, rounds: int | None = None, workers: int | None = None
) -> Result:
    """Go on with a run from its last checkpoint, if asked to another number of rounds."""
    callbacks = callbacks or Callbacks()
    folder = RunFolder.existing(Path(run_dir))
    with folder.locked():
        config = configuration.load(folder.path / "config.toml", {} if rounds is None else {"run.rounds": rounds})
        built = ready(config, cache_folder(folder.path.parent), callbacks)
        if rounds is not None:
            _lengthen(folder, config)
        return _go(folder, built, callbacks, workers)


def once(
    config: Config, folder: Path, name: str, callbacks: Callbacks | None, command: str | None, workers: int | None = None
) -> Result:
    """Run it, or go on with it."""
    existing = RunFolder(folder / name)
    if not (existing.path / "config.toml").is_file():
        return run_config(config, folder, name=name, callbacks=callbacks, command=command, workers=workers)
    return resume(existing.path, callbacks=callbacks, workers=workers)


def ready(config: Config, cache: Path, callbacks: Callbacks) -> Experiment:
    """Build everything a run needs, so that what can't be is refused before a folder is made or changed."""
    built = experiment.build(config, cache, callbacks.stage)
    for arch in built.env.model_cache.names:
        built.env.model_cache.num_params(arch)
    return built


def _lengthen(folder: RunFolder, config: Config) -> None:
    """Write down the new number of rounds, once it is clear that the run can go on."""
    done = (folder.restore() or {"round": 0})["round"]
    if config.run.rounds < done:
        raise ConfigError(f"{folder.path} has done {done} rounds already: --rounds can only make a run longer")
    write_text(folder.path / "config.toml", config.to_toml())


def _go(
    folder: RunFolder, built: Experiment, callbacks: Callbacks, workers: int | None, begin: Callable[[], None] = lambda: None
) -> Result:
    callbacks.started(built.config, folder.path, len(folder.metrics()))
    with runtime.limit_threads(built.config.run.threads), _connected(built, folder, workers) as (reached, connect):
        begin()  # while the workers get ready
        snapshot = rounds.run(reached, folder, callbacks.round, connect)
    summary = folder.write_result(built, snapshot, rounds.ended(built, snapshot))
    report.write_run(folder.path)
    return Result(folder.path, summary)


@contextlib.contextmanager
def _connected(built: Experiment, folder: RunFolder, given: int | None) -> Iterator[tuple[Experiment, rounds.Connect]]:
    """How clients are reached and models are asked: in this process, or in a pool of workers."""
    wanted = built.config.run.workers if given is None else given
    workers = _workers(built) if wanted == "auto" else wanted
    if workers < 1:
        yield built, exchange.in_process
        return
    with pool.process_pool(built, cache_folder(folder.path.parent), workers) as predictor:
        yield replace(built, env=replace(built.env, predictor=predictor)), predictor.connect


def _workers(built: Experiment) -> int:
    """One per core and client; beside a GPU a few, so that it has several clients' work at hand and memory for all."""
    most = os.cpu_count() or 1 if experiment.device(built.config.run.device) == "cpu" else 4
    return min(most, os.cpu_count() or 1, built.config.run.cohort)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _python_command(config: Config) -> str:
    return f"fedet.run({config.name!r})  # with this run's config.toml: fedet run config.toml --seed {config.run.seed}"
