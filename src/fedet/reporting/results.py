"""What one or several runs show: summaries, rows and tables as plain data."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedet.errors import FedetError
from fedet.reporting.references import HEADING, majority_rows
from fedet.reporting.run_data import RunData
from fedet.storage.files import conform
from fedet.storage.metrics import Record
from fedet.storage.records import Confidence
from fedet.storage.run_folder import RunFolder

IRRELEVANT = ("name", "data.dir", "run.seed", "run.workers", "run.checkpoint_every")
"""Keys in which the runs of one row may differ."""
OFTEN_IRRELEVANT = ("run.budget_params", "run.threads")
"""Keys in which they may differ too, unless that would put a seed into a row twice."""

NOT_REACHED = "not reached"
MODEL_HEAD = ("method", "model", "parameters", "final, %", "best, %")


def state(run: RunData) -> str:
    """`finished`, `running`, or `stopped`: it has more rounds to do and nobody is doing them."""
    if run.finished:
        return "finished"
    return "running" if RunFolder(run.folder).owner() is not None else "stopped"


def summary(run: RunData) -> Record:
    """The run's headline numbers; None for those that are not known (yet)."""
    rounds, scored = run.metrics, evaluated(run)
    best = max(scored, key=_selection, default={})
    counted: Record = {
        "rounds": run.last_round,
        "accuracy": scored[-1]["accuracy"] if scored else None,
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        **{key: sum(int(m.get(key, 0)) for m in rounds) for key in ("params_up", "params_down", "bytes_up", "bytes_down")},
        "seconds": sum(float(m.get("seconds", {}).get("round", 0)) for m in rounds),
    }
    told = {key: value for key, value in run.result.items() if key in counted and value is not None} if run.finished else {}
    out = counted | told
    out["accuracy_round"] = scored[-1]["round"] if scored else None
    out["params_total"] = out["params_up"] + out["params_down"]
    out["c_acc"] = {} if run.reference else {x: _cost(run, x) for x in targets([run])}
    out["large_params"] = cost_with_large(run)
    return out


def model_rows(run: RunData) -> list[Record]:
    """Every model of the run that was evaluated, the method's output first: its size, and its final and best accuracy.

    `final` is the accuracy in round `final_round`, which is an earlier round than the last if the model was not evaluated
    in that one; use `noted` to show it.
    """
    sizes, large = run.result.get("arch_params") or {}, run.result.get("server")
    rows: list[Record] = []
    for name, points in model_points(run).items():
        main = not rows
        arch = large if main and name not in sizes else name
        best = max(points, key=lambda number: points[number])
        rows.append(
            {
                "name": name,
                "arch": arch if arch != name else None,
                "size": sizes.get(arch),
                "main": main,
                "final": points[max(points)],
                "final_round": max(points),
                "best": points[best],
                "best_round": best,
            }
        )
    return rows


def mean_model_rows(group: Sequence[RunData]) -> list[Record]:
    """The `model_rows` of runs that differ only by seed, with means over those that have the model.

    `earlier` lists the rounds of final accuracies that are not from their run's last round.
    """
    rows: list[Record] = []
    tables = [{row["name"]: row for row in model_rows(run)} for run in group]
    for name in dict.fromkeys(name for table in tables for name in table):
        found = [(run, table[name]) for run, table in zip(group, tables, strict=True) if name in table]
        earlier = sorted({row["final_round"] for run, row in found if row["final_round"] != run.last_round})
        means = {key: statistics.fmean(row[key] for _, row in found) for key in ("final", "best")}
        rows.append({**found[0][1], **means, "earlier": earlier})
    return rows


def model_cells(groups: Mapping[str, Sequence[RunData]]) -> list[list[str]]:
    """The models of a comparison as text, under `MODEL_HEAD`; a method is named once."""
    return [
        [
            "" if number else label,
            f"{row['name']} ({row['arch']})" if row["arch"] else str(row["name"]),
            "–" if row["size"] is None else f"{row['size']:,}",
            noted(f"{100 * row['final']:.2f}", *row["earlier"], last=-1),
            f"{100 * row['best']:.2f}",
        ]
        for label, group in groups.items()
        for number, row in enumerate(mean_model_rows(group))
    ]


def model_points(run: RunData) -> dict[str, dict[int, float]]:
    """The accuracies of every model that was evaluated, by round; the method's output first."""
    points: dict[str, dict[int, float]] = {}
    for m in evaluated(run):
        for name, accuracy in (m.get("models") or {"server": m["accuracy"]}).items():
            if math.isfinite(accuracy):
                points.setdefault(name, {})[m["round"]] = accuracy
    return points


