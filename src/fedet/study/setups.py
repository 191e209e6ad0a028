"""What is known of an experiment before it is trained: the sizes of its models and the examples of its clients.

These have records, too, so that a document can be made without the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pydantic import model_validator

from fedet.errors import DataError
from fedet.experiment import build
from fedet.reporting import plots
from fedet.storage.files import read_json, write_text
from fedet.storage.records import Count, Schema
from fedet.study.plan import BASE, Plan, PlannedRun, column_names
from fedet.study.tables import NOT_RUN, Table, column_label

FOLDER = "setups"
"""Where these records are, in the folder of records."""


class SetupRecord(Schema):
    """The record of an experiment's set-up."""

    arch_params: dict[str, Count]
    server: str
    label_counts: list[list[Count]]
    archs: list[str]

    @model_validator(mode="after")
    def _fits(self) -> SetupRecord:
        if len(self.archs) != len(self.label_counts) or len({len(row) for row in self.label_counts}) > 1:
            raise ValueError("it has no model, or no number of examples of each label, for some of the clients")
        return self


def path_of(run: PlannedRun, records: Path) -> Path:
    """The file of a set-up; how many rounds would follow makes no difference."""
    return records / FOLDER / f"{run.key.rpartition('-r')[0]}.json"


def prepare(
    runs: Sequence[PlannedRun], records: Path, cache: Path, notify: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Write the records that are missing; returns why some could not be written."""
    failed = []
    for run in runs:
        if path_of(run, records).is_file():
            continue
        notify(run.key)
        try:
            experiment = build(run.config, cache)
        except DataError as error:
            failed.append(str(error))
            continue
        models = experiment.env.model_cache
        content: dict[str, Any] = {
            "arch_params": {name: models.num_params(name) for name in models.names},
            "server": experiment.env.large,
            "label_counts": experiment.data.label_counts().tolist(),
            "archs": [client.arch for client in experiment.clients],
        }
        write_text(path_of(run, records), json.dumps(content, separators=(",", ":")) + "\n")
    return failed


def sizes(plan: Plan, runs: Sequence[PlannedRun], records: Path) -> Table:
    """The number of parameters of every model, with the paper's, in millions, where the plan has it."""
    body = []
    for run in {run.coordinates[BASE]: run for run in runs}.values():
        found = _read(run, records)
        base = str(run.coordinates[BASE])
        if found is None:
            body.append([base, "–", "–", NOT_RUN, "–"])
            continue
        for name, size in sorted(found["arch_params"].items(), key=lambda item: -item[1]):
            role = "server" if name == found["server"] else "clients"
            body.append([base, role, name, f"{size:,}", _papers(plan, base, name)])
    return Table(["base", "used by", "model", "parameters", "paper"], body)


def distributions(plan: Plan, runs: Sequence[PlannedRun], records: Path) -> list[tuple[str, Figure]]:
    """The figures of the clients' examples per label, each with its title."""
    out = []
    for run in runs:
        found = _read(run, records)
        if found is not None:
            title = column_label(plan, tuple(run.coordinates.get(name) for name in column_names(plan)))
            out.append((title, plots.distribution(found["label_counts"], found["archs"], title)))
    return out


def _papers(plan: Plan, base: str, model: str) -> str:
    for column, value in zip(plan.paper.columns, plan.paper.rows.get(model, []), strict=False) if plan.paper else ():
        if base in column.get("bases", []) and value:
            return f"{value[0]:g}M"
    return "–"


def _read(run: PlannedRun, records: Path) -> dict[str, Any] | None:
    path = path_of(run, records)
    return read_json(path, SetupRecord) if path.is_file() else None
