"""Reports: one self-contained HTML page with its figures, made from run folders alone."""

from __future__ import annotations

import functools
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from fedet.errors import FedetError
from fedet.reporting import comparisons, references, results, words
from fedet.reporting.breakdown import by_class, by_client
from fedet.reporting.results import Leaders, comparison_rows, noted
from fedet.reporting.run_data import RunData, read_run
from fedet.storage.files import replacing, write_text
from fedet.storage.metrics import Record

MOST_FAILURES = 200


def write_run(folder: str | os.PathLike[str]) -> Path:
    """Write report.html and plots/ into a run folder; the run need not be finished."""
    run = read_run(folder)
    numbers, led, found = results.summary(run), results.leaders(run), run.bound()
    audit = run.audit()
    drawn: dict[str, Markup] = {}
    if _plots_wanted():
        from fedet.reporting import figures  # only here, because matplotlib takes a second to import

        drawn = figures.of_run(run, led, found, audit)
    context = {
        "title": words.title(run),
        "run": run,
        "stopped": words.STOPPED.get(str(run.result.get("stopped")), str(run.result.get("stopped"))),
        "planned": run.config.get("run", {}).get("rounds"),
        "numbers": numbers,
        "saving": _saving(numbers),
        "sentence": words.sentence(run),
        "notices": words.notices([run]),
        "models": _models(run),
        "at_clients": run.kept_by_clients is not None,
        "spreads": _spreads(run),
        "majority": run.result.get("majority"),
        "final_note": noted("", numbers["accuracy_round"], last=run.last_round).strip(" ()"),
        "holdings": _holdings(run.split),
        "classes": by_class(run),
        "at_clients_data": by_client(run),
        "led": _led(run, led) if led else None,
        "bound": found,
        "privacy": run.result.get("privacy") and {"epsilon": None, "client_epsilon": None} | run.result["privacy"],
        "audit": audit,
        **_failures(run),
        "about_trust": words.about_trust(run),
        "commands": _commands([run], run.folder),
        "started_with": None if _repeats(run) else _command(run),
        "versions": {key: _plain(value) for key, value in run.env.items() if key not in ("command", "pid", "rounds")},
    }
    return _render("report.html.j2", run.folder, {**context, "figures": drawn, "plots_off": not _plots_wanted()})


def write_comparison(folder: str | os.PathLike[str], runs: Sequence[RunData], notes: Sequence[str] = ()) -> Path:
    """Write report.html, plots/, table.csv and table.tex on several runs; those that differ only by seed share a row."""
    if not runs:
        raise FedetError(f"{folder} has nothing to compare yet: none of its runs has started")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, groups = comparison_rows(runs), results.grouped(runs)
    drawn: dict[str, Markup] = {}
    if _plots_wanted():
        from fedet.reporting import figures

        drawn = figures.of_comparison(rows, groups, folder)
    write_text(folder / "table.csv", results.to_csv(rows))
    write_text(folder / "table.tex", results.to_tex(rows))
    head, body = results.table(rows)
    federated, pairs = sum(not row["reference"] for row in rows), comparisons.differences(rows, groups)
    context = {
        "title": words.comparison_title(runs),
        "sentence": comparisons.sentence(rows, pairs),
        "conditions": comparisons.conditions(runs),
        "pair_head": comparisons.PAIR_HEAD,
        "pairs": [pair.cells for pair in pairs],
        "levels": comparisons.levels(rows),
        "head": head,
        "body": body[:federated],
        "best": results.best_rows(rows),
        "model_head": results.MODEL_HEAD,
        "models": results.model_cells(groups),
        "heading": references.HEADING,
        "possible": body[federated:],
        "meanings": references.meanings(rows),
        "spreads": [text for label, group in groups.items() if (text := references.spread_at_clients(label, group))],
        "notes": notes,
        "several_seeds": any(row["n"] > 1 for row in rows),
        "unfinished": sum(not run.finished for run in runs),
        "notices": words.notices(runs),
        "equal": comparisons.equal(runs),
        "links": {label: [(run.seed, _link(run, folder)) for run in group] for label, group in groups.items()},
        "commands": _commands(runs, folder),
    }
    return _render("comparison.html.j2", folder, {**context, "figures": drawn, "plots_off": not _plots_wanted()})