def noted(text: str, *rounds: int | None, last: int) -> str:
    """The text of a value, with its round if that is not the last one: values without a note are all from the last round."""
    earlier = sorted({number for number in rounds if number is not None and number != last})
    if not earlier:
        return text
    return f"{text} ({'round' if len(earlier) == 1 else 'rounds'} {', '.join(map(str, earlier))})"


def evaluated(run: RunData) -> list[Record]:
    """The rounds in which the server model was evaluated, with a finite result."""
    return [m for m in run.metrics if isinstance(m.get("accuracy"), int | float) and math.isfinite(m["accuracy"])]


def targets(runs: Iterable[RunData]) -> list[str]:
    """The accuracies x whose C_acc(x) is reported, as text, ascending."""
    found = set()
    for run in runs:
        found |= {f"{float(x):g}" for x in run.config.get("run", {}).get("report_accuracy", [])}
        found |= {f"{float(x):g}" for x in run.result.get("c_acc") or {}}
    return sorted(found, key=float)


def cost_with_large(run: RunData) -> int | None:
    """Parameters that the same rounds would have sent with the server model on every client, if known."""
    large = (run.result.get("arch_params") or {}).get(run.result.get("server"))
    if not large or not run.metrics:
        return None
    return int(large) * sum(len(m.get("cohort", [])) + len(m.get("replied", [])) for m in run.metrics)


Leaders = tuple[NDArray[Any], list[int], NDArray[Any]]
"""Mean weights by client and class, the clients, and each class's number of labels."""


def leaders(run: RunData) -> Leaders | None:
    """Mean consensus weight per client (strongest first) and class over its rounds, and each class's number of labels."""
    notes = confidences(run)
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


def confidences(run: RunData) -> list[Record]:
    """The notes on who led the consensus, of the rounds that have them; a method of one's own may note something else."""
    found = []
    for m in run.metrics:
        note = (m.get("notes") or {}).get("confidence")
        with contextlib.suppress(FedetError):
            found.append(conform(note, Confidence, "the note"))
    classes = len(found[0]["labels"]) if found else 0
    return [
        note
        for note in found
        if note["clients"] and len(note["clients"]) == len(note["alpha"])
        and all(len(row) == classes for row in [note["labels"], *note["alpha"]])
    ]  # fmt: skip


def equal_share(run: RunData) -> float:
    """The weight of each client if all had the same, on average over the rounds."""
    return 1 / statistics.fmean(len(note["clients"]) for note in confidences(run))


def grouped(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs that differ only by seed, under one label: the method and, where methods repeat, what differs.

    If many keys differ and the configurations have names of their own, the label has the name instead.
    """
    ignored = {*IRRELEVANT, *OFTEN_IRRELEVANT}
    groups = _groups(runs, ignored)
    if any(len({run.seed for run in group}) < len(group) for group in groups):
        ignored = {*IRRELEVANT}
        groups = _groups(runs, ignored)
    return {_label(group, groups, ignored): sorted(group, key=lambda run: run.seed) for group in groups}


def comparison_rows(runs: Sequence[RunData]) -> list[Record]:
    """One row per label: means over seeds, sample standard deviations (None for one seed), mean C_acc of those that reached it.

    `final_rounds` lists the rounds of final accuracies that are not from their run's last round. References come last, with a
    row for the largest class of the test data.
    """
    rows, xs = [], targets(runs)
    for label, group in grouped(runs).items():
        found = [summary(run) for run in group]
        row: Record = {"label": label, "n": len(group), "seeds": [run.seed for run in group]}
        for name, key in (("best_accuracy", "best_accuracy"), ("final_accuracy", "accuracy")):
            row[name], row[f"{name}_std"] = _spread([s[key] for s in found])
        row["final_rounds"] = sorted({s["accuracy_round"] for s in found if s["accuracy_round"] not in (None, s["rounds"])})
        for key in ("rounds", "params_total", "seconds"):
            row[key] = _spread([s[key] for s in found])[0]
        for x in xs:
            reached = [s["c_acc"][x] for s in found if s["c_acc"].get(x) is not None]
            row[f"c_acc_{x}"], row[f"reached_{x}"] = _spread(reached)[0], len(reached)
        row["unfinished"] = sum(not run.finished for run in group)
        row["reference"] = group[0].reference
        rows.append(row)
    rows.sort(key=lambda row: bool(row["reference"]))
    return [*rows, *(majority_rows(runs, rows[-1]) if rows and rows[-1]["reference"] else [])]


def best_rows(rows: Sequence[Record]) -> list[int]:
    """The numbers of the rows with the best accuracy; references don't compete."""
    scores = [None if row["reference"] else row["best_accuracy"] for row in rows]
    best = max((score for score in scores if score is not None), default=None)
    return [number for number, score in enumerate(scores) if score is not None and score == best]


def table(rows: Sequence[Record], plus_minus: str = " ± ") -> tuple[list[str], list[list[str]]]:
    """The rows as text: a header and cells, for the terminal, HTML and LaTeX."""
    xs = [key.removeprefix("c_acc_") for key in (rows[0] if rows else {}) if key.startswith("c_acc_")]
    head = ["method", "best accuracy, %", "final accuracy, %", "n", "rounds", "parameters sent"]
    head += [f"C_acc({100 * float(x):g}%)" for x in xs] + ["seconds"]
    body = [
        [
            row["label"] + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else ""),
            _percent(row["best_accuracy"], row["best_accuracy_std"], plus_minus),
            noted(_percent(row["final_accuracy"], row["final_accuracy_std"], plus_minus), *row["final_rounds"], last=-1),
            str(row["n"]),
            "–" if row["rounds"] is None else f"{round(row['rounds'], 1):g}",
            "–" if row["reference"] else si(row["params_total"]),
            *["–" if row["reference"] else _reached(row, x) for x in xs],
            "–" if row["seconds"] is None else f"{row['seconds']:,.0f}" if row["seconds"] >= 10 else f"{row['seconds']:.1f}",
        ]
        for row in rows
    ]
    return head, body


