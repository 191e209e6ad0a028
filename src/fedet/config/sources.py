"""Where a configuration's values come from: presets, files, their bases and overrides, merged in layers."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedet.errors import ConfigError

Plain = dict[str, Any]
Source = str | os.PathLike[str] | Mapping[str, Any] | None
SHORT = {"data": "data.name", "method": "method.name", "rounds": "run.rounds", "seed": "run.seed", "data_dir": "data.dir"}
"""Short names of the keys that are changed most often."""
MAX_BYTES = 1 << 20
"""Of a configuration file; the presets have about a thousandth of that."""
MAX_DEPTH = 32
"""Levels of tables and lists in a configuration."""
_LONG_KEY = re.compile(
    r"""(?:(?:[\w-]{1,100}+|"(?:[^"\\\n]|\\.){0,100}+"|'[^'\n]{0,100}+')[ \t]{0,100}+\.[ \t]{0,100}+){200}""", re.ASCII
)
"""A key of so many parts that the parser, which copies them all at each one, needs minutes; longer parts fit in less often."""


def presets() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _preset_folder().iterdir() if entry.name.endswith(".toml"))


def preset_descriptions() -> dict[str, str]:
    """Each preset with the first sentence of the comment that it starts with."""
    texts = {name: (_preset_folder() / f"{name}.toml").read_text(encoding="utf-8") for name in presets()}
    comments = {name: text.partition("\n\n")[0].replace("\n#", "").removeprefix("#").strip() for name, text in texts.items()}
    return {name: f"{comment.partition('. ')[0].removesuffix('.')}." for name, comment in comments.items()}


def _preset_folder() -> Traversable:
    return importlib.resources.files("fedet.config") / "presets"


def read_layers(source: Source) -> list[Plain]:
    """Read a configuration, its `base`, the base's `base` and so on, as plain tables; the lowest layer comes first."""
    layers: list[Plain] = []
    seen: list[str] = []
    while True:
        if isinstance(source, Mapping):
            raw, folder = {"name": "custom", **nested(source)}, Path()
        else:
            text, name, folder = source_text("digits" if source is None else str(source))
            raw = {"name": name, **parse_toml(text, str(source))}
        base = raw.pop("base", None)
        layers.insert(0, anchored(raw, [folder, Path()]))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"base = {base!r}: it must be the name of a preset or of another file")
        beside = folder / base
        source = str(beside.resolve()) if os.path.isfile(beside) else base
        if source in seen:
            raise ConfigError(f"circular base: {' -> '.join([*seen, source])}")
        seen.append(source)


def parse_toml(text: str, what: str) -> Plain:
    """Parse TOML that anyone may have written; raises `ConfigError` for whatever is wrong with it."""
    if _LONG_KEY.search(text):
        raise ConfigError(f"{what} is nested more than {MAX_DEPTH} levels deep")
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{what} is not valid TOML: {why}") from None
    check_depth(raw, what)
    return raw


def check_depth(value: Any, what: str) -> None:
    """Refuse tables and lists that are nested more deeply than any setting is; what walks over them is recursive."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise ConfigError(f"{what} is nested more than {MAX_DEPTH} levels deep")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, or an empty string."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""


def suggested(name: str, known: Iterable[str], what: str) -> str:
    """A hint at what a name that is not known may have been meant to be: the most similar one, or something in a file."""
    return f": name the {what} in the file, too, as {name}:NAME" if name.endswith(".py") else nearest(name, known)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Merge tables key by key and replace anything else; a server model of another name is replaced as a whole."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not (key == "server" and _another(old, value)):
            value = merge(old, value)
        out[key] = value
    return out


def _another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a table describes another model, to which width and options of the old one don't apply."""
    return bool(new.get("name", old.get("name")) != old.get("name"))


def nested(flat: Mapping[str, Any]) -> Plain:
    """Turn dotted keys into nested tables."""
    out: Plain = {}
    for key, value in flat.items():
        first, *rest = key.split(".", 1)
        inner = nested({rest[0]: value}) if rest else (nested(value) if isinstance(value, Mapping) else value)
        out = merge(out, {first: inner})
    return out


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn keyword arguments into configuration keys: short names, `data__alpha` for `data.alpha`, or nested tables."""
    return {
        key.replace("__", ".") if isinstance(value, Mapping) else SHORT.get(key, key.replace("__", ".")): value
        for key, value in values.items()
        if value is not None
    }


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `a.b=value`; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set '{text}': write it as a.b=value")
    try:
        return key.strip(), parse_toml(f"value = {value}", f"--set {key}")["value"]
    except ConfigError:
        return key.strip(), value


def source_text(source: str) -> tuple[str, str, Path]:
    """The text of a file or preset, its name, and the folder that its paths are relative to."""
    path = Path(source)
    if os.path.isfile(path / "config.toml"):  # Path's own methods raise for names that no file can have
        path = path / "config.toml"
    if os.path.isfile(path):
        return read_text(path), path.stem, path.parent
    if source in presets():
        return (_preset_folder() / f"{source}.toml").read_text(encoding="utf-8"), source, Path()
    source = source if len(source) <= 200 else f"{source[:197]}..."
    if source and os.path.isdir(source):
        raise ConfigError(f"'{source}' is a folder without config.toml: give a TOML file, the folder of a run or a preset")
    raise ConfigError(f"'{source}' is neither a file nor a preset{nearest(source, presets())}; presets: {', '.join(presets())}")


def read_text(path: Path) -> str:
    """A configuration file's text, if it is no larger than one may be."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MB, so it is not a configuration")
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a configuration: it is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error}") from None


def expanded(place: str | os.PathLike[str]) -> Path:
    """Expand ~ in a path; leave it if there is no such user (`Path.expanduser` would raise)."""
    return Path(os.path.expanduser(place))


def anchored(value: Any, folders: Sequence[Path], key: str = "") -> Any:
    """Make relative paths absolute where they exist, so that a run can be resumed from any folder."""
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
    return next((str(path.resolve()) for path in there if os.path.exists(path)), place)
