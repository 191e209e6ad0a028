"""What is in a runs folder: runs, comparisons and studies; names from a request never lead out of it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedet.errors import FedetError
from fedet.reporting import comparisons as outcomes
from fedet.reporting import results, words
from fedet.reporting.run_data import RunData, find_runs, read_run
from fedet.storage.files import read_json
from fedet.storage.metrics import Record
from fedet.storage.records import ComparisonRecord, StudyRecord
from fedet.storage.run_folder import RunFolder

WRITTEN = ("config.toml", "metrics.jsonl", "result.json")
"""The files of a run whose times say when it went on."""
WATCHED = {*WRITTEN, "report.html", ".pid", "comparison.json", "study.html", "study.json", "sweep.html"}
"""The files whose change is worth a new look."""
SERVED = {
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/plain",
    ".tex": "text/plain",
}
"""The kinds of files that are handed out as they are, and as what."""
Version = tuple[tuple[str, int, int], ...]
T = TypeVar("T")

_runs: dict[Path, tuple[Version, RunData]] = {}
_rows: dict[Path, tuple[Version, Record]] = {}
"""What was made last from the files of a folder, and which files these were; of most runs only the row of the list."""


@dataclass(frozen=True)
class Comparison:
    """A comparison's folder: the runs that have started, how many there will be, and what was left out."""

    name: str
    runs: list[RunData]
    planned: int
    notes: list[str]


def locate(root: Path, name: str) -> Path:
    """The path of this name below the folder; raises `FedetError` for one that is hidden, outside, or missing."""
    parts = name.split("/")
    if not name or any(part in ("", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        raise FedetError(f"there is no '{name}' here")
    path = root.joinpath(*parts)
    if not path.exists() or not _inside(root, path):
        raise FedetError(f"there is no '{name}' here")
    return path


def served_file(root: Path, name: str) -> tuple[Path, str]:
    """A file of a report and its media type."""
    path = locate(root, name)
    if not path.is_file() or path.suffix not in SERVED:
        raise FedetError(f"'{name}' is not a file of a report")
    return path, SERVED[path.suffix]


def run_of(root: Path, name: str) -> RunData:
    """The run of this name; damaged lines of its metrics are left out."""
    return _read(locate(root, name))


def run_rows(root: Path) -> list[Record]:
    """One row per run, the most recent first; a run that can't be read is listed as damaged."""
    rows = [_kept(_rows, path, partial(_run_row, root, path)) for path in find_runs(root) if _inside(root, path)]
    return sorted(rows, key=lambda row: (row["state"] != "running", -row["changed"], row["name"]))


def comparisons(root: Path) -> list[Record]:
    """One row per comparison that can be read, with its outcome so far, the most recent first."""
    rows = []
    for path in root.glob("*/comparison.json"):
        with contextlib.suppress(FedetError):
            rows.append(_kept(_rows, path.parent, partial(_comparison_row, root, path.parent.name)))
    return sorted(rows, key=lambda row: (-row["changed"], row["name"]))


def _comparison_row(root: Path, name: str) -> Record:
    found = comparison_of(root, name)
    rows = results.comparison_rows(found.runs)
    labels = [row["label"] for row in rows if not row["reference"]] or [row["label"] for row in rows]
    return {
        "name": found.name, "methods": [words.proper(label) for label in labels], "outcome": outcomes.sentence(rows, []),
        "data": ", ".join(sorted({words.data_name(run) for run in found.runs})),
        "finished": sum(run.finished for run in found.runs), "planned": found.planned,
        "changed": max((_changed(run.folder) for run in found.runs), default=0.0),
    }  # fmt: skip


def comparison_of(root: Path, name: str) -> Comparison:
    """The comparison of this name, as far as it is."""
    folder = locate(root, name)
    record = read_json(folder / "comparison.json", ComparisonRecord)
    names = [Path(run).name for run in record["runs"]]
    started = [folder / run for run in names if (folder / run / "config.toml").is_file() and _inside(root, folder / run)]
    return Comparison(name, [_read(path) for path in started], len(names), list(record.get("notes", [])))


def studies(root: Path) -> list[Record]:
    """The folders that hold the page of a study or a search: that page, and how far the study is, if it says so."""
    rows = []
    for path in sorted(path for name in ("study.html", "sweep.html") for path in root.glob(f"*/{name}")):
        row: Record = {"name": path.parent.name, "page": path.name, "state": None}
        with contextlib.suppress(FedetError):
            row |= study_of(root, row["name"])
        rows.append(row)
    return rows


def study_of(root: Path, name: str) -> Record:
    """How far the study of this name is: its title, counts, table and state."""
    folder = locate(root, name)
    found = read_json(folder / "study.json", StudyRecord)
    running, left = RunFolder(folder).owner() is not None, found["runs"] > found["finished"]
    return {**found, "state": "running" if running else "stopped" if left else "finished"}


def fingerprint(folder: Path, depth: int = 2) -> Version:
    """A value that changes when a run in this folder, or in a folder of it, goes on."""
    found: list[tuple[str, int, int]] = []
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as listed:
        entries = list(listed)
    is_run = any(entry.name == "config.toml" for entry in entries)
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.name in WATCHED:
                facts = entry.stat()
                found.append((entry.path, facts.st_mtime_ns, facts.st_size))
                if entry.name == ".pid":  # a process may end without a last word
                    found.append((entry.path, RunFolder(folder).owner() or 0, -1))
            elif depth and not is_run and not entry.name.startswith(".") and entry.is_dir():
                found.extend(fingerprint(Path(entry.path), depth - 1))
    return tuple(sorted(found))


@dataclass
class Watch:
    """Looks at each folder once per interval, however many pages show it."""

    interval: float
    _seen: dict[Path, tuple[float, Version]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def version(self, folder: Path) -> Version:
        """The folder's fingerprint, at most an interval old."""
        with self._lock:
            when, version = self._seen.get(folder, (-math.inf, ()))
            if time.monotonic() - when >= self.interval:
                version = fingerprint(folder)
                self._seen[folder] = time.monotonic(), version
            return version


def _inside(root: Path, path: Path) -> bool:
    """Whether the path stays in the folder, links followed."""
    return path.resolve().is_relative_to(root.resolve())


def _run_row(root: Path, folder: Path) -> Record:
    name = folder.relative_to(root).as_posix()
    row: Record = {"name": name, "state": "damaged", "changed": 0.0, "why": ""}
    try:
        run = read_run(folder, skip_damaged=True)
    except FedetError as error:
        return row | {"why": str(error)}
    numbers = results.summary(run)
    return row | {
        "state": results.state(run), "changed": _changed(folder),
        "method": words.method_name(run.method), "data": words.data_name(run), "seed": run.seed,
        "rounds": run.last_round, "planned": run.config.get("run", {}).get("rounds"), "reference": run.reference,
        "accuracy": numbers["accuracy"], "best": numbers["best_accuracy"], "params": numbers["params_total"],
    }  # fmt: skip


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in WRITTEN:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _read(folder: Path) -> RunData:
    """A run, read again only when its files have changed."""
    return _kept(_runs, folder, lambda: read_run(folder, skip_damaged=True))


def _kept(kept: dict[Path, tuple[Version, T]], folder: Path, make: Callable[[], T]) -> T:
    """What is made from a folder's files, made again only when they have changed."""
    version = fingerprint(folder)
    if folder not in kept or kept[folder][0] != version:
        kept[folder] = version, make()
    return kept[folder][1]
