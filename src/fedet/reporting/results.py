"""Read run folders back, and what one or several of them say, as plain data."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedet.errors import FedetError

Plain = dict[str, Any]
IRRELEVANT = ("name", "data.dir", "run.seed", "run.workers", "run.checkpoint_every")
"""Keys in which runs of one group may differ."""


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read; of an unfinished run, what is there so far."""

    folder: Path
    toml: str
    config: Plain
    env: Plain
    metrics: list[Plain]
    result: Plain
    split: dict[str, NDArray[Any]]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, by its last round or by a stopping rule."""
        return self.result.get("stopped") is not None

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["method"]["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config.get("run", {}).get("seed", self.result.get("seed", 0)))


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read a run folder; a torn last line and missing later files are those of a run that was cut off."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise FedetError(f"{folder} is no run folder: it has no config.toml")
    try:
        toml = (folder / "config.toml").read_text(encoding="utf-8")
        config = tomllib.loads(toml)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedetError(f"{folder / 'config.toml'} is damaged: {error}") from None
    if not isinstance(config.get("method"), dict) or "name" not in config["method"]:
        raise FedetError(f"{folder} is no run folder: its config.toml names no method")
    metrics = _read_lines(folder / "metrics.jsonl")
    return RunRecord(
        folder, toml, config, _read_json(folder / "env.json"), metrics, _read_json(folder / "result.json"), _read_split(folder)
    )


def summary(run: RunRecord) -> Plain:
    """The run's headline numbers; None where there is none (yet)."""
    rounds, scored = run.metrics, evaluated(run)
    best = max(scored, key=_selection, default={})
    counted: Plain = {
        "rounds": rounds[-1]["round"] if rounds else 0,
        "accuracy": scored[-1]["accuracy"] if scored else None,
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        **{key: sum(int(m.get(key, 0)) for m in rounds) for key in ("params_up", "params_down", "bytes_up", "bytes_down")},
        "seconds": sum(float(m.get("seconds", {}).get("round", 0)) for m in rounds),
    }
    told = {key: value for key, value in run.result.items() if key in counted and value is not None} if run.finished else {}
    out = counted | told
    out["params_total"] = out["params_up"] + out["params_down"]
    out["c_acc"] = {x: _cost(run, x) for x in targets([run])}
    out["large_params"] = cost_with_large(run)
    return out


def evaluated(run: RunRecord) -> list[Plain]:
    """The rounds in which the server's model was tested, with a finite result."""
    return [m for m in run.metrics if isinstance(m.get("accuracy"), int | float) and math.isfinite(m["accuracy"])]


def targets(runs: Iterable[RunRecord]) -> list[str]:
    """The accuracies x whose C_acc(x) is reported, as text, ascending."""
    found = set()
    for run in runs:
        found |= {f"{float(x):g}" for x in run.config.get("run", {}).get("report_accuracy", [])}
        found |= {f"{float(x):g}" for x in run.result.get("c_acc") or {}}
    return sorted(found, key=float)


def cost_with_large(run: RunRecord) -> int | None:
    """Parameters that the same rounds cost with the server's model on every client, if known."""
    large = (run.result.get("arch_params") or {}).get(run.result.get("server"))
    if not large or not run.metrics:
        return None
    return int(large) * sum(len(m.get("cohort", [])) + len(m.get("replied", [])) for m in run.metrics)


def leaders(run: RunRecord) -> tuple[NDArray[Any], list[int], NDArray[Any]] | None:
    """Mean consensus weight per client (strongest first) and class over its rounds, and each class's number of labels."""
    notes = [m["notes"]["confidence"] for m in run.metrics if (m.get("notes") or {}).get("confidence")]
    if not notes:
        return None
    classes = len(notes[0]["labels"])
    led: dict[int, NDArray[Any]] = {}
    seen: dict[int, NDArray[Any]] = {}
    for note in notes:
        count = np.asarray(note["labels"], dtype=float)
        for client, alpha in zip(note["clients"], note["alpha"], strict=True):
            led[client] = led.get(client, np.zeros(classes)) + count * np.asarray(alpha, dtype=float)
            seen[client] = seen.get(client, np.zeros(classes)) + count
    order = sorted(led, key=lambda k: (-float(led[k].sum()), k))
    matrix = np.stack([np.where(seen[k] > 0, led[k] / np.maximum(seen[k], 1), np.nan) for k in order])
    return matrix, order, np.sum([note["labels"] for note in notes], axis=0)


