"""What an app folder and a node's settings say; the same on every machine, so that all play the same run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedet import config as configuration
from fedet.config import Config
from fedet.config.sources import expanded, nearest
from fedet.errors import ConfigError

KEYS = ("client-id", "client-ids", "partition-id", "num-partitions", "arch", "data", "data-dir", "folder")


def new(folder: Path) -> Path:
    """Write a thin app folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another place for the app")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedet-app"
    folder.mkdir(parents=True, exist_ok=True)
    for source in (resources.files("fedet.flower") / "template").iterdir():
        if source.is_file():
            place = folder / (".gitignore" if source.name == "gitignore" else source.name)
            place.write_text(source.read_text(encoding="utf-8").replace("{name}", name), encoding="utf-8")
    return folder


def home_of(app: Path) -> Path:
    """Where a local federation of this app keeps Flower's settings, certificates and keys; never part of what is submitted."""
    return app.resolve() / ".flwr"


def require(app: Path) -> None:
    """Refuse a folder that is no app of ours, with what to do."""
    if not (app / "pyproject.toml").is_file() or not (app / "apps.py").is_file():
        raise ConfigError(f"{app} is no app folder: make one with `fedet flower new DIR`")


def settings(app: Path) -> dict[str, Any]:
    """The app's own run settings."""
    try:
        plain = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        return dict(plain["tool"]["flwr"]["app"]["config"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{app / 'pyproject.toml'} has no [tool.flwr.app.config] that can be read: {error}") from None


def load(folder: Path, run_config: Mapping[str, Any]) -> Config:
    """The configuration of a submitted app: the file that `config` names, in the folder or a preset, changed by `set`."""
    name = str(run_config.get("config", "fedet.toml"))
    try:
        changes = json.loads(str(run_config.get("set") or "{}"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"the run's `set` is no JSON object of keys and values: {error}") from None
    return configuration.load(folder / name if (folder / name).is_file() else name, changes)


def identity(config: Config, folder: Path) -> str:
    """The same on every machine for the same experiment and seed, wherever the app folder lies there."""
    plain = config.model_dump(mode="json", exclude={"flower": True, "run": {"rounds", "workers", "threads"}, "data": {"dir"}})
    text = json.dumps(plain, sort_keys=True).replace(json.dumps(str(folder))[1:-1], "")
    method = re.sub(r"\W", "", config.method["name"].rpartition(":")[2])
    return f"{config.name}-{method}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}-s{config.run.seed}"


@dataclass(frozen=True)
class Node:
    """A node's settings: which clients it is, and what it brings of its own."""

    clients: tuple[int, ...]
    folder: Path
    arch: str | None = None
    data: str | None = None
    data_dir: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Node:
        """Read `--node-config`; a key that nobody knows is more likely misspelt than meant."""
        odd = next((key for key in settings if key not in KEYS), None)
        if odd is not None:
            raise ConfigError(f"node config: '{odd}' is not a known key{nearest(odd, KEYS)}; known: {', '.join(KEYS)}")
        given = [key for key in ("client-ids", "client-id", "partition-id") if key in settings]
        if not given:
            raise ConfigError("node config: say which client this is, for example --node-config 'client-id=3'")
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        own = {name: str(settings[key]) for name, key in (("arch", "arch"), ("data", "data")) if settings.get(key)}
        return cls(
            clients=_ids(str(settings[given[0]])),
            folder=expanded(str(settings.get("folder") or home / "fedet")),
            data_dir=str(settings["data-dir"]) if settings.get("data-dir") else None,
            **own,
        )

    def config(self, config: Config) -> Config:
        """The run's configuration with the data set folder of this machine."""
        if self.data_dir is None:
            return config
        return config.model_copy(update={"data": config.data.model_copy(update={"dir": self.data_dir})})


def _ids(text: str) -> tuple[int, ...]:
    """`3`, `0-4` or `0-4,7`."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise ConfigError(f"node config: '{text}' are no client ids; write client-id=3, or client-ids=\"0-4,7\"")
    spans = [span.partition("-") for span in text.split(",")]
    return tuple(sorted({k for first, _, last in spans for k in range(int(first), int(last or first) + 1)}))
