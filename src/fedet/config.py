"""Configuration: TOML in, one validated object out; unknown keys are errors that name the nearest known one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from fedet import plugins
from fedet.errors import ConfigError
from fedet.layers import SHORT, Plain, Source, anchored, merge, nearest, nested, parse_assignment, source_text

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


class TextConfig(Section):
    """How texts are read: the names of a file's columns, and the word pieces."""

    text: str = "text"
    label: str = "label"
    user: str = "user"
    only: str | None = None
    max_length: Annotated[int, Field(ge=3)] = 256
    vocab: str | None = None


class DataConfig(Section):
    """Which data, who holds what, and what the server has."""

    name: str = "digits"
    dir: str | None = None
    clients: Count | Literal["all"] = 30
    partition: Literal["dirichlet", "equal", "iid", "natural"] = "dirichlet"
    alpha: Positive = 0.5
    min_size: Annotated[int, Field(ge=0)] = 1
    min_samples: Count = 1
    split: tuple[Positive, Annotated[float, Field(ge=0)], Positive] = (7.0, 1.0, 2.0)
    pool_official_test: bool = True
    val_fraction: Fraction = 0.0
    public: str = "split"
    public_size: Count | None = None
    public_view: Literal["fixed", "per_round"] = "fixed"
    augment: AugmentConfig = AugmentConfig()
    text: TextConfig = TextConfig()
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
        return "-".join([self.name.rpartition(":")[2].rstrip("/").rpartition("/")[2], *changed])


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
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = 0
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    device: str = "auto"
    eval_every: Count = 1
    eval_all_every: Count = 1
    eval_stored_every: Annotated[int, Field(ge=0)] = 0
    checkpoint_every: Count = 1
    budget_params: Count | None = None
    budget_seconds: Positive | None = None
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    patience: Count | None = None
    diverged: Literal["stop", "drop"] = "stop"
    report_accuracy: list[Annotated[float, Field(gt=0, le=1)]] = [0.5]


class FlowerConfig(Section):
    """How a run on Flower deals with machines that are slow, late or gone; no part of what the experiment is."""

    clients: Count | None = None
    wait: Positive = 300.0
    round_timeout: Positive = 600.0
    min_replies: Count = 1
    poll: Positive = 0.5
    max_reply_mb: Positive = 1024.0
    own_data: bool = False
    max_examples: Count = 10_000_000


class Config(Section):
    """Everything that decides a run's result."""

    name: str = "custom"
    data: DataConfig = DataConfig()
    models: ModelsConfig
    method: Plain
    run: RunConfig = RunConfig()
    flower: FlowerConfig = FlowerConfig()

    @field_validator("name")
    @classmethod
    def _part_of_a_path(cls, name: str) -> str:
        if not name or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError("it becomes part of the run folder's name, so it has no slashes and is not empty")
        return name

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.data.clients == "all" and self.data.partition != "natural":
            raise ValueError("data.clients = 'all' is every user: set data.partition = 'natural', or a number of clients")
        known = self.data.clients != "all" and self.run.selection != "with_replacement"
        if known and self.run.cohort > int(self.data.clients):
            raise ValueError(
                f"run.cohort = {self.run.cohort} clients a round, but data.clients = {self.data.clients}: "
                "lower the one or raise the other"
            )
        if self.run.patience and not self.data.val_fraction:
            raise ValueError("run.patience watches a validation split: set data.val_fraction, for example to 0.1")
        return self

    def digest(self) -> str:
        """Eight characters that differ where the experiment differs; its length, seed and machine don't count."""
        unused = {key for key in ("text", "min_samples") if getattr(self.data, key) == DataConfig.model_fields[key].default}
        machine = {"seed", "rounds", "workers", "threads"}
        apart: Any = {"name": True, "flower": True, "data": {"dir"} | unused, "run": machine}
        plain = self.model_dump(mode="json", exclude=apart)
        return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()

    def to_toml(self) -> str:
        """The resolved configuration as a file that `load` reads back to the same object."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def load(source: Source = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a preset, a file or a mapping, apply overrides (keys with dots, or nested tables), validate."""
    changes = anchored(nested(overrides or {}), [Path()])
    wanted = changes.pop("method", {})
    raw = merge(_read(source), changes)
    raw["method"] = _method_table(raw.pop("method", {}), raw.pop("methods", {}), wanted)
    try:
        return Config.model_validate_json(_json(raw), strict=True)
    except ValidationError as error:
        raise ConfigError(_sentence(error, Config)) from None


