"""Experiment trackers by name: TensorBoard, MLflow, and whatever has `init`, `log` and `finish`, such as wandb and trackio.

A tracker gets the configuration, the numbers of each round, and at the end a picture and the server's model. One that fails
is left out with a warning: it must not cost a run.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedet.config import Config
from fedet.data.source import accepted
from fedet.engine.callbacks import Callbacks, warn
from fedet.engine.session import Result
from fedet.errors import ConfigError, FedetError
from fedet.reporting import results
from fedet.storage.files import read_json, write_json
from fedet.storage.metrics import Record
from fedet.storage.records import MLflowRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ONE_AT_A_TIME = threading.Lock()
"""The runs of a comparison report from threads of their own, and not every package is made for that."""
PROJECT = "fedet"
"""The project or experiment under which runs are filed."""


class Sink(Protocol):
    """Where one run is logged to."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a round."""

    def finish(self, result: Result | None) -> None:
        """Log the picture and the model of a finished run, and close."""


Open = Callable[[Config, Path, int], Sink]
"""Starts to log a run, from its configuration, its folder and the number of finished rounds."""


def callbacks(wanted: Any) -> list[Callbacks]:
    """The callbacks of a tracker, of several, or of none."""
    each = wanted if isinstance(wanted, list | tuple) else [] if wanted is None else [wanted]
    return [Follower(*_opener(tracker)).callbacks() for tracker in each]


@dataclass
class Follower:
    """Passes the rounds of one run on to a tracker, until that fails."""

    name: str
    open: Open
    sink: Sink | None = None

    def callbacks(self) -> Callbacks:
        """Callbacks for one run at a time; a concurrent run gets its own."""
        return Callbacks(
            started=self.start,
            round=lambda entry: self._attempt(lambda sink: sink.log(numbers(entry), entry["round"])),
            ended=self.end,
            for_another_run=lambda: Follower(self.name, self.open).callbacks(),
        )

    def start(self, config: Config, path: Path, done: int) -> None:
        """Open the tracker; what is wrong with it is reported before the first round."""
        try:
            with _ONE_AT_A_TIME:
                self.sink = self.open(config, path, done)
        except FedetError:
            raise
        except Exception as error:
            raise FedetError(f"the tracker {self.name} can't be started: {type(error).__name__}: {error}") from error

    def end(self, result: Result | None) -> None:
        """Close the tracker."""
        self._attempt(lambda sink: sink.finish(result))
        self.sink = None

    def _attempt(self, work: Callable[[Sink], None]) -> None:
        if self.sink is None:
            return
        try:
            with _ONE_AT_A_TIME:
                work(self.sink)
        except Exception as error:
            self.sink = None
            warn(f"the tracker {self.name} failed, and the run goes on without it: {type(error).__name__}: {error}")


def numbers(entry: Record) -> dict[str, float]:
    """The numbers of a round's record, as `models/NAME`, `seconds/NAME`, `per_client/NAME` and `per_class/NUMBER`."""
    plain = {key: entry[key] for key in ("accuracy", "loss", "val_accuracy", "params_total") if entry.get(key) is not None}
    tables = {key: entry.get(key) or {} for key in ("models", "seconds", "per_client")}
    tables["per_class"] = {str(label): value for label, value in enumerate(entry.get("per_class") or [])}
    found = {f"{key}/{name}": value for key, table in tables.items() for name, value in table.items()}
    found["failures"] = len(entry.get("failures") or [])
    return {key: float(value) for key, value in {**plain, **found}.items() if isinstance(value, int | float)}


def _opener(tracker: Any) -> tuple[str, Open]:
    if not isinstance(tracker, str):
        return getattr(tracker, "__name__", type(tracker).__name__), lambda *run: Generic(_checked(tracker), *run)
    if tracker in _KNOWN:
        return tracker, _KNOWN[tracker]
    return tracker, lambda *run: Generic(_checked(_package(tracker, f"pip install {tracker}")), *run)