def to_csv(rows: Sequence[Record]) -> str:
    """The rows with all digits; accuracies are fractions."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["label"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {key: " ".join(map(str, row[key])) for key in ("seeds", "final_rounds")})
    return out.getvalue()


def to_tex(rows: Sequence[Record]) -> str:
    """The rows as a tabular for the LaTeX package booktabs."""
    head, body = table(rows, r" $\pm$ ")
    lines = [_tex_row([_tex(cell).replace(r"C\_acc", r"$C_{\text{acc}}$") for cell in head]), r"\midrule"]
    cells = [_tex_row([_tex(row[0]), *(cell.replace("–", "--") for cell in row[1:])]) for row in body]
    federated = sum(not row["reference"] for row in rows)
    lines += cells[:federated]
    if cells[federated:]:
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{\emph{{{HEADING}}}}} \\", *cells[federated:]]
    begin = [r"% needs \usepackage{amsmath,booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}", ""])


def lost_rounds(run: RunData) -> Record:
    """The numbers of the rounds that were lost, and why with how often, the most frequent reason first."""
    lost = [entry for entry in run.metrics if entry.get("lost")]
    reasons = Counter(str(entry["why_lost"]) for entry in lost if entry.get("why_lost"))
    return {"lost": [entry["round"] for entry in lost], "reasons": reasons.most_common()}


def short_name(reference: str) -> str:
    """The name of a method or data set without the file, module or fingerprint in front of it."""
    return reference.rpartition(":")[2]


def si(value: float) -> str:
    """A count with three digits and a prefix, as on the axes: 950, 431k, 10M, 1.2G."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{float(f'{value / 10**power:.3g}'):g}{prefix}"
    return f"{value:.3g}" if value % 1 else f"{value:.0f}"


def flat(config: Mapping[str, Any], prefix: str = "") -> Record:
    """Nested tables as one, keys joined by dots."""
    out: Record = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _selection(metrics: Record) -> float:
    """What the best round is chosen by: the validation split if there is one."""
    value = metrics.get("val_accuracy", metrics["accuracy"])
    return float(value) if value is not None and math.isfinite(value) else -1.0


def _cost(run: RunData, x: str) -> int | None:
    told = {f"{float(key):g}": value for key, value in (run.result.get("c_acc") or {}).items()} if run.finished else {}
    if x in told:
        return None if told[x] is None else int(told[x])
    return next((int(m["params_total"]) for m in evaluated(run) if m["accuracy"] >= float(x)), None)


def _groups(runs: Sequence[RunData], ignored: set[str]) -> list[list[RunData]]:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        key = json.dumps({k: v for k, v in flat(run.config).items() if k not in ignored}, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _label(group: list[RunData], groups: list[list[RunData]], ignored: set[str]) -> str:
    tables = [flat(rival[0].config) for rival in groups if rival[0].method == group[0].method]
    others = {rival[0].method for rival in groups} - {group[0].method}
    method = short_name(group[0].method)
    if method in map(short_name, others):
        method = group[0].method
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


def _reached(row: Record, x: str) -> str:
    if not row[f"reached_{x}"]:
        return NOT_REACHED
    part = f" ({row[f'reached_{x}']} of {row['n']})" if row[f"reached_{x}"] < row["n"] else ""
    return f"{si(row[f'c_acc_{x}'])}{part}"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
