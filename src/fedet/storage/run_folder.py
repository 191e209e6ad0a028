"""A run's folder: creating, locking, logging to, checkpointing and reading it."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np

from fedet import config as configuration
from fedet.config import Config
from fedet.core import Weights
from fedet.errors import FedetError
from fedet.privacy import Participations
from fedet.runtime import package_version
from fedet.storage import checkpoint, files, metrics, model_folder
from fedet.storage.checkpoints import Checkpoints
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Ledger, Record
from fedet.storage.records import ResultRecord
from fedet.trust import attacks

if TYPE_CHECKING:
    from fedet.experiment import Experiment


LOGS = ("metrics.jsonl", "ledger.jsonl")
"""One line per round in each."""
COMPARISON = "compare-"
"""What the name of a comparison's folder starts with."""


def cache_folder(out: Path) -> Path:
    """Where decoded data is stored, next to the runs in `out`; the runs of a comparison share the one next to its folder."""
    return (out.parent if out.name.startswith(COMPARISON) else out) / ".cache"


class RunFolder:
    """The files of one run; nothing else knows where they are."""

    def __init__(self, path: Path):
        self.path = path
        self.store = ClientStore(path / "clients")
        self.checkpoints = Checkpoints(path / "last", self.store)
        self.checkpoint = self.checkpoints.newest
        self.warnings: list[str] = []
        """What `result.json` says about warnings."""
        self.repairs: list[str] | None = None
        """What was mended when the folder was first read, a sentence each."""
        self._digest: str | None = None
        self._read: dict[str, Any] | None = None
        """What `finished_rounds` has read; not longer than until it is restored, because it holds a state."""

    @classmethod
    def new(cls, out: Path, config: Config, name: str | None = None) -> RunFolder:
        """Create a folder for this configuration and seed; an earlier run is never overwritten."""
        stem = name or f"{config.name}-{config.method['name'].rpartition(':')[2]}-{config.digest()}-s{config.run.seed}"
        for attempt in range(1, 10_000):
            path = out / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not path.is_dir():
                    raise FedetError(f"{path} exists and is not a directory: choose another folder with --out") from None
                with cls(path).locked():  # refuse if an earlier run is still in progress
                    if not (path / "config.toml").exists():  # it ended before it began: nothing to keep
                        return cls(path)
            except OSError as error:
                raise files.cant_create(path, error) from error
        raise FedetError(f"{out} already contains 10,000 runs of this configuration: choose another folder with --out")

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of an existing run."""
        if not (path / "config.toml").is_file():
            raise files.not_a_run(path)
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder; the lock is released when the process ends, however it ends."""
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise FedetError(
                f"{self.path} is in use by another process{self._owner()}: wait for it to end, or stop it"
            ) from None
        except OSError as error:
            raise files.write_error(self.path, error) from error
        try:
            files.write_text(self.path / ".pid", f"{os.getpid()}\n")
            yield
        finally:
            lock.release()

    def last_owner(self) -> int | None:
        """The number of the process that worked on the run last, or None if that is not known."""
        try:
            return int((self.path / ".pid").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def owner(self) -> int | None:
        """The process that works on the run, or None: the lock itself is left alone, because a run may be about to take it."""
        import psutil

        pid = self.last_owner()
        try:
            process = None if pid is None else psutil.Process(pid)
            if process is None or process.status() == psutil.STATUS_ZOMBIE:
                return None
            if process.create_time() > (self.path / ".pid").stat().st_mtime + 2:
                return None  # a later process has the number of one that ended
        except (OSError, ValueError, OverflowError, psutil.Error):
            return None
        return pid

    def begin(self, experiment: Experiment, command: str | None) -> None:
        """Record what is about to run and on what; config.toml comes last, because it is what makes the folder a run."""
        facts = environment(command) | {"device": experiment.env.model_cache.device, "rounds": experiment.config.run.rounds}
        files.write_json(self.path / "env.json", facts)
        arrays: dict[str, Any] = experiment.data.split_arrays() | {"archs": np.array([c.arch for c in experiment.clients])}
        with files.replacing(self.path / "split.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)
        files.write_text(self.path / "config.toml", experiment.config.to_toml())

    def config(self) -> Config:
        """The configuration the run was started with."""
        return configuration.load(self.path / "config.toml")

    def digest(self) -> str:
        """The configuration's digest, computed once."""
        if self._digest is None:
            self._digest = self.config().digest()
        return self._digest

    def warn(self, text: str) -> None:
        """Add a warning to the run's result."""
        if text not in self.warnings:
            self.warnings.append(text)

    def log(self, entry: Record, ledger: Ledger, spent: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Add a round to the metrics and the ledger, with what its clients have spent of their privacy so far."""
        lines = [line | (spent or {}).get(line["id"], {}) for line in ledger.lines()]
        metrics.append(self.path / "ledger.jsonl", {"round": entry["round"], "clients": lines})
        metrics.append(self.path / "metrics.jsonl", entry)

    def asked(self) -> list[Record]:
        """Which clients were asked to train with noise, in rounds that were finished or not; no line is ever dropped."""
        return metrics.read(self.path / "asked.jsonl")

    def note_asked(self, number: int, clients: Sequence[int]) -> None:
        """Add a line to these, on the disk before the clients can answer."""
        metrics.append(self.path / "asked.jsonl", {"round": number, "clients": sorted(clients)})
        files.sync(self.path / "asked.jsonl")

    def participations(self, secret: bool) -> Participations:
        """How often each client was asked to train with noise."""
        return Participations(secret, self.asked(), self.metrics())

    def replace_last(self, entry: Record) -> None:
        """Replace the metrics of the last round."""
        metrics.replace_last(self.path / "metrics.jsonl", entry)

    def forget_after(self, number: int) -> None:
        """Drop the log lines of all rounds after this one."""
        for name in LOGS:
            if (self.path / name).exists():
                metrics.truncate(self.path / name, number)

    def metrics(self) -> list[Record]:
        """The metrics of all rounds so far."""
        return metrics.read(self.path / "metrics.jsonl")

    def save(self, fields: dict[str, Any]) -> None:
        """Write the checkpoint, after the log lines of the rounds before it."""
        for name in LOGS:
            if (self.path / name).exists():
                files.sync(self.path / name)
        self.checkpoints.save(fields, self.digest(), best=self._best_model().is_file())

    def repair(self) -> list[str]:
        """Clear away what a killed process left; if the newest checkpoint can't be used, put the one before in its place.

        Done once per process; returns a sentence on what was mended, for the user.
        """
        if self.repairs is None:
            files.remove_temporary(self.path)
            mended = self.checkpoints.repair(self.digest())
            self.repairs = [mended] if mended else []
        return self.repairs

    def finished_rounds(self) -> int:
        """How many rounds the newest usable checkpoint has, which is read and checked for good: `restore` returns it."""
        self._read = self.restore()
        return self._read["round"] if self._read else 0

    def restore(self) -> dict[str, Any] | None:
        """The fields of the newest usable checkpoint, or None if there is none yet; later log lines are dropped."""
        if self._read is not None:
            read, self._read = self._read, None
            return read
        repairs = self.repair()
        fields = self.checkpoints.load(self.digest())
        if fields is None:
            self.forget_after(0)
            self._forget_torn_line()
            return None
        with contextlib.suppress(FedetError):  # a damaged result is written again
            self.warnings[:0] = [text for text in self.result().get("warnings", []) if text not in self.warnings]
        lost = f"{self._best_model()} is missing: the best model of the rounds so far can't be made again"
        if self.checkpoints.meta.get("best") and not self._best_model().is_file() and lost not in repairs:
            repairs.append(lost)
        for text in repairs:
            self.warn(text)
        self.forget_after(fields["round"])
        self._forget_torn_line()
        self._check_logs(fields["round"])
        return fields

    def _forget_torn_line(self) -> None:
        """Drop what a killed process may have left after the last line on who was asked; another one is to follow."""
        if (path := self.path / "asked.jsonl").exists():
            metrics.truncate(path, max((line["round"] for line in self.asked()), default=0))

    def _best_model(self) -> Path:
        return self.path / "best" / "model.safetensors"

    def _check_logs(self, rounds: int) -> None:
        """Refuse to continue logs that lack a finished round."""
        for name in LOGS:
            found = {line["round"] for line in metrics.read(self.path / name)}
            if found != set(range(1, rounds + 1)):
                raise FedetError(
                    f"{self.path / name} has {len(found)} of the {rounds} rounds that are finished{checkpoint.ADVICE}"
                )

    def save_model(
        self, which: str, experiment: Experiment, model: tuple[str, Weights], number: int, accuracy: float | None
    ) -> None:
        """Save the server model of this round as a folder that `fedet.load_model` reads; None if it was not evaluated."""
        about = {"method": experiment.method.name, "data": experiment.config.data.name, "seed": experiment.seed}
        model_folder.save_model(
            self.path / which, experiment.env.build(*model), about | {"round": number, "accuracy": _or_none(accuracy)}
        )

    def write_result(
        self, experiment: Experiment, s: Any, stopped: str | None, participations: Participations | None = None
    ) -> Record:
        """Write and return the summary that `--json` prints; `participations` saves reading all rounds for what was spent."""
        config, models, reference = experiment.config, experiment.env.model_cache, experiment.method.reference
        log = self.metrics() if stopped else []
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
            "c_acc": {} if reference else metrics.summary_cost(log, config.run.report_accuracy if stopped else []),
            "arch_params": {name: models.num_params(name) for name in models.names},
            "server": None if experiment.method.models_at_clients else experiment.env.large,
            "reference": reference,
            "majority": experiment.data.majority,
            "warnings": list(self.warnings),
        }
        if log and log[-1].get("stored"):
            result["stored"] = log[-1]["stored"]
        if config.run.attack:
            hostile = attacks.attackers(experiment)
            result |= {"attackers": sorted(hostile), "caught": attacks.caught(log, hostile)}
        if any("backdoor" in entry for entry in log):
            result["backdoor"] = [entry["backdoor"] for entry in log if "backdoor" in entry][-1]
        if (spending := experiment.spending()) is not None:
            counted = participations or self.participations(spending.settings.secret)
            result["privacy"] = spending.summary(counted.total)
        files.write_json(self.path / "result.json", result)
        return result

    def result(self) -> Record:
        """The summary that was written last."""
        path = self.path / "result.json"
        if not path.is_file():
            raise FedetError(f"{self.path} has no result yet: continue the run with `fedet resume {self.path}`")
        try:
            return files.read_json(path, ResultRecord)
        except FedetError as error:
            raise FedetError(f"{error}; delete it, and `fedet resume {self.path}` writes it again") from None

    def _owner(self) -> str:
        pid = self.last_owner()
        return "" if pid is None else f" (pid {pid})"


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block: weights, logs and client states change together or not at all."""
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


def environment(command: str | None) -> Record:
    """Versions and hardware, and the command that started the run."""
    import psutil
    import torch

    return {
        "fedet": package_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": torch.get_num_threads(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _or_none(value: float | None) -> float | None:
    return None if value is None or value < 0 else value
