"""Records: what is kept of a run, as one small JSON file without weights, named after the run's configuration."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from fedet import config as configuration
from fedet.config import Config
from fedet.errors import FedetError
from fedet.reporting import statistics
from fedet.reporting.run_data import RunData, read_run
from fedet.storage.files import read_json, write_text
from fedet.storage.metrics import c_acc
from fedet.storage.records import ConfigRecord, Count, Schema

FORMAT = 1
COUNTS = ("params_up", "params_down", "bytes_up", "bytes_down")
VERSIONS = ("fedet", "commit", "python", "torch", "numpy")
ROUNDED = 2e-6
"""Accuracies in records have six digits."""
MACHINE = ("cpu", "cpu_capability", "cores", "memory_gb", "device")


Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Curves(Schema):
    """The evaluated rounds, as columns of equal length."""

    round: list[Count]
    accuracy: list[Share]
    loss: list[Finite | None]
    params_total: list[Count]
    seconds: list[Finite]
    models: dict[str, list[Share | None]]
    val_accuracy: list[Share | None] | None = None

    @model_validator(mode="after")
    def _columns(self) -> Curves:
        columns: list[Sequence[object]] = [self.accuracy, self.loss, self.params_total, self.seconds, *self.models.values()]
        columns += [] if self.val_accuracy is None else [self.val_accuracy]
        if any(len(column) != len(self.round) for column in columns):
            raise ValueError("its columns differ in length")
        for name, column in (("rounds", self.round), ("parameters sent", self.params_total)):
            if sorted(column) != column:
                raise ValueError(f"the {name} do not rise")
        return self


class Spent(Schema):
    """Where a run's time went; parts that are not listed here may have been added later."""

    total: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Summary(Schema):
    """The numbers that tables show."""

    rounds: Count
    stopped: str | None
    best: Share | None
    best_round: Count | None
    late: Share | None
    final: Share | None
    converged: bool | None
    params_up: Count
    params_down: Count
    bytes_up: Count
    bytes_down: Count
    seconds: Spent
    c_acc: dict[str, Count | None]
    lost_rounds: Count
    failed_clients: Count
    arch_params: dict[str, Count]
    server: str | None
    failed: str | None = None


class RunRecord(Schema):
    """A record, whose results follow from its curves: a number that was changed afterwards shows."""

    format: int
    key: str
    config: ConfigRecord
    curves: Curves
    result: Summary
    versions: dict[str, Any]
    machine: dict[str, Any]

    @model_validator(mode="after")
    def _follows(self) -> RunRecord:
        found, curve, rounds = self.result, self.curves.accuracy, self.curves.round
        at_best = dict(zip(rounds, curve, strict=True)).get(found.best_round) if found.best_round is not None else None
        late = statistics.late(curve)
        wrong = {
            "best": found.best != at_best,
            "late": (found.late is None) != (late is None) or abs((found.late or 0.0) - (late or 0.0)) > ROUNDED,
            "final": found.final != (curve[-1] if curve else None),
            "rounds": bool(rounds) and rounds[-1] > found.rounds,
        }
        if found.failed is None and rounds and rounds[-1] == found.rounds:
            wrong["params_up and params_down"] = found.params_up + found.params_down != self.curves.params_total[-1]
        for name, differs in wrong.items():
            if differs:
                raise ValueError(f"result.{name} does not follow from its curves")
        return self


@dataclass(frozen=True)
class Record:
    """A run's record, as read from its file."""

    key: str
    config: dict[str, Any]
    curves: dict[str, Any]
    result: dict[str, Any]
    versions: dict[str, Any]
    machine: dict[str, Any]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["run"]["seed"])

    @property
    def failed(self) -> str | None:
        """Why the run has no result, or None if it has one."""
        text = self.result.get("failed")
        return None if text is None else str(text)

    @property
    def params_total(self) -> int:
        """Parameters sent in both directions."""
        return int(self.result["params_up"]) + int(self.result["params_down"])

    def c_acc(self, target: float) -> int | None:
        """Parameters sent until this accuracy was first reached, None if it was not."""
        columns = zip(self.curves["accuracy"], self.curves["params_total"], strict=True)
        return c_acc([{"accuracy": accuracy, "params_total": sent} for accuracy, sent in columns], target)