def assignments(texts: Iterable[str]) -> Plain:
    """What `--set a.b=value`, given any number of times, asks for; keys begin with a section or are a short name."""
    pairs = dict(parse_assignment(text) for text in texts)
    known = {*Config.model_fields, *SHORT}
    for key in pairs:
        first, dot, _ = key.partition(".")
        if first not in known and not (first == "methods" and dot):
            raise ConfigError(f"'{key}' is not a known key{nearest(first, known)}: write --set SECTION.KEY=VALUE")
    return pairs


def build_method(table: Mapping[str, Any]) -> Any:
    """The method object of a `[method]` table."""
    cls = method_class(str(table.get("name", "")))
    values = {key: value for key, value in table.items() if key != "name"}
    _check_fields(cls, values, "method")
    tables = {name: f.default for name, f in _fields(cls).items() if dataclasses.is_dataclass(type(f.default))}
    values = merge({name: dataclasses.asdict(default) for name, default in tables.items()}, values)  # a part keeps the rest
    try:
        return TypeAdapter(cls).validate_json(_json(values), strict=True)
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


def _read(source: Source, below: tuple[str, ...] = ()) -> Plain:
    """A configuration as it stands, laid over the one that its `base` names."""
    if isinstance(source, Mapping):
        raw, folder = {"name": "custom", **nested(source)}, Path()
    else:
        text, name, folder = source_text(str(source or "digits"))
        try:
            raw = {"name": name, **tomllib.loads(text)}
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not valid TOML: {error}") from None
    base = raw.pop("base", None)
    own: Plain = anchored(raw, [folder, Path()])
    if base is None:
        return own
    if not isinstance(base, str) or base in below:
        raise ConfigError(f"base = {base!r}: it names a preset or another file, once")
    beside = folder / base
    return _onto(_read(beside if beside.is_file() else base, (*below, base)), own)


def _onto(base: Plain, over: Plain) -> Plain:
    """One configuration over another; if they name different methods, only the hyper-parameters shared by both stay."""
    old, new = base.get("method"), over.get("method")
    if isinstance(old, dict) and isinstance(new, dict) and "name" in new:
        base = base | {"method": _shared(old, str(new["name"]))}
    return merge(base, over)


def _method_table(table: Any, per_method: Any, wanted: Any) -> Plain:
    """The file's `[method]`, then `[methods.NAME]`, then what the user asked for by hand; every default written out."""
    if not isinstance(table, dict) or not isinstance(wanted, dict):
        raise ConfigError("method is a table with a name: method = { name = 'fedet' }, or --method NAME")
    if not isinstance(per_method, dict) or not all(isinstance(own, dict) for own in per_method.values()):
        raise ConfigError("methods holds a table for each method: [methods.fedet], then its keys")
    for other, own in per_method.items():  # a typing error shows now, not when the method is chosen one day
        _check_fields(method_class(other), own, f"methods.{other}")
    name = str(wanted.get("name", table.get("name", "fedet")))
    merged = merge(merge(_shared(table, name), per_method.get(name, {})), wanted) | {"name": name}
    return {"name": name, **dataclasses.asdict(build_method(merged))}


def _shared(table: Plain, name: str) -> Plain:
    """A `[method]` table for another method than it was written for: only the hyper-parameters that both have."""
    if table.get("name", name) == name:
        return table
    fields = _fields(method_class(name))
    return {key: value for key, value in table.items() if key in fields}


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


def _json(value: Any) -> str:
    """For pydantic's strict mode, which takes JSON's types as they are: no true or "5" where a number belongs."""
    return json.dumps(value, default=lambda other: other.item() if hasattr(other, "item") else str(other))


def _sentence(error: ValidationError, root: type[BaseModel] | None, prefix: str = "") -> str:
    found = error.errors()
    first = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0])  # it may be why another is missing
    path = prefix + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{path} is not a known key{nearest(str(first['loc'][-1]), _keys_at(root, first['loc'][:-1]))}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return f"{path.rpartition('.')[0]} has too few entries"
    if first["type"] == "missing":
        return f"{path} is missing: set it, or start from a preset with base = 'digits'"
    if first["type"] in ("model_type", "dataclass_type", "dict_type"):
        return f"{path} = {_short(first['input'])}: it is a table, set the keys inside it ({path}.KEY)"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not isinstance(first["input"], str):
        return f"{path}: {text}" if path else text
    return f"{path} = {_short(first['input'])}: {text[0].lower()}{text[1:]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
