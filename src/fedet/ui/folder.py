"""What is in a runs folder: runs, comparisons and studies; names from a request never lead out of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedet.errors import FedetError
from fedet.reporting import comparisons as outcomes
from fedet.reporting import results, words
from fedet.reporting.run_data import RunData, find_runs, read_run
from fedet.storage.files import read_json
from fedet.storage.metrics import Record
from fedet.storage.records import ComparisonRecord
from fedet.storage.run_folder import RunFolder

WATCHED = ("config.toml", "metrics.jsonl", "result.json", "report.html", ".pid")
"""The files of a run whose change is worth a new look."""
SERVED = {
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".csv": "text/plain",
    ".tex": "text/plain",
}
"""The kinds of files that are handed out as they are, and as what."""


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


def state(run: RunData) -> str:
    """`finished`, `running`, or `stopped`: it has more rounds to do and nobody is doing them."""
    if run.finished:
        return "finished"
    return "running" if RunFolder(run.folder).owner() is not None else "stopped"


def run_rows(root: Path) -> list[Record]:
    """One row per run, the most recent first; a run that can't be read is listed as damaged."""
    rows = [_run_row(root, folder) for folder in find_runs(root) if _inside(root, folder)]
    return sorted(rows, key=lambda row: (row["state"] != "running", -row["changed"], row["name"]))


def comparisons(root: Path) -> list[Record]:
    """One row per comparison that can be read, with its outcome so far, the most recent first."""
    rows = []
    for path in root.glob("*/comparison.json"):
        with contextlib.suppress(FedetError):
            rows.append(_comparison_row(comparison_of(root, path.parent.name)))
    return sorted(rows, key=lambda row: (-row["changed"], row["name"]))


def _comparison_row(found: Comparison) -> Record:
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


def studies(root: Path) -> list[tuple[str, str]]:
    """The folders that hold the page of a study or a search, and that page."""
    return sorted((path.parent.name, path.name) for name in ("study.html", "sweep.html") for path in root.glob(f"*/{name}"))


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """A value that changes when a run in this folder, or in a folder of it, goes on."""
    found = []
    for depth in ("", "*/", "*/*/"):
        for name in WATCHED:
            for path in folder.glob(depth + name) if depth else [folder / name]:
                with contextlib.suppress(OSError):
                    facts = path.stat()
                    found.append((str(path), facts.st_mtime_ns, facts.st_size))
                    if name == ".pid":  # a process may end without a last word
                        found.append((str(path), RunFolder(path.parent).owner() or 0, -1))
    return tuple(sorted(found))


def _inside(root: Path, path: Path) -> bool:
    """Whether the path stays in the folder, links followed."""
    return path.resolve().is_relative_to(root.resolve())


def _run_row(root: Path, folder: Path) -> Record:
    name = folder.relative_to(root).as_posix()
    row: Record = {"name": name, "state": "damaged", "changed": 0.0, "why": ""}
    try:
        run = _read(folder)
    except FedetError as error:
        return row | {"why": str(error)}
    numbers = results.summary(run)
    return row | {
        "state": state(run), "changed": _changed(folder),
        "method": words.method_name(run.method), "data": words.data_name(run), "seed": run.seed,
        "rounds": run.last_round, "planned": run.config.get("run", {}).get("rounds"), "reference": run.reference,
        "accuracy": numbers["accuracy"], "best": numbers["best_accuracy"], "params": numbers["params_total"],
    }  # fmt: skip


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in WATCHED[:3]:
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _read(folder: Path) -> RunData:
    return _read_once(folder, fingerprint(folder))


@lru_cache(maxsize=256)
def _read_once(folder: Path, version: Any) -> RunData:
    """A run, read again only when its files have changed."""
    return read_run(folder, skip_damaged=True)
