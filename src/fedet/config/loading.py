"""Loading a configuration: merge the layers, complete the method's table, validate; each mistake gets one sentence."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from fedet.config import objects, plugins
from fedet.config.schema import Config, ModelSpec
from fedet.config.sources import (
    SHORT,
    Plain,
    Source,
    anchored,
    merge,
    nearest,
    nested,
    parse_assignment,
    read_layers,
    suggested,
)
from fedet.core import Method
from fedet.errors import ConfigError
from fedet.methods import METHODS, REFERENCES
from fedet.train import Training


def load(source: Source = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a preset, a file or a mapping, apply overrides (dotted keys or nested tables) and validate.

    Within `objects.scope()` a mapping and the overrides may have objects where a name is expected.
    """
    changes = anchored(objects.named(nested(overrides or {})), [Path()])
    _check_changes(changes)
    if isinstance(source, Mapping):
        source = objects.named(nested(source))
    wanted = changes.pop("method", {})
    raw = merge(functools.reduce(_onto, read_layers(source), {}), changes)
    raw["method"] = _method_table(raw.pop("method", {}), raw.pop("methods", {}), wanted)
    try:
        return Config.model_validate_json(_json(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(_sentence(error, Config)) from None


def assignments(texts: Iterable[str]) -> Plain:
    """Parse `--set a.b=value` options; a key starts with a section or is a short name such as `rounds`."""
    pairs = dict(parse_assignment(text) for text in texts)
    known = {*Config.model_fields, *SHORT}
    for key in pairs:
        first, dot, _ = key.partition(".")
        if first not in known and not (first == "methods" and dot):
            hint = _in_a_section(key, ".") or nearest(first, known)
            raise ConfigError(f"'{key}' is not a known key{hint}: use --set SECTION.KEY=VALUE")
    return pairs


def _check_changes(changes: Mapping[str, Any]) -> None:
    """Reject a misspelt change with a hint that a file's keys don't need: the short names, and keys without their section."""
    for key in changes:
        if key not in Config.model_fields and key not in ("methods", "base"):
            raise ConfigError(
                f"{key} is not a known key{_in_a_section(key, '__') or nearest(key, [*Config.model_fields, *SHORT])}"
            )


def _in_a_section(key: str, separator: str) -> str:
    """A hint at the section that has this key, or an empty string."""
    sections = [name for name in ("data", "models", "run", "flower") if key in _keys_at(Config, [name])]
    if not sections and any(key.partition(separator)[0] in _fields(cls) for cls in METHODS):
        sections = ["method"]
    first, _, rest = key.partition("_")
    if not sections and first in Config.model_fields and rest in _keys_at(Config, [first]):
        sections, key = [first], rest
    if not sections and key in {field.name for field in dataclasses.fields(Training)}:
        sections = [f"method{separator}client"]
    return f" (did you mean '{sections[0]}{separator}{key}'?)" if sections else ""


def build_method(table: Mapping[str, Any]) -> Any:
    """Build the method of a `[method]` table."""
    cls = method_class(str(table.get("name", "")))
    values = {key: value for key, value in table.items() if key != "name"}
    _check_fields(cls, values, "method")
    tables = {name: f.default for name, f in _fields(cls).items() if dataclasses.is_dataclass(type(f.default))}
    values = merge(
        {name: dataclasses.asdict(default) for name, default in tables.items()}, values
    )  # keys that are not set keep the method's defaults
    try:
        return _adapter(cls).validate_json(_json(values), strict=True)
    except ValidationError as error:
        raise ConfigError(_sentence(error, None, "method.")) from None


@functools.lru_cache(maxsize=32)
def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Keep the validators of methods: making one takes most of the time of loading, and a plan loads thousands."""
    return TypeAdapter(cls)


def method_class(name: str) -> Any:
    """The class of a method by its name, or a user's own by `module:Class`."""
    if ":" in name:
        found = plugins.resolve(name, "method")
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ConfigError(f"'{name}' is not a subclass of fedet.Method: see docs/guide/own-method.md")
        if missing := sorted(found.__abstractmethods__):
            raise ConfigError(f"'{name}' does not define {', '.join(missing)}: see docs/guide/own-method.md")
        return found
    known = {cls.name: cls for cls in (*METHODS, *REFERENCES)}
    if name not in known:
        hint = suggested(name, known, "class")
        raise ConfigError(f"no method is called '{name}'{hint}; known: {', '.join(known)}, or module:Class")
    return known[name]


def _onto(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Merge a layer over the ones below; if it names another method, only the hyper-parameters that both have are kept."""
    old, new = base.get("method"), over.get("method")
    if isinstance(old, dict) and isinstance(new, dict) and "name" in new:
        base = {**base, "method": _shared(old, str(new["name"]))}
    return merge(base, over)


def _method_table(table: Any, per_method: Any, wanted: Any) -> Plain:
    """Merge the file's `[method]`, then `[methods.NAME]`, then the overrides; fill in every default."""
    if not isinstance(table, dict) or not isinstance(wanted, dict):
        raise ConfigError("method must be a table with a name: method = { name = 'fedet' }, or --method NAME")
    if not isinstance(per_method, dict) or not all(isinstance(own, dict) for own in per_method.values()):
        raise ConfigError("methods must hold one table per method, such as [methods.fedet]")
    for other, own in per_method.items():  # report a misspelt key even if this method is not selected
        _check_fields(method_class(other), own, f"methods.{other}")
    name = str(wanted.get("name", table.get("name", "fedet")))
    merged = merge(merge(_shared(table, name), per_method.get(name, {})), wanted) | {"name": name}
    return {"name": name, **dataclasses.asdict(build_method(merged))}


def _shared(table: Plain, name: str) -> Plain:
    """Reduce a `[method]` table written for another method to the hyper-parameters that both have."""
    if table.get("name", name) == name:
        return table
    fields = _fields(method_class(name))
    return {key: value for key, value in table.items() if key in fields}


def _fields(cls: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"a method must be a frozen dataclass, {cls!r} is not: see docs/guide/own-method.md")
    return {field.name: field for field in dataclasses.fields(cls)}


def _check_fields(cls: Any, values: Mapping[str, Any], path: str) -> None:
    fields = _fields(cls)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{path}.{key} is not a known key{_nearest_or_all(key, fields)}")
        default = fields[key].default
        if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
            _check_fields(type(default), value, f"{path}.{key}")


def _json(value: Any) -> str:
    """Serialise for pydantic's strict mode, which accepts JSON's types as they are: no true or "5" where a number belongs."""
    return json.dumps(value, default=lambda other: other.item() if isinstance(other, np.generic) else str(other))


def _sentence(error: ValidationError, root: type[BaseModel] | None, prefix: str = "") -> str:
    found = error.errors()
    first = next(
        (entry for entry in found if entry["type"] == "extra_forbidden"), found[0]
    )  # a misspelt key explains a missing one
    place = [str(part) for part in first["loc"]]
    if place and place[-1].startswith(("constrained-", "literal[")):  # one of several types that the key may have
        place.pop()
    path = prefix + ".".join(place)
    if first["type"] == "extra_forbidden":
        return f"{path} is not a known key{_nearest_or_all(str(first['loc'][-1]), _keys_at(root, first['loc'][:-1]))}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        path = path.rpartition(".")[0]
        return f"{path} has too few entries: it needs {_length(root, first['loc'][:-1])}"
    if first["type"] == "missing":
        return f"{path} is missing: set it, or build on a preset with base = 'digits'"
    if first["type"] in ("list_type", "tuple_type"):
        words = ", ".join(f'"{word.strip()}"' for word in str(first["input"]).strip("[]").split(",") if word.strip())
        given = f"[{words}]" if isinstance(first["input"], str) else f"[{_short(first['input'])}]"
        return f"{path} = {_short(first['input'])}: it is a list; write it as {given}"
    if first["type"] == "too_short":
        return f"{path} = {_short(first['input'])}: give at least one"
    if first["type"] in ("model_type", "dataclass_type", "dict_type"):
        if path.startswith("models."):
            return f"{path} = {_short(first['input'])}: give the name of a model, or a table that has one"
        also = "; or use 'on' or 'off'" if path == "run.robust" else ""
        return f"{path} = {_short(first['input'])}: it is a table; set its keys instead ({path}.KEY){also}"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not isinstance(first["input"], str):
        return f"{path}: {text}" if path else text
    return f"{path} = {_short(first['input'])}: {text[0].lower()}{text[1:]}"


def _nearest_or_all(word: str, known: Iterable[str]) -> str:
    known = list(known)
    return nearest(word, known) or f": the keys are {', '.join(known)}"


def _length(root: type[BaseModel] | None, path: Iterable[int | str]) -> int:
    """How many entries the list at this path has to have."""
    *above, name = path
    model: Any = root
    for part in above:
        model = _table_fields(model)[part].annotation
    return len(typing.get_args(_table_fields(model)[name].annotation))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys_at(root: type[BaseModel] | None, path: Iterable[int | str]) -> list[str]:
    """The known keys of the table at this path; a path that leads through a list ends at a model's table."""
    model: Any = root
    for part in path:
        field = _table_fields(model).get(part)
        model = field.annotation if field else (ModelSpec if model is not Config else None)
    return list(_table_fields(model))


def _table_fields(model: Any) -> dict[Any, Any]:
    """The keys of a table, also of one that may be left out."""
    choices = [model, *typing.get_args(model)]
    table = next((one for one in choices if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return dict(table.model_fields) if table else {}
