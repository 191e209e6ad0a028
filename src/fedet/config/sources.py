"""Where a configuration's values come from: presets, files, bases and changes, laid over each other."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedet.errors import ConfigError

Plain = dict[str, Any]
Source = str | os.PathLike[str] | Mapping[str, Any] | None
SHORT = {"method": "method.name", "rounds": "run.rounds", "seed": "run.seed", "data_dir": "data.dir"}
"""Names for the keys that are changed most."""


def presets() -> list[str]:
    """Names of the configurations shipped with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _preset_folder().iterdir() if entry.name.endswith(".toml"))


def _preset_folder() -> Traversable:
    return importlib.resources.files("fedet.config") / "presets"


def read_layers(source: Source) -> list[Plain]:
    """A configuration and what its `base` names, and that one's, as plain tables: the lowest first."""
    layers: list[Plain] = []
    seen: list[str] = []
    while True:
        if isinstance(source, Mapping):
            raw, folder = {"name": "custom", **nested(source)}, Path()
        else:
            text, name, folder = source_text(str(source or "digits"))
            try:
                raw = {"name": name, **tomllib.loads(text)}
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"{source} is not valid TOML: {error}") from None
        base = raw.pop("base", None)
        layers.insert(0, anchored(raw, [folder, Path()]))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"base = {base!r}: name a preset or another file")
        beside = folder / base
        source = str(beside.resolve()) if beside.is_file() else base
        if source in seen:
            raise ConfigError(f"circular base: {' -> '.join([*seen, source])}")
        seen.append(source)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at what was meant, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Tables are merged key by key; anything else is replaced, and so is a server's model by one of another name."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not (key == "server" and _another(old, value)):
            value = merge(old, value)
        out[key] = value
    return out


def _another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a table speaks of another model: width and options of the one mean nothing to the other."""
    return bool(new.get("name", old.get("name")) != old.get("name"))


def nested(flat: Mapping[str, Any]) -> Plain:
    """Keys with dots turned into tables inside tables."""
    out: Plain = {}
    for key, value in flat.items():
        first, *rest = key.split(".", 1)
        inner = nested({rest[0]: value}) if rest else (nested(value) if isinstance(value, Mapping) else value)
        out = merge(out, {first: inner})
    return out


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments to configuration keys: short names, `data__alpha` for `data.alpha`, or nested tables."""
    return {
        key.replace("__", ".") if isinstance(value, Mapping) else SHORT.get(key, key.replace("__", ".")): value
        for key, value in values.items()
        if value is not None
    }


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=value`, the value as TOML would read it, or else as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes a.b=value, not '{text}'")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def source_text(source: str) -> tuple[str, str, Path]:
    """What a file or preset holds, its name, and the folder from which its paths count."""
    path = Path(source)
    if path.is_dir() and (path / "config.toml").is_file():
        path = path / "config.toml"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path.stem, path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {path}: {error}") from None
    if source in presets():
        return (_preset_folder() / f"{source}.toml").read_text(encoding="utf-8"), source, Path()
    raise ConfigError(f"'{source}' is neither a file nor a preset{nearest(source, presets())}; presets: {', '.join(presets())}")


def expanded(place: str | os.PathLike[str]) -> Path:
    """A path with ~ spelt out; of a user that there is not, as it stands (Path's own method would raise)."""
    return Path(os.path.expanduser(place))


def anchored(value: Any, folders: Sequence[Path], key: str = "") -> Any:
    """Relative paths made absolute where they are found, so that a run can be resumed from any folder."""
    if isinstance(value, dict):
        return {inner: anchored(item, folders, f"{key}.{inner}") for inner, item in value.items()}
    if isinstance(value, list):
        return [anchored(item, folders) for item in value]
    if not isinstance(value, str | os.PathLike):
        return value
    value = os.fspath(value)
    place, _, name = value.rpartition(":")
    if key in (".data.dir", ".data.text.vocab") or key.endswith(".options.pretrained"):
        return _found(value, folders)
    if place == "hf" or (key in (".data.name", ".data.public") and place in ("folder", "text")):
        return f"{place}:{_found(name, folders)}"
    return f"{_found(place, folders)}:{name}" if place.endswith(".py") and name.isidentifier() else value


def _found(place: str, folders: Sequence[Path]) -> str:
    there = (folder / expanded(place) for folder in folders)
    return next((str(path.resolve()) for path in there if path.exists()), place)
