"""Plans: a study in one TOML file, and the list of runs that it stands for."""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedet import config as configuration
from fedet.config import Config
from fedet.config.sources import Plain, merge, nearest, nested, parse_toml
from fedet.errors import ConfigError
from fedet.methods import METHODS, REFERENCES
from fedet.storage.files import reason
from fedet.study import records

Scale = Literal["desk", "paper"]
SEED, BASE, METHOD, VARIANT, GRID, DATA = "seed", "base", "method", "variant", "grid", "data"
ONE_CORE = {"run.threads": 1, "run.workers": 0}
"""Every run of a study uses one core: as many runs as cores are in progress at once."""


class Table(BaseModel):
    """A table of a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Grid(Table):
    """Every combination of bases, axes, variants, methods and seeds."""

    bases: Annotated[list[str], Field(min_length=1)]
    methods: list[str] | Literal["all"] = []
    references: list[str] | Literal["all"] = []
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    variants: dict[str, Plain] = {}
    settings: Plain = {}
    settings_of: dict[str, Plain] = {}

    def method_names(self) -> list[str]:
        """The methods that are compared."""
        return [cls.name for cls in METHODS] if self.methods == "all" else list(self.methods)

    def reference_names(self) -> list[str]:
        """The references that are shown with them."""
        return [cls.name for cls in REFERENCES] if self.references == "all" else list(self.references)


class PaperValues(Table):
    """A table of the paper: `rows` has a list of [mean, deviation] per value of the coordinate `row`."""

    table: str
    row: str = METHOD
    columns: list[dict[str, Any]]
    rows: dict[str, list[list[float]]]


class Plan(Table):
    """A study: its runs and how its table is laid out."""

    name: str
    title: str
    grids: Annotated[list[Grid], Field(min_length=1)]
    kind: Literal["runs", "sizes", "data"] = "runs"
    metric: Literal["best", "late", "final", "c_acc"] = "best"
    targets: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    rows: Annotated[list[str], Field(min_length=1)] = [METHOD]
    columns: list[str] = []
    order: list[str] = []
    against: str | None = None
    labels: dict[str, str] = {}
    paper: PaperValues | None = None


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: its configuration, and the coordinates by which tables refer to it."""

    key: str
    config: Config
    coordinates: dict[str, Any]


def plans() -> list[str]:
    """The names of the plans that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def load(source: str, scale: Scale = "desk") -> Plan:
    """Read a plan by its name or from a file; `[scale.paper]` in it replaces keys for that scale."""
    path = Path(source)
    try:
        if path.is_file():
            text, name, place = path.read_text(encoding="utf-8"), path.stem, path.parent
        elif source in plans():
            text, name, place = (_folder() / f"{source}.toml").read_text(encoding="utf-8"), source, None
        else:
            raise ConfigError(f"'{source}' is neither a file nor a plan{nearest(source, plans())}; plans: {', '.join(plans())}")
        raw = parse_toml(text, f"the plan {source}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the plan {source}: {error}") from None
    if not raw.keys() & {"bases", "grids"}:
        raise ConfigError(f"{source} is not a plan, it has neither bases nor grids: for a configuration there is `fedet run`")
    try:
        return Plan.model_validate(_with_grids(_scaled({"name": name, "title": name, **raw}, scale), place))
    except ValidationError as error:
        raise ConfigError(f"the plan {source}: {reason(error)}") from None


def expand(plan: Plan, changes: Mapping[str, Any] | None = None) -> list[PlannedRun]:
    """The plan's runs in the order in which they are done; two cells may stand for the same run."""
    found = [run for number, grid in enumerate(plan.grids) for run in _runs(grid, number, changes or {})]
    names = {name: None for run in found for name in run.coordinates}
    for key, listed in {"order": plan.order, "rows": plan.rows, "columns": plan.columns}.items():
        for name in listed:
            if name not in names and (key == "order" or name != VARIANT):  # a scale may have no variants
                raise ConfigError(f"{key}: '{name}' is not a coordinate of this plan: {', '.join(names)}")
    if plan.against is not None:
        name = compared(plan)[0]
        known = dict.fromkeys(str(_hashable(run.coordinates.get(name))) for run in found)
        if plan.against not in known and len(known) > 1:  # one alone is not compared
            raise ConfigError(f"against: '{plan.against}' is not a {name} of this plan: {', '.join(known)}")
    order = [*plan.order, *(name for name in (SEED, GRID, *names) if name not in plan.order)]
    values = {name: list(dict.fromkeys(_hashable(run.coordinates.get(name)) for run in found)) for name in order}
    return sorted(found, key=lambda run: [values[name].index(_hashable(run.coordinates.get(name))) for name in order])