def grouped(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ only by seed, under one label: the method, and where methods repeat, what differs.

    If that is much and configurations have names of their own, these serve. A parameter budget may differ too, as under equal
    traffic, unless that would put one seed into a group twice.
    """
    ignored = {*IRRELEVANT, "run.budget_params"}
    groups = _groups(runs, ignored)
    if any(len({run.seed for run in group}) < len(group) for group in groups):
        ignored = {*IRRELEVANT}
        groups = _groups(runs, ignored)
    return {_label(group, groups, ignored): sorted(group, key=lambda run: run.seed) for group in groups}


def comparison_rows(runs: Sequence[RunRecord]) -> list[Plain]:
    """One row per label: means over seeds, sample standard deviations (None for one seed), C_acc over those that got there."""
    rows, xs = [], targets(runs)
    for label, group in grouped(runs).items():
        found = [summary(run) for run in group]
        row: Plain = {"label": label, "n": len(group), "seeds": [run.seed for run in group]}
        for name, key in (("best_accuracy", "best_accuracy"), ("final_accuracy", "accuracy")):
            row[name], row[f"{name}_std"] = _spread([s[key] for s in found])
        for key in ("rounds", "params_total", "seconds"):
            row[key] = _spread([s[key] for s in found])[0]
        for x in xs:
            reached = [s["c_acc"][x] for s in found if s["c_acc"].get(x) is not None]
            row[f"c_acc_{x}"], row[f"reached_{x}"] = _spread(reached)[0], len(reached)
        row["unfinished"] = sum(not run.finished for run in group)
        rows.append(row)
    return rows


def table(rows: Sequence[Plain], plus_minus: str = " ± ") -> tuple[list[str], list[list[str]]]:
    """The rows as text to be read: a head and cells, for the terminal, HTML and LaTeX."""
    xs = [key.removeprefix("c_acc_") for key in (rows[0] if rows else {}) if key.startswith("c_acc_")]
    head = ["method", "best accuracy, %", "final accuracy, %", "n", "rounds", "parameters"]
    head += [f"C_acc({100 * float(x):g}%)" for x in xs] + ["seconds"]
    body = [
        [
            row["label"] + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else ""),
            _percent(row["best_accuracy"], row["best_accuracy_std"], plus_minus),
            _percent(row["final_accuracy"], row["final_accuracy_std"], plus_minus),
            str(row["n"]),
            f"{row['rounds']:g}",
            si(row["params_total"]),
            *[_reached(row, x) for x in xs],
            f"{row['seconds']:,.0f}" if row["seconds"] >= 10 else f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    return head, body


def to_csv(rows: Sequence[Plain]) -> str:
    """The rows with all their digits; accuracies are fractions."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["label"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {"seeds": " ".join(map(str, row["seeds"]))})
    return out.getvalue()


def to_tex(rows: Sequence[Plain]) -> str:
    """The rows as a tabular for the LaTeX package booktabs."""
    head, body = table(rows, r" $\pm$ ")
    lines = [_tex_row([_tex(cell).replace(r"C\_acc", r"$C_{\text{acc}}$") for cell in head]), r"\midrule"]
    lines += [_tex_row([_tex(row[0]), *(cell.replace("–", "--") for cell in row[1:])]) for row in body]
    begin = [r"% needs \usepackage{amsmath,booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}", ""])


def si(value: float) -> str:
    """A count with three digits and a prefix, as on the axes: 950, 431k, 10M, 1.2G."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{float(f'{value / 10**power:.3g}'):g}{prefix}"
    return f"{value:.3g}" if value % 1 else f"{value:.0f}"


def flat(config: Mapping[str, Any], prefix: str = "") -> Plain:
    """Nested tables as one, keys joined by dots."""
    out: Plain = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _read_json(path: Path) -> Plain:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FedetError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise FedetError(f"{path} is damaged: it does not hold an object")
    return value


def _read_lines(path: Path) -> list[Plain]:
    """One object per line, by round; the later of two with the same number counts, as after a resumed round."""
    lines = path.read_bytes().strip().split(b"\n") if path.is_file() else []
    rounds: dict[int, Plain] = {}
    for i, line in enumerate(lines):
        try:
            if line.strip():
                value = json.loads(line)
                rounds[int(value["round"])] = value
        except (ValueError, KeyError, TypeError) as error:
            if i < len(lines) - 1:
                raise FedetError(f"{path} is damaged in line {i + 1}: {error}") from None
    return [rounds[number] for number in sorted(rounds)]


def _read_split(folder: Path) -> dict[str, NDArray[Any]]:
    path = folder / "split.npz"
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FedetError(f"{path} is damaged: {error}") from None


def _selection(metrics: Plain) -> float:
    """What the best round is chosen by: the validation split if there is one."""
    value = metrics.get("val_accuracy", metrics["accuracy"])
    return float(value) if value is not None and math.isfinite(value) else -1.0


def _cost(run: RunRecord, x: str) -> int | None:
    told = {f"{float(key):g}": value for key, value in (run.result.get("c_acc") or {}).items()} if run.finished else {}
    if x in told:
        return None if told[x] is None else int(told[x])
    return next((int(m["params_total"]) for m in evaluated(run) if m["accuracy"] >= float(x)), None)


def _groups(runs: Sequence[RunRecord], ignored: set[str]) -> list[list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps({k: v for k, v in flat(run.config).items() if k not in ignored}, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _label(group: list[RunRecord], groups: list[list[RunRecord]], ignored: set[str]) -> str:
    method = group[0].method
    tables = [flat(rival[0].config) for rival in groups if rival[0].method == method]
    keys = sorted({key for t in tables for key in t} - ignored)
    differing = [key for key in keys if any(t.get(key) != tables[0].get(key) for t in tables)]
    own = flat(group[0].config)
    if len(differing) > 2 and len({t.get("name") for t in tables}) == len(tables):
        return f"{method} ({own['name']})"  # files of one's own with names of their own
    parts = [f"{key.removeprefix('method.')}={_value(own.get(key))}" for key in differing]
    return f"{method} ({', '.join(parts)})" if parts else method


def _value(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else None
    mean = int(mean) if mean is not None and mean.is_integer() and all(isinstance(v, int) for v in known) else mean
    return mean, statistics.stdev(known) if len(known) > 1 else None


def _percent(mean: float | None, std: float | None, plus_minus: str) -> str:
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" + (f"{plus_minus}{100 * std:.2f}" if std is not None else "")


def _reached(row: Plain, x: str) -> str:
    if not row[f"reached_{x}"]:
        return "not reached"
    part = f" ({row[f'reached_{x}']} of {row['n']})" if row[f"reached_{x}"] < row["n"] else ""
    return f"{si(row[f'c_acc_{x}'])}{part}"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
