"""Configuration: TOML in, one validated object out; unknown keys are errors that name the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.resources
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedet import plugins
from fedet.errors import ConfigError

Plain = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AugmentConfig(Section):
    """The transform of the public images; the defaults are the paper's."""

    crop: Annotated[int, Field(ge=0)] = 4
    flip: bool = True
    color: Annotated[float, Field(ge=0)] = 1.0
    color_prob: Annotated[float, Field(ge=0, le=1)] = 0.8
    gray: Annotated[float, Field(ge=0, le=1)] = 0.2


class DataConfig(Section):
    """Which data, who holds what, and what the server has."""

    name: str = "digits"
    dir: str | None = None
    clients: Count = 30
    partition: Literal["dirichlet", "iid", "natural"] = "dirichlet"
    alpha: Positive = 0.5
    min_size: Annotated[int, Field(ge=0)] = 1
    split: tuple[Positive, Annotated[float, Field(ge=0)], Positive] = (7, 1, 2)
    pool_official_test: bool = True
    val_fraction: Fraction = 0.0
    public: str = "split"
    public_size: Count | None = None
    public_view: Literal["fixed", "per_round"] = "fixed"
    augment: AugmentConfig = AugmentConfig()
    options: Plain = Field(default_factory=dict)


class ModelSpec(Section):
    """One architecture: a family of the package or `module:callable`, and how large."""

    name: str
    width: Positive = 1.0
    stem: Literal["cifar", "imagenet"] = "cifar"
    norm: Literal["none", "group"] = "none"
    conv_bias: bool = True
    options: Plain = Field(default_factory=dict)
    label: str | None = None

    @property
    def id(self) -> str:
        """The name that clients, metrics and reports use for it."""
        if self.label:
            return self.label
        changed = [
            f"{key[0]}{value:g}" if isinstance(value, float) else str(value)
            for key, value in self.model_dump(exclude={"name", "options", "label", "conv_bias"}).items()
            if value != type(self).model_fields[key].default
        ]
        return "-".join([self.name.rpartition(":")[2], *changed])