def _checked(tracker: Any) -> Any:
    missing = [name for name in ("init", "log", "finish") if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(
            f"{tracker!r} is no tracker, it has no '{missing[0]}': use tensorboard, mlflow, or a module with init, log, finish"
        )
    return tracker


def _package(name: str, how: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FedetError(f"the tracker needs the package {name.partition('.')[0]} ({error}): {how}") from None


class TensorBoard:
    """Logs to the folder `tensorboard` of the run: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, config: Config, path: Path, done: int) -> None:
        _package("tensorboard", "pip install 'fedet[tensorboard]'")
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer = writer(str(path / "tensorboard"), purge_step=done + 1)
        indented = "\n".join(f"    {line}" for line in config.to_toml().splitlines())
        self._writer.add_text("configuration", indented, 0)

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Result | None) -> None:
        """Log the picture, the model's architecture and its place, and close."""
        if result is not None:
            self._writer.add_image("accuracy over rounds", pixels(result.plot()), result.summary["rounds"], dataformats="HWC")
            if best := best_model(result):
                about = "\n".join(f"    {line}" for line in str(result.model).splitlines())
                self._writer.add_text("model", f"{best}\n\n{about}", result.summary["rounds"])
        self._writer.close()


class MLflow:
    """Logs to the store that `MLFLOW_TRACKING_URI` names, or else to `mlruns.db` next to the run."""

    def __init__(self, config: Config, path: Path, done: int) -> None:
        mlflow = _package("mlflow", "pip install 'fedet[mlflow]'")
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(path.parent / 'mlruns.db').resolve()}"
        self._mlflow, self._client = mlflow, mlflow.MlflowClient(tracking_uri=store)
        noted = path / "mlflow.json"
        self._run = self._found(noted) if done else None
        if self._run is None:
            self._run = self._client.create_run(self._experiment(path), run_name=path.name).info.run_id
            write_json(noted, {"run_id": self._run})
            params = results.flat(config.model_dump(mode="json", exclude_none=True))
            named = [mlflow.entities.Param(key, str(value)[:500]) for key, value in params.items()]
            self._client.log_batch(self._run, params=named[:100])  # at most 100 at once

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a round."""
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._client.log_batch(self._run, metrics=[metric(key, value, now, step) for key, value in values.items()])

    def finish(self, result: Result | None) -> None:
        """Log configuration, report, picture and model as artefacts, and close."""
        if result is not None:
            for name in ("config.toml", "report.html"):
                self._client.log_artifact(self._run, str(result.run_dir / name))
            self._client.log_image(self._run, pixels(result.plot()), "accuracy.png")
            if best := best_model(result):
                self._client.log_artifacts(self._run, str(best), "model")
        self._client.set_terminated(self._run, "FINISHED" if result is not None else "KILLED")

    def _experiment(self, path: Path) -> str:
        """The experiment of this project; without a store of the user's own, artefacts are kept next to the runs."""
        if found := self._client.get_experiment_by_name(PROJECT):
            return str(found.experiment_id)
        own = os.environ.get("MLFLOW_TRACKING_URI")
        return str(self._client.create_experiment(PROJECT, None if own else (path.parent / "mlartifacts").resolve().as_uri()))

    def _found(self, noted: Path) -> str | None:
        """The run that a resumed run was logged to before, if it is still there."""
        try:
            run = str(read_json(noted, MLflowRecord)["run_id"])
            self._client.update_run(run, status="RUNNING")
        except (FedetError, self._mlflow.exceptions.MlflowException):
            return None
        return run


class Generic:
    """Logs through `init`, `log` and `finish`, with as many of their arguments as they take."""

    def __init__(self, tracker: Any, config: Config, path: Path, done: int) -> None:
        about = {"project": PROJECT, "name": path.name, "config": config.model_dump(mode="json"), "dir": str(path)}
        again = {"id": path.name, "resume": "allow", "reinit": "create_new"}
        self._tracker = tracker
        started = tracker.init(**accepted(tracker.init, about | again))
        own = all(callable(getattr(started, name, None)) for name in ("log", "finish"))
        self._run = started if own else tracker  # several runs at once need objects of their own

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a round."""
        self._run.log(values, **accepted(self._run.log, {"step": step}))

    def finish(self, result: Result | None) -> None:
        """Log the picture and the model if the tracker takes any, and close."""
        if result is not None:
            step = accepted(self._run.log, {"step": result.summary["rounds"]})
            if hasattr(self._tracker, "Image"):
                self._run.log({"accuracy over rounds": self._tracker.Image(pixels(result.plot()))}, **step)
            best = best_model(result)
            if best and hasattr(self._tracker, "Artifact") and hasattr(self._run, "log_artifact"):
                artefact = self._tracker.Artifact(result.run_dir.name, type="model")
                artefact.add_dir(str(best))
                self._run.log_artifact(artefact)
        self._run.finish()


_KNOWN: dict[str, Open] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def best_model(result: Result) -> Path | None:
    """The folder of the best server model; a method whose models are all at the clients has none."""
    best = result.run_dir / "best"
    return best if best.is_dir() else None


def pixels(figure: Figure) -> Any:
    """A figure as an array (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