def key(config: Config) -> str:
    """What identifies a run: its data and method in words, the digest of its configuration, its seed and its rounds.

    A method whose results have changed has its revision in it, too, and so have defences, if the run has any.
    """
    revision = configuration.method_class(config.method["name"]).revision
    words = [_word(config.data.name), _word(config.method["name"]), config.digest(), *([f"v{revision}"] if revision else [])]
    words += [f"g{config.run.robust.revision}"] if config.run.robust else []
    return f"{'-'.join(words)}-s{config.run.seed}-r{config.run.rounds}"


class Store:
    """A folder of records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> Record | None:
        """The record of the run with this key, or None."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            return read(path)
        return read(self._renamed[name]) if name in self._renamed else None

    def put(self, record: Record) -> Path:
        """Write a record, replacing an earlier one of the same run."""
        path = self.folder / f"{record.key}.json"
        parts = {"format": FORMAT, **dataclasses.asdict(record)}
        lines = [f"{json.dumps(name)}:{json.dumps(part, separators=(',', ':'))}" for name, part in parts.items()]
        write_text(path, "{" + ",\n".join(lines) + "}\n")
        return path

    def all(self) -> list[Record]:
        """Every record, by name."""
        return [read(path) for path in sorted(self.folder.glob("*.json"))]

    @functools.cached_property
    def _renamed(self) -> dict[str, Path]:
        """Records of versions in which the same configuration had another digest, because it had fewer keys.

        What was not set then has today's default; where that gives other results, the method has another revision.
        """
        found = {}
        for path in sorted(self.folder.glob("*.json")):
            config = read(path).config
            try:
                now = key(configuration.load(config)) if ":" not in config["method"]["name"] else path.stem
            except FedetError:  # of a version whose configurations this one does not read
                continue
            if now != path.stem and _revision(now) == _revision(path.stem):
                found[now] = path
        return found


def _revision(name: str) -> str:
    """The revisions of the method and of the defences in a record's name, empty if it has none."""
    found = re.search(r"-[0-9a-f]{8}((?:-[vg]\d+)+)-s\d+-r\d+$", name)
    return found[1] if found else ""


def read(path: Path) -> Record:
    """Read a record."""
    value = read_json(path, RunRecord)
    if value["key"] != path.stem:
        raise FedetError(f"{path} is damaged: it is the record of the run {value['key']}")
    if value["format"] != FORMAT:
        raise FedetError(f"{path} is a record of another version of fedet (format {value['format']}): update fedet")
    return Record(**{name: value[name] for name in Record.__dataclass_fields__})


def of_run(folder: Path, config: Config, *, commit: str | None = None, failed: str | None = None) -> Record:
    """The record of a finished run, or of one that `failed`, from its folder."""
    run = read_run(folder)
    if not run.finished and failed is None:
        raise FedetError(f"{folder} is not finished: continue it with `fedet resume {folder}`")
    env = run.env | ({"commit": commit} if commit else {})
    return Record(
        key=key(config),
        config=_portable(config),
        curves=_curves(run, config),
        result=_summary(run, config, failed),
        versions={name: env[name] for name in VERSIONS if env.get(name) is not None},
        machine={name: env[name] for name in MACHINE if env.get(name) is not None},
    )


def collect(folders: Iterable[Path], store: Store, commit: str | None = None) -> tuple[list[Path], list[str]]:
    """Write the records of all finished runs in or below these folders; returns their files and what was left out."""
    written, left_out = [], []
    for folder in folders:
        found = sorted(path.parent for path in folder.glob("**/config.toml") if path.parent.name not in ("best", "last"))
        if not found:
            left_out.append(f"{folder}: no run folders")
        for run in found:
            try:
                written.append(store.put(of_run(run, configuration.load(run / "config.toml"), commit=commit)))
            except FedetError as error:
                left_out.append(str(error))
    return written, left_out


