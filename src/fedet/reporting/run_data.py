"""Read run folders; nothing that a folder contains or refers to is ever executed."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedet.config.sources import parse_toml, read_text
from fedet.errors import ConfigError, FedetError
from fedet.methods import REFERENCES
from fedet.storage import metrics as logs
from fedet.storage.files import conform, not_a_run, read_json
from fedet.storage.metrics import Record
from fedet.storage.records import AuditRecord, BoundRecord, ConfigRecord, EnvRecord, ResultRecord

MAX_SPLIT = 1 << 30
"""Bytes of the arrays in split.npz; a small archive can say that it holds any number."""


@dataclass(frozen=True)
class RunData:
    """The contents of a run folder; for an unfinished run, what there is so far."""

    folder: Path
    toml: str
    config: Record
    env: Record
    metrics: list[Record]
    result: Record
    split: dict[str, NDArray[Any]]

    @property
    def finished(self) -> bool:
        """Whether the run ended, after its last round or by a stopping rule."""
        return self.result.get("stopped") is not None

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["method"]["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config.get("run", {}).get("seed", self.result.get("seed", 0)))

    @property
    def reference(self) -> bool:
        """Whether the method is a reference: not federated, never ranked."""
        return bool(self.result.get("reference", self.method in {cls.name for cls in REFERENCES}))

    @property
    def kept_by_clients(self) -> Record | None:
        """The accuracies of the clients' own models if the method has no server model, so that its accuracy is their mean."""
        last: Record = next((m for m in reversed(self.metrics) if m.get("models")), {})
        main = next(iter(last.get("models") or {}), "")
        found: Record | None = (last.get("stored") or {}).get(main)
        return found if self.result and self.result.get("server") is None else None

    def bound(self) -> Record | None:
        """What `fedet bound` found, None if it was not called for this run."""
        path = self.folder / "bound.json"
        return read_json(path, BoundRecord) if path.is_file() else None

    def audit(self) -> Record | None:
        """What `fedet audit` found, None if it was not called for this run."""
        path = self.folder / "audit.json"
        return read_json(path, AuditRecord) if path.is_file() else None

    @property
    def last_round(self) -> int:
        """The number of rounds so far."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0


def find_runs(out: Path) -> list[Path]:
    """The run folders in a directory, those of comparisons too, by name."""
    folders = sorted(path.parent for path in [*out.glob("*/config.toml"), *out.glob("*/*/config.toml")])
    return [folder for folder in folders if ".cache" not in folder.parts]


def read_run(folder: str | os.PathLike[str], *, skip_damaged: bool = False) -> RunData:
    """Read a run folder, finished or not; `skip_damaged` leaves out rounds whose line in the metrics can't be read."""
    folder = Path(folder)
    path = folder / "config.toml"
    if not path.is_file():
        raise not_a_run(folder)
    try:
        toml = read_text(path)
        plain = parse_toml(toml, str(path))
    except ConfigError as error:
        raise FedetError(f"{path} is damaged: {error}") from None
    config = conform(plain, ConfigRecord, str(path))
    lines = logs.read(folder / "metrics.jsonl", skip_damaged=skip_damaged)
    by_round = {record["round"]: record for record in lines}  # of two, the later one counts
    env = read_json(folder / "env.json", EnvRecord) if (folder / "env.json").is_file() else {}
    result = read_json(folder / "result.json", ResultRecord) if (folder / "result.json").is_file() else {}
    return RunData(folder, toml, config, env, [by_round[n] for n in sorted(by_round)], result, _read_split(folder))


def _read_split(folder: Path) -> dict[str, NDArray[Any]]:
    path = folder / "split.npz"
    if not path.is_file():
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_SPLIT:
                raise ValueError(f"its arrays have more than {MAX_SPLIT >> 20} MB")
        with np.load(path, allow_pickle=False) as arrays:
            split = {name: arrays[name] for name in arrays.files}
    except Exception as error:  # the parsers raise many types, depending on where the damage is
        raise FedetError(f"{path} is damaged: {error}") from None
    counts = split.get("label_counts")
    if counts is not None and (counts.ndim != 2 or counts.dtype.kind not in "iu" or not counts.size or counts.min() < 0):
        raise FedetError(f"{path} is damaged: label_counts is not a table of numbers")
    archs = split.get("archs")
    if archs is not None and (archs.ndim != 1 or (counts is not None and len(archs) != len(counts))):
        raise FedetError(f"{path} is damaged: archs does not list one architecture per client")
    return split