def _models(run: RunData) -> list[Record]:
    """The rows of the table of models, with the round next to an accuracy that is not from the last round."""
    return [
        row | {"final_text": noted(words.percent(row["final"], 2), row["final_round"], last=run.last_round)}
        for row in results.model_rows(run)
    ]


def _spreads(run: RunData) -> dict[str, Record]:
    """The accuracies of the models that all clients keep, from the last round in which they were evaluated, by name."""
    return next((m["stored"] for m in reversed(run.metrics) if m.get("stored")), {})


def _saving(numbers: Record) -> float | None:
    large, total = numbers["large_params"], numbers["params_total"]
    return large / total if large and total and abs(large / total - 1) > 0.02 else None


def _holdings(split: dict[str, NDArray[Any]]) -> Record | None:
    if "label_counts" not in split:
        return None
    counts, archs = split["label_counts"], words.archs(split) or []
    sizes = counts.sum(axis=1)
    return {
        "clients": len(counts), "labels": counts.shape[1], "examples": int(sizes.sum()),
        "least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max()),
        "kinds": float(np.median((counts > 0).sum(axis=1))),
        "archs": [(arch, archs.count(arch), int(sizes[np.array(archs) == arch].sum())) for arch in sorted(set(archs))],
    }  # fmt: skip


def _led(run: RunData, led: Leaders) -> Record:
    matrix, order, count = led
    held = run.split.get("label_counts")
    held = held[order] if held is not None and len(held) > max(order) and held.shape[1] == matrix.shape[1] else None
    rows = []
    for label in np.flatnonzero(count > 0):
        k = int(np.nanargmax(matrix[:, label]))
        rows.append(
            (int(label), int(count[label]), order[k], float(matrix[k, label]), None if held is None else int(held[k, label]))
        )
    return {"rows": rows, "clients": len(order), "even": results.equal_share(run), "correlation": _correlation(matrix, held)}


def _correlation(matrix: NDArray[Any], held: NDArray[Any] | None) -> float | None:
    if held is None:
        return None
    known = np.isfinite(matrix)
    x, y = matrix[known], (held / np.maximum(held.sum(axis=1, keepdims=True), 1))[known]
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() > 0 and y.std() > 0 else None


def _failures(run: RunData) -> Record:
    rows = [{"round": m["round"], **failure} for m in run.metrics for failure in m.get("failures") or []]
    return {
        "failures": rows[:MOST_FAILURES],
        "failures_in_all": len(rows),
        "kinds": Counter(str(row.get("kind")) for row in rows).most_common(),
        **results.lost_rounds(run),
    }


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _commands(runs: Sequence[RunData], folder: Path) -> list[str]:
    """The commands that give these runs again, to be entered in this folder."""
    return list(dict.fromkeys((_repeats(run) and _command(run)) or _run_again(run, folder) for run in runs))


def _command(run: RunData) -> str | None:
    """The command that started the run, if it is known."""
    command = run.env.get("command")
    return shlex.join(command) if isinstance(command, list) else command


def _repeats(run: RunData) -> bool:
    """Whether that command gives this run again: not if it was made longer since, or if nobody wrote down how long it was."""
    return bool(_command(run)) and run.env.get("rounds") == run.config.get("run", {}).get("rounds")


def _run_again(run: RunData, folder: Path) -> str:
    """The run's own configuration, with all settings and the seed, gives it again."""
    return shlex.join(["fedet", "run", os.path.relpath(run.folder / "config.toml", folder)])


def _link(run: RunData, folder: Path) -> str:
    return quote(Path(os.path.relpath(run.folder / "report.html", folder)).as_posix())


def _plots_wanted() -> bool:
    """Not with FEDET_PLOTS=off, for many short runs whose figures nobody looks at; drawing them takes seconds."""
    return os.environ.get("FEDET_PLOTS") != "off"


def _render(template: str, folder: Path, context: Record) -> Path:
    path = folder / "report.html"
    with replacing(path) as draft:
        draft.write_bytes(_environment().get_template(template).render(context).encode())
    return path


@functools.cache
def _environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters |= words.FILTERS
    return env
