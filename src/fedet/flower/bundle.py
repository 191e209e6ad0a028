"""An app folder's configuration and a node's settings; read in the same way on every machine, so that all run the same.

Which code a submitted configuration may name: Flower runs the app folder's own code (`apps.py` and whatever it imports) on the
server and on every node, so a model, data set or method in that folder is exactly as trusted as the app itself, and needs no
permission. A reference that leaves the folder (`os:system`, another file, an installed package) does: an operator may accept
only apps that were reviewed and signed (Flower's `--trusted-entities`), but the run's settings come from whoever submits and
are signed by nobody, so with them a reviewed app could be made to call anything that is installed. The operator gives the
permission where a submitter can't: in the environment of the SuperLink or SuperNode (`FEDET_TRUST_CODE=1`), or in the node's
settings (`trust-code=true`). A node's own `data` is its operator's choice and always allowed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedet import config as configuration
from fedet.config import Config, plugins
from fedet.config.sources import MAX_BYTES, check_depth, expanded, nearest, parse_toml, presets, source_text
from fedet.errors import ConfigError

NODE_KEYS = (
    "client-id",
    "client-ids",
    "partition-id",
    "num-partitions",
    "arch",
    "data",
    "data-dir",
    "folder",
    "trust-code",
    "send-errors",
)
TRUST_CODE = "FEDET_TRUST_CODE"
"""Set to 1 in the environment of a SuperLink or SuperNode, it allows code from outside the app folder there."""


def new(folder: Path) -> Path:
    """Write a small app folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not empty: choose another folder for the app")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedet-app"
    folder.mkdir(parents=True, exist_ok=True)
    for source in (resources.files("fedet.flower") / "template").iterdir():
        if source.is_file():
            target = folder / (".gitignore" if source.name == "gitignore" else source.name)
            target.write_text(source.read_text(encoding="utf-8").replace("{name}", name), encoding="utf-8")
    return folder


def home_of(app: Path) -> Path:
    """Where a local federation of this app has Flower's settings, certificates and keys; never part of what is submitted."""
    return app.resolve() / ".flwr"


def require(app: Path) -> None:
    """Refuse a folder that is not an app of fedet."""
    if not (app / "pyproject.toml").is_file() or not (app / "apps.py").is_file():
        raise ConfigError(f"{app} is not an app folder: create one with `fedet flower new DIR`")


def settings(app: Path) -> dict[str, Any]:
    """The app's own run settings."""
    try:
        plain = parse_toml(source_text(str(app / "pyproject.toml"))[0], str(app / "pyproject.toml"))
        return dict(plain["tool"]["flwr"]["app"]["config"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"can't read [tool.flwr.app.config] of {app / 'pyproject.toml'}: {error}") from None


def load(folder: Path, run_config: Mapping[str, Any]) -> Config:
    """The configuration of a submitted app: the file that `config` names, in the folder or a preset, changed by `set`."""
    name = str(run_config.get("config", "fedet.toml"))
    text = str(run_config.get("set") or "{}")
    try:
        changes = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the run's `set` is not a JSON object of keys and values: {error}") from None
    if not isinstance(changes, dict):
        raise ConfigError("the run's `set` is not a JSON object of keys and values")
    check_depth(changes, "the run's `set`")
    return configuration.load(_within(folder, name), changes)


def _within(folder: Path, name: str) -> str | Path:
    """The file of this name in the folder, or the preset; a submitter must not make a machine read its other files."""
    if name in presets() and not os.path.isfile(folder / name):
        return name
    if not os.path.isfile(folder / name) or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"the run's `config` = {name[:200]!r} is neither a file in the app folder nor a preset")
    return folder / name


def identity(config: Config, folder: Path) -> str:
    """The run's name: the same on every machine for the same experiment and seed, wherever its app folder is."""
    apart: Any = {"flower": True, "run": {"rounds", "workers", "threads"} | config.run.unused(), "data": {"dir"}}
    plain = config.model_dump(mode="json", exclude=apart)
    if config.flower.own_data:  # with their own data, clients learn something else
        plain["own_data"] = True
    text = json.dumps(plain, sort_keys=True).replace(json.dumps(str(folder))[1:-1], "")
    method = re.sub(r"\W", "", config.method["name"].rpartition(":")[2])
    return f"{config.name}-{method}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}-s{config.run.seed}"


@contextlib.contextmanager
def server_code(folder: Path) -> Iterator[None]:
    """Limit the code that a run may name on the server; see this module's docstring."""
    with plugins.only_from(None if _trusted() else folder, f"to allow other code, start the SuperLink with {TRUST_CODE}=1"):
        yield


def _trusted() -> bool:
    return os.environ.get(TRUST_CODE) == "1"


@dataclass(frozen=True)
class Node:
    """A node's settings: which clients it has, and what is its own."""

    clients: tuple[int, ...]
    folder: Path
    arch: str | None = None
    data: str | None = None
    data_dir: str | None = None
    trust_code: bool = False
    """Allow the submitted configuration to name code outside the app folder."""
    send_errors: bool = False
    """Send the texts of exceptions to the server."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Node:
        """Read `--node-config`; unknown keys are refused, as they are probably misspelt."""
        odd = next((key for key in settings if key not in NODE_KEYS), None)
        if odd is not None:
            raise ConfigError(
                f"node config: '{odd}' is not a known key{nearest(odd, NODE_KEYS)}; known: {', '.join(NODE_KEYS)}"
            )
        given = [key for key in ("client-ids", "client-id", "partition-id") if key in settings]
        if not given:
            raise ConfigError("node config: set the node's client, for example --node-config 'client-id=3'")
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        own = {name: str(settings[key]) for name, key in (("arch", "arch"), ("data", "data")) if settings.get(key)}
        return cls(
            clients=_ids(str(settings[given[0]])),
            folder=expanded(str(settings.get("folder") or home / "fedet")),
            data_dir=str(settings["data-dir"]) if settings.get("data-dir") else None,
            trust_code=_flag(settings, "trust-code") or _trusted(),
            send_errors=_flag(settings, "send-errors"),
            **own,
        )

    def config(self, config: Config) -> Config:
        """The run's configuration with this machine's folder of data sets."""
        if self.data_dir is None:
            return config
        return config.model_copy(update={"data": config.data.model_copy(update={"dir": self.data_dir})})

    @contextlib.contextmanager
    def code(self, folder: Path) -> Iterator[None]:
        """Limit the code that a run may name on this node; see this module's docstring."""
        hint = "to allow other code, start the SuperNode with trust-code=true in its --node-config"
        with plugins.only_from(None if self.trust_code else folder, hint):
            yield


def _flag(settings: Mapping[str, Any], key: str) -> bool:
    value = settings.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"node config: {key} = {value!r} is neither true nor false")
    return value


def _ids(text: str) -> tuple[int, ...]:
    """`3`, `0-4` or `0-4,7`."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise ConfigError(f"node config: '{text}' is not a list of client ids; write client-id=3, or client-ids=\"0-4,7\"")
    spans = [span.partition("-") for span in text.split(",")]
    return tuple(sorted({k for first, _, last in spans for k in range(int(first), int(last or first) + 1)}))
