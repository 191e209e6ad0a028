"""Writing the server model of a run into a folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedet import config, experiment
from fedet.config import plugins
from fedet.errors import ConfigError, FedetError
from fedet.models import Model
from fedet.storage import checkpoint
from fedet.storage.model_folder import load_model, read_about, save_model
from fedet.storage.run_folder import cache_folder


def export_run(run_dir: Path, folder: Path, which: str = "best", *, trust_code: bool = False) -> Path:
    """Write the best or the last server model of a run, finished or not, into a folder of its own."""
    if which not in ("best", "last"):
        raise ConfigError(f"--which {which}: it is 'best' or 'last'")
    if not (run_dir / "config.toml").is_file():
        raise FedetError(f"{run_dir} holds no run: give the folder that `fedet run` made, it has a config.toml")
    _check_target(run_dir, folder)
    with plugins.code_from(run_dir, trust=trust_code):
        model, about = _best(run_dir) if which == "best" else _last(run_dir)
    save_model(folder, model, about)
    return folder


def _best(run_dir: Path) -> tuple[Model, dict[str, Any]]:
    if not (run_dir / "best" / "model.safetensors").is_file():
        raise FedetError(f"{run_dir} has no evaluated model yet: go on with `fedet resume {run_dir}`")
    return load_model(run_dir / "best"), read_about(run_dir / "best")["training"]


def _last(run_dir: Path) -> tuple[Model, dict[str, Any]]:
    """From the checkpoint, because the model beside it is that of the last run that came to its end."""
    path = run_dir / "last" / "checkpoint.safetensors"
    fields, meta = checkpoint.load(path) if path.is_file() else ({"round": 0}, {})
    if not fields["round"]:
        raise FedetError(f"{run_dir} has not finished a round yet: go on with `fedet resume {run_dir}`")
    loaded = config.load(run_dir / "config.toml")
    if meta["config"] != loaded.digest():
        raise FedetError(f"{path} belongs to another configuration than {run_dir / 'config.toml'}")
    ready = experiment.build(loaded, cache_folder(run_dir.parent))
    fresh, kept = ready.method.init(ready.env), fields["state"]
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        kept = dataclasses.replace(fresh, **kept)
    arch, weights = next(iter(ready.method.models(kept, ready.env).values()))
    accuracy = None if fields["accuracy"] < 0 else fields["accuracy"]
    about = {"method": ready.method.name, "data": ready.config.data.name, "seed": ready.seed}
    return ready.env.build(arch, weights).eval(), about | {"round": fields["round"], "accuracy": accuracy}


def _check_target(run_dir: Path, folder: Path) -> None:
    """Refuse a place that holds anything but an exported model."""
    if folder.exists() and not folder.is_dir():
        raise FedetError(f"{folder} is no folder: choose another name for the exported model")
    if folder.resolve().is_relative_to(run_dir.resolve()):
        raise FedetError(f"{folder} is part of the run: export to a folder outside of it")
    there = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    try:
        ours = not there or read_about(folder)["model_type"] == "fedet"
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise FedetError(f"{folder} holds something else ({sorted(there)[0]}): export to a new or empty folder")
