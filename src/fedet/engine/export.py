"""Export the server model of a run to a folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedet import config, experiment
from fedet.config import plugins
from fedet.errors import ConfigError, FedetError
from fedet.models import Model
from fedet.reporting.run_data import read_run
from fedet.storage import metrics
from fedet.storage.checkpoints import read_checkpoint
from fedet.storage.model_folder import load_model, read_about, save_model
from fedet.storage.run_folder import RunFolder, cache_folder


def export_run(run_dir: Path, folder: Path, which: str = "best", *, trust_code: bool = False) -> Path:
    """Export the best or the last server model of a run, finished or not, to a folder of its own.

    If the run's model, or for the last model also its method or data, is code that is not part of fedet, this needs
    `trust_code`.
    """
    if which not in ("best", "last"):
        raise ConfigError(f"--which {which}: choose 'best' or 'last'")
    run = RunFolder.existing(run_dir)
    _check_target(run_dir, folder)
    _check_server_model(run)
    with plugins.code_from(run_dir, trust=trust_code):
        model, training = _best(run, trust_code) if which == "best" else _last(run)
    save_model(folder, model, training)
    return folder


def _check_server_model(run: RunFolder) -> None:
    """Refuse a run of a method whose models are all at the clients; its result says so, without running any code of a user."""
    found = read_run(run.path)
    if found.result and found.result.get("server") is None:
        raise FedetError(f"'{found.method}' has no model at the server to export: each client keeps a model of its own")


def _best(run: RunFolder, trust_code: bool) -> tuple[Model, dict[str, Any]]:
    folder = run.path / "best"
    if not (folder / "model.safetensors").is_file():
        raise FedetError(f"{run.path} has no evaluated model yet: continue the run with `fedet resume {run.path}`")
    training = read_about(folder).get("training")
    if training is None:
        raise FedetError(f"{folder / 'config.json'} is damaged: training is missing")
    return load_model(folder, trust_code=trust_code), training


def _last(run: RunFolder) -> tuple[Model, dict[str, Any]]:
    """From the checkpoint, because the model next to it is from the last time that the run finished."""
    fields, meta = read_checkpoint(run.checkpoint) if run.checkpoint.is_file() else ({"round": 0}, {})
    number = fields["round"]
    if not number:
        raise FedetError(f"{run.path} has not finished a round yet: continue the run with `fedet resume {run.path}`")
    loaded = config.load(run.path / "config.toml")
    if meta.get("config") != loaded.digest():
        raise FedetError(f"{run.checkpoint} and {run.path / 'config.toml'} belong to different configurations")
    built = experiment.build(loaded, cache_folder(run.path.parent))
    fresh, state = built.method.init(built.env), fields["state"]
    try:
        if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
            state = dataclasses.replace(fresh, **state)
        arch, weights = next(iter(built.method.models(state, built.env).values()))
    except (TypeError, KeyError, AttributeError) as error:
        raise FedetError(f"{run.checkpoint} does not fit the method '{built.method.name}': {error}") from None
    training = {"method": built.method.name, "data": loaded.data.name, "seed": built.seed, "round": number}
    return built.env.build(arch, weights).eval(), training | {"accuracy": _accuracy(run, number)}


def _accuracy(run: RunFolder, number: int) -> float | None:
    """The test accuracy of this round, if it was evaluated."""
    records = metrics.read(run.path / "metrics.jsonl")
    return next((record.get("accuracy") for record in reversed(records) if record["round"] == number), None)


def _check_target(run_dir: Path, folder: Path) -> None:
    """Refuse a folder that contains anything but an exported model."""
    if folder.exists() and not folder.is_dir():
        raise FedetError(f"{folder} exists and is not a directory: choose another name for the exported model")
    if folder.resolve().is_relative_to(run_dir.resolve()):
        raise FedetError(f"{folder} is inside the run's folder: export to a folder outside of it")
    existing = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    if existing and not _is_exported(folder):
        raise FedetError(f"{folder} already contains other files ({existing[0]}): export to a new or empty folder")


def _is_exported(folder: Path) -> bool:
    try:
        return bool(read_about(folder)["model_type"] == "fedet")
    except FedetError:
        return False
