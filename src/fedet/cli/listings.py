"""The rows that the listing commands show: methods, models, data sets, the installation, a partition."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedet import experiment
from fedet.cli import output
from fedet.config import Config, objects
from fedet.data import text, vision
from fedet.errors import ConfigError, DataError, FedetError
from fedet.storage.files import replacing
from fedet.storage.run_folder import cache_folder

Rows = list[dict[str, Any]]
RUN_COLUMNS = ("run", "state", "method", "data", "seed", "rounds", "accuracy", "best accuracy")
IMAGES = {
    "cifar10": "60,000 images of 32x32, 10 classes",
    "cifar100": "60,000 images of 32x32, 100 classes",
    "fashion-mnist": "70,000 gray images of 28x28, 10 classes",
}


def method_rows() -> Rows:
    """The paper's Table 1, from the methods' own traits."""
    from fedet.methods import METHODS

    rows = []
    for cls in METHODS:
        t = cls.traits
        needs = "N/A" if t.public_data == "none" else t.public_data
        access = "N/A" if t.public_data == "none" else ("required" if t.clients_read_public else "not required")
        rows.append(
            {
                "method": cls.name,
                "client model heterogeneity": t.heterogeneous,
                "public data": needs,
                "client access to public data": access,
                "server model size": "> client model" if t.larger_server else "= client model",
                "tasks": t.tasks,
            }
        )
    return rows


def reference_rows() -> Rows:
    """The references and what each of them is."""
    from fedet.methods import REFERENCES
    from fedet.reporting.references import MEANING

    return [{"method": cls.name, "what it is": MEANING[cls.name]} for cls in REFERENCES]


def run_rows(out: Path) -> Rows:
    """The runs below a directory, by name: finished, running, stopped before the end, or damaged."""
    from fedet.reporting.run_data import find_runs

    return [_run_row(out, folder) for folder in find_runs(out)]


def readable(rows: Rows) -> Rows:
    """Rows of runs for a person: short names, accuracies in percent."""

    def cell(key: str, value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.2%}"
        return objects.shown(value) if key in ("method", "data") and isinstance(value, str) else value

    return [{key: cell(key, value) for key, value in row.items()} for row in rows]


def _run_row(out: Path, folder: Path) -> dict[str, Any]:
    from fedet.reporting import results
    from fedet.reporting.run_data import read_run

    name = str(folder.relative_to(out))
    try:
        run = read_run(folder)
    except FedetError:
        return dict.fromkeys(RUN_COLUMNS) | {"run": name, "state": "damaged"}
    numbers = results.summary(run)
    values = run.method, run.config["data"].get("name"), run.seed, run.last_round
    scores = numbers["accuracy"], numbers["best_accuracy"]
    return dict(zip(RUN_COLUMNS, (name, results.state(run), *values, *scores), strict=True))


def model_rows(classes: int, shape: Sequence[int]) -> Rows:
    """The model families and their sizes: for images of this shape, tables of as many features, and texts."""
    from fedet import models
    from fedet.models import tabular, text

    rows = [{"name": row["name"], "inputs": "images", **row} for row in models.describe(classes, tuple(shape))]
    others = {tabular.NAME: ("tables", (math.prod(shape),)), **dict.fromkeys(text.NAMES, ("texts", (256,)))}
    for name, (inputs, size) in others.items():
        with torch.device("meta"):  # sizes don't need values
            model = models.build(name, classes, input_shape=size)
        row = {"name": name, "inputs": inputs, "params": model.num_params(), "macs": None, "width": model.body.width}
        rows.append(row)
    return rows


def data_folder(given: Path | None) -> Path:
    """The directory of the data sets: the given one, else $FEDET_DATA."""
    place = _optional_data_folder(given)
    if place is None:
        raise DataError("no data directory: pass --data-dir DIR, or set FEDET_DATA")
    return place


def _optional_data_folder(given: Path | None) -> Path | None:
    if given is None and os.environ.get("FEDET_DATA"):
        return Path(os.environ["FEDET_DATA"])
    return given


def data_rows(given: Path | None) -> Rows:
    """The data sets and where they are."""
    place = _optional_data_folder(given)
    rows = [_data_row("digits", "1,797 images of 8x8, 10 classes (scikit-learn)", "included")]
    for name, what in IMAGES.items():
        found = place is not None and (vision.folder_in(place, name) / "train.parquet").is_file()
        rows.append(_data_row(name, what, str(place) if found else f"not found: run `fedet data fetch {name} --dir DIR`"))
    for name, files in text.FILES.items():
        found = place is not None and any((place / "text" / file).exists() for file in files)
        rows.append(
            _data_row(name, "texts with users, 2 classes", str(place) if found else "not found: see docs/guide/text.md")
        )
    return [*rows, _data_row("module:function", "your own", "see docs/guide/data.md")]


def _data_row(name: str, content: str, location: str) -> dict[str, Any]:
    return {"name": name, "content": content, "location": location}


def doctor_rows(out: Path, data_dir: Path | None) -> Rows:
    """Versions, hardware, data, disk space."""
    from fedet.storage.run_folder import environment
    from fedet.workers.buffers import describe_location

    facts = {k: v for k, v in environment("").items() if k not in ("command", "started", "pid")}
    facts["gpu"] = "yes" if experiment.device("auto") == "cuda" else "none: runs use the CPU"
    free = shutil.disk_usage(next(p for p in [out.resolve(), *out.resolve().parents] if p.exists())).free
    facts["free disk"] = f"{free / 2**30:.1f} GB at {out}"
    facts["shared memory"] = describe_location()
    for row in data_rows(data_dir):
        facts[f"data {row['name']}"] = row["location"]
    return [{"item": key, "value": str(value)} for key, value in facts.items()]


def distribution(config: Config, out: Path, figure: Path | None) -> Path:
    """Plot the partition, log its key numbers and return the figure's path."""
    from fedet.reporting import plots

    name = Path(config.data.name.rpartition(":")[2]).stem  # of a file of texts not its folder, which is the user's
    path = figure or out / f"{name}-{config.data.partition}-s{config.run.seed}.png"
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--figure {path}: the file name must end in .png, .svg or .pdf")
    built = experiment.build(config, cache_folder(out))
    counts, sizes = built.data.label_counts(), built.data.sizes
    picture = plots.distribution(counts, [client.arch for client in built.clients])
    with replacing(path) as temporary:
        picture.savefig(temporary, format=path.suffix[1:])
    output.log(
        f"{len(sizes)} clients, {sizes.sum()} examples; per client: median {int(np.sort(sizes)[len(sizes) // 2])}, "
        f"largest {sizes.max()}, {int((sizes == 0).sum())} empty; {(counts > 0).sum(axis=1).mean():.1f} classes on average"
    )
    return path