def _spec(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Spec = Annotated[ModelSpec, BeforeValidator(_spec)]


class ModelsConfig(Section):
    """The small architectures of the clients, the server's large one, and who gets which."""

    clients: Annotated[list[Spec], Field(min_length=1)]
    server: Spec
    assignment: Literal["uniform", "balanced", "capability", "given"] = "uniform"
    given: list[str] | None = None
    budgets: list[Count] | None = None
    feature_width: Count = 512
    representation_width: Count = 128

    @model_validator(mode="after")
    def _distinct(self) -> ModelsConfig:
        ids = [spec.id for spec in [*self.clients, self.server]]
        twice = next((i for i in ids if ids.count(i) > 1), None)
        if twice:
            raise ValueError(f"two architectures are called '{twice}': give one of them another label")
        return self


class RunConfig(Section):
    """How long, how many clients a round, and what is kept."""

    rounds: Count = 60
    cohort: Count = 10
    seed: Annotated[int, Field(ge=0)] = 0
    selection: Literal["size", "uniform", "with_replacement"] = "size"
    dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    workers: Annotated[int, Field(ge=0)] = 0
    threads: Count | None = None
    device: str = "cpu"
    eval_every: Count = 1
    eval_all_every: Count = 1
    checkpoint_every: Count = 1
    budget_params: Count | None = None
    budget_seconds: Positive | None = None
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    patience: Count | None = None
    diverged: Literal["stop", "drop"] = "stop"
    report_accuracy: list[Annotated[float, Field(gt=0, le=1)]] = [0.5]


class Config(Section):
    """Everything that decides a run's result."""

    name: str = "custom"
    data: DataConfig = DataConfig()
    models: ModelsConfig
    method: Plain
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.run.selection != "with_replacement" and self.run.cohort > self.data.clients:
            raise ValueError(
                f"run.cohort = {self.run.cohort} clients a round, but data.clients = {self.data.clients}: "
                "lower the one or raise the other"
            )
        if self.run.patience and not self.data.val_fraction:
            raise ValueError("run.patience watches a validation split: set data.val_fraction, for example to 0.1")
        return self

    def digest(self) -> str:
        """Eight characters that differ where the experiment differs; its length, seed and machine don't count."""
        plain = self.model_dump(mode="json", exclude={"name": True, "data": {"dir"}, "run": {"seed", "rounds", "workers", "threads"}})
        return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()

    def to_toml(self) -> str:
        """The resolved configuration as a file that `load` reads back to the same object."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def presets() -> list[str]:
    """Names of the configurations shipped with the package."""
    folder = importlib.resources.files("fedet") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(source: str | os.PathLike[str] | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a preset, a file or a mapping, apply overrides (keys with dots, or nested tables), validate."""
    raw = _read(source)
    changes = _nested(overrides or {})
    wanted = changes.get("method", {})
    raw = merge(raw, {key: value for key, value in changes.items() if key != "method"})
    raw = _anchored(raw, Path(source).parent if isinstance(source, str | os.PathLike) else Path())
    raw["method"] = _method_table(raw.pop("method", {}), raw.pop("methods", {}), wanted)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_sentence(error, Config)) from None
    build_method(config.method)
    return config


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Tables are merged key by key; anything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=value`, the value as TOML would read it, or else as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes a.b=value, not '{text}'")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def build_method(table: Mapping[str, Any]) -> Any:
    """The method object of a `[method]` table."""
    cls = method_class(str(table.get("name", "")))
    values = {key: value for key, value in table.items() if key != "name"}
    _check_fields(cls, values, "method")
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error, None, "method.")) from None


def method_class(name: str) -> Any:
    """The class of a method by its name, or a user's by `module:Class`."""
    from fedet.methods import METHODS

    if ":" in name:
        return plugins.resolve(name, "method")
    known = {cls.name: cls for cls in METHODS}
    if name not in known:
        raise ConfigError(f"no method is called '{name}'{nearest(name, known)}; known: {', '.join(known)}, or module:Class")
    return known[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at what was meant, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""


def _read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Plain:
    if isinstance(source, Mapping):
        raw, name = _nested(source), "custom"
    else:
        text, name = _text(str(source or "digits"))
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not valid TOML: {error}") from None
    base = raw.pop("base", None)
    raw = {"name": name, **raw}
    return merge(_read(base), raw) if base else raw


def _text(source: str) -> tuple[str, str]:
    path = Path(source)
    if path.is_dir() and (path / "config.toml").is_file():
        path = path / "config.toml"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path.stem
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {path}: {error}") from None
    if source in presets():
        return (importlib.resources.files("fedet") / "presets" / f"{source}.toml").read_text(encoding="utf-8"), source
    raise ConfigError(
        f"'{source}' is neither a file nor a preset{nearest(source, presets())}; presets: {', '.join(presets())}"
    )


def _anchored(value: Any, folder: Path) -> Any:
    """Paths of `file.py:name` references made absolute, so that a run can be resumed from any folder."""
    if isinstance(value, dict):
        return {key: _anchored(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_anchored(inner, folder) for inner in value]
    place, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (colon and place.endswith(".py") and name.isidentifier()):
        return value
    there = [path for path in (Path(place).expanduser(), folder / place) if path.is_file()]
    return f"{there[0].resolve()}:{name}" if there else value


def _nested(flat: Mapping[str, Any]) -> Plain:
    out: Plain = {}
    for key, value in flat.items():
        first, *rest = key.split(".", 1)
        inner = _nested({rest[0]: value}) if rest else (_nested(value) if isinstance(value, Mapping) else value)
        out = merge(out, {first: inner})
    return out


def _method_table(table: Plain, per_method: Plain, wanted: Plain) -> Plain:
    """The file's `[method]`, then `[methods.NAME]`, then what the user asked for by hand.

    Asked for another method than the file's, its own hyper-parameters are left and only those shared with it stay.
    """
    if not isinstance(table, dict) or not isinstance(wanted, dict):
        raise ConfigError("method is a table with a name: method = { name = 'fedet' }, or --method NAME")
    name = str(wanted.get("name", table.get("name", "fedet")))
    fields = _fields(method_class(name))
    if name != table.get("name", name):
        table = {key: value for key, value in table.items() if key in fields}
    merged = merge(merge(table, per_method.get(name, {})), wanted) | {"name": name}
    return _resolved(merged)


def _resolved(table: Plain) -> Plain:
    return {"name": table["name"], **dataclasses.asdict(build_method(table))}


def _fields(cls: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"a method is a frozen dataclass, {cls!r} is none: see docs/guide/own-method.md")
    return {field.name: field for field in dataclasses.fields(cls)}


def _check_fields(cls: Any, values: Mapping[str, Any], path: str) -> None:
    fields = _fields(cls)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{path}.{key} is not a known key{nearest(key, fields)}")
        default = fields[key].default
        if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
            _check_fields(type(default), value, f"{path}.{key}")


def _sentence(error: ValidationError, root: type[BaseModel] | None, prefix: str = "") -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{prefix}{path} is not a known key{nearest(str(first['loc'][-1]), _keys_at(root, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{prefix}{path} is missing: set it in the configuration"
    text = first["msg"].removeprefix("Value error, ")
    return f"{prefix}{path} = {first['input']!r}: {text[0].lower()}{text[1:]}" if path else text


def _keys_at(root: type[BaseModel] | None, path: Iterable[int | str]) -> list[str]:
    model: Any = root
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else (ModelSpec if model is not Config else None)
    return list(getattr(model, "model_fields", {}))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