def column_names(plan: Plan) -> list[str]:
    """The coordinates that make up a column of the table: by default the bases and the axes that are not rows."""
    if plan.columns:
        return plan.columns
    axes = dict.fromkeys(axis for grid in plan.grids for axis in grid.axes)
    return [name for name in (BASE, *axes) if name not in plan.rows]


def across(plan: Plan) -> bool:
    """Whether what is compared stands in one row: rows that are testbeds are not compared with each other."""
    return all(name in (BASE, DATA) for name in plan.rows) and bool(column_names(plan))


def compared(plan: Plan) -> list[str]:
    """The coordinates that are compared."""
    return column_names(plan) if across(plan) else plan.rows


def _folder() -> Traversable:
    return importlib.resources.files("fedet.study") / "plans"


def _scaled(raw: Plain, scale: Scale) -> Plain:
    scales = raw.pop("scale", {})
    if scale == "desk":
        return raw
    if scale not in scales:
        raise ConfigError(f"the plan has no settings for --scale {scale}: add a table [scale.{scale}]")
    return {**raw, **scales[scale]}


def _with_grids(raw: Plain, place: Path | None) -> Plain:
    """Move the keys of a grid at the top level into the plan's grids, which inherit them."""
    shared = {name: raw.pop(name) for name in list(raw) if name in Grid.model_fields}
    grids = [
        {**shared, **grid, "settings": merge(shared.get("settings", {}), grid.get("settings", {}))}
        for grid in raw.pop("grids", [{}])
    ]
    for grid in grids:
        grid["bases"] = [_beside(place, base) for base in grid.get("bases", [])]
        grid["settings_of"] = {_beside(place, base): own for base, own in grid.get("settings_of", {}).items()}
    return {**raw, "grids": grids}


def _beside(place: Path | None, base: str) -> str:
    """A base that is a file next to the plan, or else as it is."""
    return str(place / base) if place is not None and (place / base).is_file() else base


def _runs(grid: Grid, number: int, changes: Mapping[str, Any]) -> Iterator[PlannedRun]:
    choices: dict[str, Sequence[Any]] = {
        SEED: grid.seeds,
        GRID: [number],
        BASE: grid.bases,
        **grid.axes,
        **({VARIANT: list(grid.variants)} if grid.variants else {}),
        METHOD: [*grid.method_names(), *grid.reference_names()] or [None],
    }
    for values in itertools.product(*choices.values()):
        at = dict(zip(choices, values, strict=True))
        config = _config(grid, at, changes)
        known = {**at, METHOD: config.method["name"], DATA: config.data.name, BASE: Path(at[BASE]).stem}
        yield PlannedRun(records.key(config), config, known)


def _config(grid: Grid, at: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    layers = [
        grid.settings,
        grid.settings_of.get(at[BASE], {}),
        grid.variants.get(at.get(VARIANT, ""), {}),
        {axis: at[axis] for axis in grid.axes},
        {"run.seed": at[SEED], **({"method.name": at[METHOD]} if at[METHOD] else {})},
        changes,
        ONE_CORE,
    ]
    together: Plain = {}
    for layer in layers:
        together = merge(together, nested(layer))
    try:
        return configuration.load(at[BASE], together)
    except ConfigError as error:
        cell = ", ".join(f"{name} {value}" for name, value in at.items() if name != GRID and value is not None)
        raise ConfigError(f"{error} (in the plan's cell {cell})") from None


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value
