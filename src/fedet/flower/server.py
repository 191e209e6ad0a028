"""The server's side: the same engine, with Flower's grid as its transport."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedet import experiment, runtime
from fedet.config import Config
from fedet.engine import loop, rounds, run_warnings
from fedet.errors import ConfigError, FedetError
from fedet.experiment import Experiment
from fedet.flower import bundle
from fedet.flower.grid import Federation
from fedet.storage import run_folder
from fedet.storage.files import write_text
from fedet.storage.metrics import Record
from fedet.storage.run_folder import RunFolder

log = logging.getLogger("flwr")


def server_app(file: str) -> ServerApp:
    """The server app of the folder that holds this file."""
    app, folder = ServerApp(), Path(file).resolve().parent

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run(grid, context.run_config, folder)
        except FedetError as error:
            log.error("fedet: %s", error)  # the message alone; Flower logs the traceback
            raise

    return app


def run(grid: Grid, run_config: Mapping[str, Any], app_folder: Path) -> Record:
    """Start the run, or resume it from its checkpoint, and return its summary."""
    with bundle.server_code(app_folder):
        config = bundle.load(app_folder, run_config)
        name, out = bundle.identity(config, app_folder), Path(str(run_config.get("out") or "runs"))
        folder = RunFolder(out / name)
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.locked():
            config = _dropping_diverged(_with_threads(config, folder))
            built = experiment.build(config, run_folder.cache_folder(out))
            if built.method.reference and config.flower.own_data:
                raise ConfigError(
                    f"the reference '{built.method.name}' needs the clients' data at the server, but flower.own_data = true: "
                    "run references in the simulator, on data that you have"
                )
            if config.run.attack:
                raise ConfigError(
                    "run.attack simulates hostile clients, and those of Flower are real: remove it, or use `fedet run`"
                )
            _check_privacy(built)
            return _run(grid, name, built, folder)


def _check_privacy(built: Experiment) -> None:
    if built.privacy and not built.privacy.secret:
        raise ConfigError("the server knows the run's seed and could subtract the noise: set privacy.secret = true")
    if built.privacy and built.config.flower.own_data:
        raise ConfigError("privacy is accounted for by the sizes of the configured data: turn off flower.own_data or privacy")


def _run(grid: Grid, name: str, built: Experiment, folder: RunFolder) -> Record:
    _begin(folder, built)
    _warn(folder, run_warnings.before(built))
    transport = Federation(grid, built, name, built.config.flower)
    with runtime.limit_threads(built.config.run.threads):
        snapshot = loop.run(built, folder, transport, on_round=_log_round)
    _warn(folder, run_warnings.after(built, folder.metrics()))
    stopped = rounds.ended(built, snapshot)
    summary = folder.write_result(built, snapshot, stopped)
    _report(folder)
    log.info("fedet: done after %s rounds (%s): %s", snapshot.round, stopped, folder.path)
    return summary


def _warn(folder: RunFolder, texts: Iterable[str]) -> None:
    for text in texts:
        folder.warn(text)
        log.warning("fedet: %s", text)


def _dropping_diverged(config: Config) -> Config:
    """One client's non-finite numbers must not end everybody's training."""
    return config.model_copy(update={"run": config.run.model_copy(update={"diverged": "drop"})})


def _with_threads(config: Config, folder: RunFolder) -> Config:
    """A resumed run uses as many threads as it started with: the thread count changes floating-point rounding."""
    if (folder.path / "config.toml").is_file():
        threads = folder.config().run.threads
        config = config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})
    return experiment.with_fixed_threads(config)


def _begin(folder: RunFolder, built: Experiment) -> None:
    path = folder.path
    if not (path / "config.toml").is_file():
        folder.begin(built, "flwr run")
        log.info("fedet: %s on %s, in %s", built.method.name, built.config.data.name, path)
        return
    done = folder.finished_rounds()
    _warn(folder, folder.repair())
    log.info("fedet: resuming %s after round %s", path, done)
    if built.config.run.rounds > folder.config().run.rounds:
        write_text(path / "config.toml", built.config.to_toml())


def _report(folder: RunFolder) -> None:
    from fedet.reporting import report

    report.write_run(folder.path)


def _log_round(entry: Record) -> None:
    scores = " ".join(f"{name} {value:.4f}" for name, value in entry.get("models", {}).items())
    lost = f" LOST ({run_warnings.why_lost([entry])})" if entry["lost"] else ""
    log.info("fedet: round %s%s  %s  %.1f s", entry["round"], lost, scores, entry["seconds"]["round"])
    for f in entry["failures"]:
        log.warning("fedet: round %s, client %s, %s: %s", entry["round"], f["client"], f["kind"], f["why"])
