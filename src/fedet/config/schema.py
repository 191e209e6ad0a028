"""The tables of a configuration: keys, types, ranges and defaults."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fedet.config.sources import Plain

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _finite(value: Any, key: str = "") -> Any:
    """Refuse numbers that would be lost when the configuration is written."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key or 'a value'} = {value}: it must be a finite number")
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _finite(inner, str(name))
    return value


Options = Annotated[Plain, AfterValidator(_finite)]
"""Keys and values for a model or a function, which nothing else is known about."""


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AugmentConfig(Section):
    """Augmentation of the public images; the defaults are the paper's."""

    crop: Annotated[int, Field(ge=0)] = 4
    flip: bool = True
    color: Annotated[float, Field(ge=0)] = 1.0
    color_prob: Annotated[float, Field(ge=0, le=1)] = 0.8
    gray: Annotated[float, Field(ge=0, le=1)] = 0.2


class TextConfig(Section):
    """How texts are read: the names of the file's columns, and the tokenizer."""

    text: str = "text"
    label: str = "label"
    user: str = "user"
    only: str | None = None
    max_length: Annotated[int, Field(ge=3)] = 256
    vocab: str | None = None


class DataConfig(Section):
    """The data set, its partition among clients, and the server's public data."""

    name: str = "digits"
    dir: str | None = None
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["all"] = 30
    partition: Literal["dirichlet", "equal", "iid", "natural"] = "dirichlet"
    alpha: Positive = 0.5
    min_size: Annotated[int, Field(ge=0)] = 1
    min_samples: Count = 1
    standardise: bool = False
    split: tuple[Positive, Annotated[float, Field(ge=0)], Positive] = (7.0, 1.0, 2.0)
    pool_official_test: bool = True
    val_fraction: Fraction = 0.0
    public: str = "split"
    public_size: Count | None = None
    public_view: Literal["fixed", "per_round"] = "fixed"
    augment: AugmentConfig = AugmentConfig()
    text: TextConfig = TextConfig()
    options: Options = Field(default_factory=dict)


class ModelSpec(Section):
    """One architecture: a family of the package in some size, or `module:callable`."""

    name: str
    width: Positive = 1.0
    stem: Literal["cifar", "imagenet"] = "cifar"
    norm: Literal["none", "group"] = "none"
    conv_bias: bool = True
    options: Options = Field(default_factory=dict)
    label: str | None = None

    @property
    def id(self) -> str:
        """The name used for it in clients, metrics and reports."""
        if self.label:
            return self.label
        changed = [
            f"{key[0]}{value:g}" if isinstance(value, float) else str(value)
            for key, value in self.model_dump(exclude={"name", "options", "label", "conv_bias"}).items()
            if value != type(self).model_fields[key].default
        ]
        return "-".join([self.name.rpartition(":")[2].rstrip("/").rpartition("/")[2], *changed])


def _with_options(spec: ModelSpec) -> str:
    """A name that tells an architecture from others of its family by its options, as far as these are short."""
    short = {key: str(value) for key, value in spec.options.items() if isinstance(value, str | int | float)}
    return "-".join([spec.id, *(f"{key}{value}" for key, value in short.items() if len(value) <= 20 and "/" not in value)])


