"""A run's folder: created, locked, logged to, checkpointed, read again."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from fedet import config as configuration
from fedet.config import Config
from fedet.core import Weights
from fedet.errors import FedetError
from fedet.storage import checkpoint, metrics, model_folder
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Ledger, Record

if TYPE_CHECKING:
    from fedet.experiment import Experiment


COMPARISON = "compare-"


def cache_folder(out: Path) -> Path:
    """Where decoded data lies beside the runs in `out`; the runs of a comparison share that of the folder around it."""
    return (out.parent if out.name.startswith(COMPARISON) else out) / ".cache"


class RunFolder:
    """The one place that knows which file of a run is where."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoint = path / "last" / "checkpoint.safetensors"
        self.store = ClientStore(path / "clients")
        self._digest: str | None = None

    @classmethod
    def new(cls, out: Path, config: Config, name: str | None = None) -> RunFolder:
        """A folder of its own for this configuration and seed; what an earlier run left is never overwritten."""
        stem = name or f"{config.name}-{config.method['name'].rpartition(':')[2]}-{config.digest()}-s{config.run.seed}"
        for attempt in range(1, 10_000):
            path = out / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not path.is_dir():
                    raise FedetError(f"{path} is in the way: it is no folder; choose another place with --out") from None
                with cls(path).locked():  # an earlier run still at work is a mistake worth naming
                    if not (path / "config.toml").exists():  # cut off before it began: nothing to keep
                        return cls(path)
            except OSError as error:
                why = error.strerror or error
                raise FedetError(f"can't make the folder {path}: {why}. Choose another place with --out") from error
        raise FedetError(f"{out} holds 10,000 runs of this configuration: choose another place with --out")

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """A folder that holds a run, or a sentence why it doesn't."""
        if not (path / "config.toml").is_file():
            raise FedetError(f"{path} holds no run: give the folder that `fedet run` made, it has a config.toml")
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out while this one writes; the lock goes with the process, however it ends."""
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise FedetError(f"{self.path} is in use by another process{self._who()}: wait for it, or stop it first") from None
        except OSError as error:
            raise checkpoint.cannot_write(self.path, error) from error
        try:
            checkpoint.write_text(self.path / ".pid", f"{os.getpid()}\n")
            yield
        finally:
            lock.release()

    def begin(self, experiment: Experiment, command: str) -> None:
        """Write down what is about to run, and on what; the configuration last, as it is what makes the folder a run."""
        facts = environment(command) | {"device": experiment.env.model_cache.device}
        checkpoint.write_text(self.path / "env.json", json.dumps(facts, indent=1) + "\n")
        arrays = experiment.data.split_arrays() | {"archs": np.array([c.arch for c in experiment.clients])}
        with checkpoint.replacing(self.path / "split.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)
        checkpoint.write_text(self.path / "config.toml", experiment.config.to_toml())

    def config(self) -> Config:
        """The configuration the run was started with."""
        return configuration.load(self.path / "config.toml")

    def digest(self) -> str:
        """Of the configuration, read once."""
        if self._digest is None:
            self._digest = self.config().digest()
        return self._digest

    def log(self, entry: Record, ledger: Ledger) -> None:
        """Add a round to metrics and ledger."""
        metrics.append(self.path / "ledger.jsonl", {"round": entry["round"], "clients": ledger.lines()})
        metrics.append(self.path / "metrics.jsonl", entry)

    def replace_last(self, entry: Record) -> None:
        """Write the metrics of the last round anew."""
        metrics.replace_last(self.path / "metrics.jsonl", entry)

    def forget_after(self, number: int) -> None:
        """Drop what was logged after this round."""
        for name in ("metrics.jsonl", "ledger.jsonl"):
            if (self.path / name).exists():
                metrics.truncate(self.path / name, number)

    def metrics(self) -> list[Record]:
        """The metrics of all rounds so far."""
        return metrics.read(self.path / "metrics.jsonl")

    def save(self, fields: dict[str, Any]) -> None:
        """Write the checkpoint: first what clients keep, then the file that refers to it."""
        files = self.store.flush(fields["round"])
        checkpoint.save(self.checkpoint, fields, {"config": self.digest(), "clients": files})
        self.store.sweep()

    def restore(self) -> dict[str, Any] | None:
        """The fields of the last checkpoint, or nothing if there is none yet; later log lines are dropped."""
        if not self.checkpoint.exists():
            self.forget_after(0)
            return None
        fields, meta = checkpoint.load(self.checkpoint)
        if meta.get("config") != self.digest():
            raise FedetError(f"{self.checkpoint} belongs to another configuration than {self.path / 'config.toml'}")
        self.store.restore(meta["clients"])
        self.forget_after(int(fields["round"]))
        return dict(fields)

    def save_model(self, which: str, experiment: Experiment, model: tuple[str, Weights], number: int, accuracy: float) -> None:
        """Keep a server model as a folder that `fedet.load_model` reads."""
        about = {"method": experiment.method.name, "data": experiment.config.data.name, "seed": experiment.seed}
        model_folder.save_model(
            self.path / which, experiment.env.build(*model), about | {"round": number, "accuracy": _or_none(accuracy)}
        )

    def write_result(self, experiment: Experiment, s: Any, stopped: str | None) -> Record:
        """The summary that `--json` prints."""
        config, modules = experiment.config, experiment.env.model_cache
        result = {
            "method": config.method["name"],
            "data": config.data.name,
            "seed": config.run.seed,
            "rounds": s.round,
            "accuracy": _or_none(s.accuracy),
            "best_accuracy": _or_none(s.best_accuracy),
            "best_round": s.best_round,
            **{key: s.totals[key] for key in ("params_up", "params_down", "bytes_up", "bytes_down")},
            "seconds": round(s.seconds, 3),
            "run_dir": str(self.path),
            "stopped": stopped,
            "c_acc": metrics.summary_cost(self.metrics(), config.run.report_accuracy) if stopped else {},
            "arch_params": {name: modules.num_params(name) for name in modules.names},
            "server": experiment.env.large,
        }
        checkpoint.write_text(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        return result

    def result(self) -> Record:
        """The last summary written."""
        path = self.path / "result.json"
        if not path.is_file():
            raise FedetError(f"{self.path} has no result yet: go on with `fedet resume {self.path}`")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise FedetError(
                f"{path} is damaged ({error}): delete it, then `fedet resume {self.path}` writes it again"
            ) from None

    def _who(self) -> str:
        try:
            return f" (pid {(self.path / '.pid').read_text(encoding='utf-8').strip()})"
        except OSError:
            return ""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is done: weights, logs and client states change together or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda received, frame: caught.append(received)) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def environment(command: str) -> Record:
    """Versions and hardware, for the report."""
    import psutil
    import torch

    return {
        "fedet": _version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": torch.get_num_threads(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version() -> str:
    try:
        return version("fedet")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"


def _cpu() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _or_none(value: float) -> float | None:
    return None if value < 0 else value