def _word(name: str) -> str:
    """The last part of a name or path, without characters that a file name should not have."""
    return re.sub(r"[^\w.]+", "-", re.split(r"[:/\\]", name.rstrip("/"))[-1]).strip("-.") or "run"


def _portable(config: Config) -> dict[str, Any]:
    """The configuration without the folder of the data and without what only concerns Flower."""
    plain = config.model_dump(mode="json", exclude={"flower": True, "data": {"dir"}}, exclude_none=True)
    return dict(plain)


def _due(run: RunData, config: Config) -> list[dict[str, Any]]:
    """The evaluated rounds; not a round that was evaluated only because a shorter run ended with it."""
    every, last = config.run.eval_every, run.last_round
    finite = [m for m in run.metrics if m.get("accuracy") is not None and math.isfinite(m["accuracy"])]
    return [m for m in finite if m["round"] % every == 0 or m["round"] == last]


def _curves(run: RunData, config: Config) -> dict[str, Any]:
    rounds, every_all = _due(run, config), config.run.eval_all_every
    clock, seconds = 0.0, {}
    for m in run.metrics:
        clock += float(m.get("seconds", {}).get("round", 0.0))
        seconds[m["round"]] = round(clock, 1)
    out: dict[str, Any] = {
        "round": [m["round"] for m in rounds],
        "accuracy": [_digits(m["accuracy"]) for m in rounds],
        "loss": [_digits(m.get("loss")) for m in rounds],
        "params_total": [m["params_total"] for m in rounds],
        "seconds": [seconds[m["round"]] for m in rounds],
    }
    if any(m.get("val_accuracy") is not None for m in rounds):
        out["val_accuracy"] = [_digits(m.get("val_accuracy")) for m in rounds]
    out["models"] = _model_curves(rounds, every_all, run.last_round)
    return out


def _model_curves(rounds: Sequence[Mapping[str, Any]], every: int, last: int) -> dict[str, list[float | None]]:
    """The accuracies of the other models, in the rounds in which all models are evaluated."""
    full = [dict(m.get("models") or {}) if m["round"] % every == 0 or m["round"] == last else {} for m in rounds]
    names = list(dict.fromkeys(name for models in full for name in list(models)[1:]))  # the first one is the curve itself
    return {name: [_digits(models.get(name)) for models in full] for name in names}


def _summary(run: RunData, config: Config, failed: str | None) -> dict[str, Any]:
    rounds = _due(run, config)
    curve = [float(m["accuracy"]) for m in rounds]
    best = max(rounds, key=_selection, default={})
    parts = ("round", "clients", "server", "evaluate")
    spent = {part: sum(float(m.get("seconds", {}).get(part, 0.0)) for m in run.metrics) for part in parts}
    return {
        "rounds": run.last_round,
        "stopped": None if failed else run.result.get("stopped"),
        "best": _digits(best.get("accuracy")),
        "best_round": best.get("round"),
        "late": _digits(statistics.late(curve)),
        "final": _digits(curve[-1] if curve else None),
        "converged": statistics.converged(curve),
        **{name: sum(int(m.get(name, 0)) for m in run.metrics) for name in COUNTS},
        "seconds": {("total" if part == "round" else part): round(value, 1) for part, value in spent.items()},
        "c_acc": {f"{level:g}": c_acc(rounds, level) for level in config.run.report_accuracy},
        "lost_rounds": sum(bool(m.get("lost")) for m in run.metrics),
        "failed_clients": sum(len(m.get("failures") or []) for m in run.metrics),
        "arch_params": run.result.get("arch_params") or {},
        "server": run.result.get("server"),
        **{key: run.result[key] for key in ("caught", "backdoor") if key in run.result},
        **({"failed": failed} if failed else {}),
    }


def _selection(metrics: Mapping[str, Any]) -> float:
    """What the best round is chosen by: the validation split if there is one."""
    value = metrics.get("val_accuracy")
    return float(metrics["accuracy"] if value is None else value)


def _digits(value: float | None) -> float | None:
    """Six digits are enough for any test set; a loss that is not finite has none."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None
