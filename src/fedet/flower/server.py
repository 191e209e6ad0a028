"""The server's half: the same engine, with an exchange made from Flower's grid."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedet import experiment, runtime
from fedet.config import Config
from fedet.engine import exchange, rounds
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.flower import bundle
from fedet.flower.grid import Federation
from fedet.storage import run_folder
from fedet.storage.files import write_text
from fedet.storage.metrics import Record
from fedet.storage.run_folder import RunFolder

log = logging.getLogger("flwr")


def server_app(file: str) -> ServerApp:
    """The server app of the folder in which this file lies."""
    app, folder = ServerApp(), Path(file).resolve().parent

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run(grid, context.run_config, folder)
        except FedetError as error:
            log.error("fedet: %s", error)  # the sentence; Flower adds where it came from
            raise

    return app


def run(grid: Grid, run_config: Mapping[str, Any], app_folder: Path) -> Record:
    """Begin the run, or go on with it from its checkpoint, and return its summary."""
    config = bundle.load(app_folder, run_config)
    name, out = bundle.identity(config, app_folder), Path(str(run_config.get("out") or "runs"))
    folder = RunFolder(out / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.locked():
        ready = _ready(_with_threads(config, folder), out)
        _begin(folder, ready)
        federation = Federation(grid, ready, name, ready.config.flower)
        with runtime.limit_threads(ready.config.run.threads):
            snapshot = rounds.run(ready, folder, _say, federation.connect)
        stopped = rounds.ended(ready, snapshot)
        summary = folder.write_result(ready, snapshot, stopped)
        _report(folder)
    log.info("fedet: done after %s rounds (%s): %s", snapshot.round, stopped, folder.path)
    return summary


def _ready(config: Config, out: Path) -> Experiment:
    """The experiment; one client's broken numbers never end everybody's training, and who is there changes by the round."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"diverged": "drop"})})
    ready = experiment.build(config, run_folder.cache_folder(out))
    return replace(ready, clients=list(ready.clients))


def _with_threads(config: Config, folder: RunFolder) -> Config:
    """A run that goes on uses as many threads as it began with: they are part of the bits."""
    if (folder.path / "config.toml").is_file():
        threads = folder.config().run.threads
        config = config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})
    return exchange.with_threads(config)


def _begin(folder: RunFolder, ready: Experiment) -> None:
    where = folder.path
    if not (where / "config.toml").is_file():
        folder.begin(ready, "flwr run")
        log.info("fedet: %s on %s, in %s", ready.method.name, ready.config.data.name, where)
        return
    log.info("fedet: going on with %s, %s rounds are done", where, (folder.restore() or {"round": 0})["round"])
    if ready.config.run.rounds > folder.config().run.rounds:
        write_text(where / "config.toml", ready.config.to_toml())


def _report(folder: RunFolder) -> None:
    from fedet.reporting import report

    report.write_run(folder.path)


def _say(entry: Record) -> None:
    scores = " ".join(f"{name} {value:.4f}" for name, value in entry.get("models", {}).items())
    lost = " LOST" if entry["lost"] else ""
    log.info("fedet: round %s%s  %s  %.1f s", entry["round"], lost, scores, entry["seconds"]["round"])
    for f in entry["failures"]:
        log.warning("fedet: round %s, client %s, %s: %s", entry["round"], f["client"], f["kind"], f["why"])