def _spec(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Spec = Annotated[ModelSpec, BeforeValidator(_spec)]


class ModelsConfig(Section):
    """The clients' small architectures, how they are assigned, and the server's large one."""

    clients: Annotated[list[Spec], Field(min_length=1)]
    server: Spec
    assignment: Literal["uniform", "balanced", "examples", "classes", "capability", "given"] = "uniform"
    given: list[str] | None = None
    budgets: list[Count] | None = None
    feature_width: Count = 512
    representation_width: Count = 128

    @model_validator(mode="after")
    def _distinct(self) -> ModelsConfig:
        """Give an architecture that would share its name with an earlier one a label with its options, or the server's own."""
        named: list[ModelSpec] = []
        for spec in [*self.clients, self.server]:
            ids = [other.id for other in named]
            choices = [spec.id, _with_options(spec), *([f"{spec.id}-server"] if spec is self.server else [])]
            free = next((choice for choice in choices if choice not in ids), None)
            if free is None or (spec.label and free != spec.id):
                raise ValueError(f"two architectures are named '{spec.id}': give one of them another label")
            named.append(spec if free == spec.id else spec.model_copy(update={"label": free}))
        *clients, server = named
        if [*clients, server] == [*self.clients, self.server]:
            return self
        return self.model_copy(update={"clients": clients, "server": server})


def _clip_factor(value: object) -> object:
    """Runs of earlier versions have words."""
    return {"none": 0.0, "median": 1.0}.get(value, value) if isinstance(value, str) else value


class RobustConfig(Section):
    """Defences against hostile clients, one by one; the defaults are what `run.robust = "on"` means, and were measured."""

    revision: ClassVar[int] = 1
    """Raised with every change after which the same defences give other results: older records then no longer count."""

    clip: Annotated[NonNegative, BeforeValidator(_clip_factor)] = 1.5
    reject: NonNegative = 10.0
    agreement: Annotated[float, Field(ge=0, le=1)] = 0.5
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.1
    direction: Annotated[float, Field(ge=0, le=1)] = 0.02
    replays: bool = True
    examples: Annotated[float, Field(ge=0)] = 10.0
    average: Literal["mean", "median", "trimmed", "krum", "multi-krum", "geometric"] = "mean"
    consensus: Literal["variance", "entropy", "calibrated", "agreement", "trimmed", "median"] = "variance"
    cap: Annotated[float, Field(ge=0)] = 0.0
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2

    def unused(self) -> set[str]:
        """Keys with their defaults that older versions did not have: they are no part of an experiment's identity."""
        return {key for key in ("correlation",) if getattr(self, key) == type(self).model_fields[key].default}


class AttackConfig(Section):
    """A simulated attack by some of the clients, drawn from the seed."""

    kind: Literal["flip", "scale", "sign", "constant", "onehot", "noise", "backdoor", "stealth"]
    share: Annotated[float, Field(ge=0, le=1)] = 0.2
    strength: Positive | None = None
    target: Annotated[int, Field(ge=0)] = 0
    trigger: Count = 2


def _defences(value: object) -> object:
    return {"off": None, "on": {}}.get(value, value) if isinstance(value, str) else value


def _attack(value: object) -> object:
    value = {"kind": value} if isinstance(value, str) else value
    return None if isinstance(value, dict) and value.get("kind") == "none" else value


class RunConfig(Section):
    """Length of the run, clients per round, evaluation, checkpoints and stopping rules."""

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
    robust: Annotated[RobustConfig | None, BeforeValidator(_defences)] = None
    ban_after: Count | None = None
    attack: Annotated[AttackConfig | None, BeforeValidator(_attack)] = None

    def unused(self) -> set[str]:
        """Keys that are not set and that older versions did not have: they are no part of an experiment's identity."""
        return {key for key in ("robust", "ban_after", "attack") if getattr(self, key) is None}

    @property
    def drops_diverged(self) -> bool:
        """Whether the run goes on without clients and rounds that left the finite numbers; defences imply it."""
        return self.diverged == "drop" or self.robust is not None


class PrivacyConfig(Section):
    """Differential privacy at the clients, for single examples (`clip`, `noise`) and for whole updates; off by default."""

    clip: NonNegative = 0.0
    noise: NonNegative = 0.0
    update_clip: NonNegative = 0.0
    update_noise: NonNegative = 0.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    secret: bool = False

    @property
    def on(self) -> bool:
        """Whether it changes anything."""
        return bool(self.clip or self.update_clip)

    @model_validator(mode="after")
    def _possible(self) -> PrivacyConfig:
        for noise, clip in (("noise", "clip"), ("update_noise", "update_clip")):
            if getattr(self, noise) and not getattr(self, clip):
                raise ValueError(f"{noise} is relative to a clipping norm: set privacy.{clip} as well, for example to 1")
        return self


class FlowerConfig(Section):
    """How a run on Flower treats slow, late or lost machines; not part of the experiment's identity."""

    clients: Count | None = None
    wait: Positive = 300.0
    round_timeout: Positive = 600.0
    min_replies: Count = 1
    poll: Positive = 0.5
    max_reply_mb: Positive = 1024.0
    own_data: bool = False
    max_examples: Count = 10_000_000


class Config(Section):
    """Everything that determines a run's result."""

    name: str = "custom"
    data: DataConfig = DataConfig()
    models: ModelsConfig
    method: Plain
    run: RunConfig = RunConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    flower: FlowerConfig = FlowerConfig()

    @field_validator("name")
    @classmethod
    def _part_of_a_path(cls, name: str) -> str:
        if not name or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError("it becomes part of the run folder's name, so it must not be empty or contain slashes")
        return name

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.data.clients == "all" and self.data.partition != "natural":
            raise ValueError(
                "data.clients = 'all' means one client per user: set data.partition = 'natural', or a number of clients"
            )
        known = self.data.clients != "all" and self.run.selection != "with_replacement"
        if known and self.run.cohort > int(self.data.clients):
            raise ValueError(
                f"run.cohort = {self.run.cohort} is more than data.clients = {self.data.clients}: "
                "lower run.cohort or raise data.clients"
            )
        if self.run.patience and not self.data.val_fraction:
            raise ValueError("run.patience needs a validation split: set data.val_fraction, for example to 0.1")
        return self

    def digest(self) -> str:
        """Eight characters that identify the experiment, regardless of its length, its seed and the machine."""
        unused = {
            key
            for key in ("text", "min_samples", "standardise")
            if getattr(self.data, key) == DataConfig.model_fields[key].default
        }
        machine = {"seed", "rounds", "workers", "threads"}
        run: Any = dict.fromkeys(machine | self.run.unused(), True)
        if self.run.robust is not None:
            run["robust"] = self.run.robust.unused()
        apart: Any = {"name": True, "flower": True, "data": {"dir"} | unused, "run": run}
        if not self.privacy.on:
            apart["privacy"] = True
        plain = self.model_dump(mode="json", exclude=apart)
        return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()

    def to_toml(self) -> str:
        """The resolved configuration as TOML; `load` reads it back to an equal object."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
