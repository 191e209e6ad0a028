"""Search for hyper-parameters: on a grid or at random, with successive halving, judged by validation accuracy only."""

from __future__ import annotations

import importlib.resources
import itertools
import math
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedet import config as configuration
from fedet.config import Config
from fedet.config.sources import Plain, Source, merge, nearest, nested, parse_assignment
from fedet.errors import ConfigError
from fedet.reporting.statistics import Spread, spread
from fedet.study import records
from fedet.study.plan import BASE, METHOD, ONE_CORE, SEED, PlannedRun
from fedet.study.records import Record

FACTOR = 3
"""Successive halving keeps one trial in this many and gives it this many times the rounds."""
LEAST_ROUNDS = 3
VALIDATION = 0.1
"""The validation split of a configuration that has none."""
FIXED = {
    "method.name": "use --methods",
    "run.seed": "use --seeds",
    "run.rounds": "use --rounds",
    "run.threads": "every trial has one thread",
    "run.workers": "every trial has one process",
    "data.val_fraction": "trials are judged by the same validation split",
    "run.target_accuracy": "it stops a run by its test accuracy",
}
"""Keys that no search goes over, and why."""
Space = dict[str, list[Any]]
Setting = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One setting of one method."""

    method: str
    number: int
    setting: Setting


@dataclass(frozen=True)
class Score:
    """What a trial has reached: the best validation accuracy over the rounds, over the seeds; None if a run failed."""

    trial: Trial
    rounds: int
    value: Spread | None
    missing: bool = False


@dataclass(frozen=True)
class Sweep:
    """A search: the configuration, the trials of every method, the seeds, and the rounds of each stage."""

    source: Source
    changes: Plain
    trials: list[Trial]
    seeds: list[int]
    stages: list[int]

    def config(self, trial: Trial) -> Config:
        """The configuration with a trial's setting, as `fedet run` takes it."""
        return configuration.load(self.source, merge(nested(self.changes), nested(self._own(trial))))

    def planned(self, trial: Trial, seed: int, rounds: int) -> PlannedRun:
        """A run of a trial."""
        forced: Plain = {"run.seed": seed, "run.rounds": rounds, **ONE_CORE}
        if not self.config(trial).data.val_fraction:
            forced["data.val_fraction"] = VALIDATION
        layers = (self.changes, self._own(trial), forced)
        together: Plain = {}
        for layer in layers:
            together = merge(together, nested(layer))
        config = configuration.load(self.source, together)
        at = {SEED: seed, BASE: config.name, METHOD: trial.method, **trial.setting}
        return PlannedRun(records.key(config), config, at)

    def runs(self, trials: Iterable[Trial], rounds: int) -> list[PlannedRun]:
        """All runs of these trials, one seed after the other."""
        listed = list(trials)
        return [self.planned(trial, seed, rounds) for seed in self.seeds for trial in listed]

    def methods(self) -> list[str]:
        """The methods that are searched, in their order."""
        return list(dict.fromkeys(trial.method for trial in self.trials))

    @staticmethod
    def _own(trial: Trial) -> Plain:
        return {"method.name": trial.method, **trial.setting}


def prepare(
    source: Source,
    over: Sequence[str],
    *,
    methods: Sequence[str] = (),
    trials: int | None = None,
    seeds: Sequence[int] = (0,),
    halving: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Sweep:
    """Work out the trials: the same number for every method."""
    changes = dict(changes or {})
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds = {list(seeds)}: give at least one, without duplicates or negative numbers")
    base = configuration.load(source, changes)
    if base.run.target_accuracy:
        raise ConfigError("run.target_accuracy stops a run by its test accuracy, which no search may see: leave it out")
    chosen = list(dict.fromkeys(methods)) or [str(base.method["name"])]
    owners = [owner for text in over if (owner := _parts(text)[0]) is not None]
    for owner in owners:
        if owner not in chosen:
            raise ConfigError(f"--over {owner}:...: '{owner}' is not searched{nearest(owner, chosen)}: {', '.join(chosen)}")
    spaces = {method: space(over, configuration.load(source, {**changes, "method.name": method})) for method in chosen}
    sizes = {method: math.prod(len(values) for values in found.values()) for method, found in spaces.items()}
    if trials is None and len(set(sizes.values())) > 1:
        listed = ", ".join(f"{method} {size}" for method, size in sizes.items())
        raise ConfigError(f"the methods have different numbers of settings ({listed}): give --trials N, the same for all")
    for method, size in sizes.items():
        if trials is not None and size < trials:
            raise ConfigError(f"{method} has only {size} settings: lower --trials {trials}, or search over more values")
    found = [
        Trial(method, number, setting)
        for method in chosen
        for number, setting in enumerate(settings(spaces[method], trials), start=1)
    ]
    per_method = len(found) // len(chosen)
    return Sweep(source, changes, found, list(seeds), stages(base.run.rounds, per_method) if halving else [base.run.rounds])


def space(over: Sequence[str], config: Config) -> Space:
    """The values of every key for the method of this configuration.

    Each text is `KEY=V1,V2,...`, `METHOD:KEY=V1,...` for one method, or the name of a grid, of which the method's keys count.
    """
    found: Space = {}
    for text in over:
        owner, rest = _parts(text)
        if "=" in rest:
            found |= _values(rest) if owner in (None, config.method["name"]) else {}
        else:
            found |= {key: list(values) for key, values in named_space(text).items() if _has(config, key)}
    if not found:
        raise ConfigError(f"nothing to search over for {config.method['name']}: give --over KEY=V1,V2,...")
    return found


def named_space(name: str) -> Space:
    """A grid that comes with the package."""
    text = (importlib.resources.files("fedet.study") / "spaces.toml").read_text(encoding="utf-8")
    known = tomllib.loads(text)
    if name not in known:
        raise ConfigError(f"--over {name}: write KEY=V1,V2,... or one of {', '.join(known)}{nearest(name, known)}")
    return dict(known[name])


def settings(found: Space, number: int | None) -> list[Setting]:
    """The whole grid, or this many of its settings, drawn at random without repetition and the same each time."""
    total = math.prod(len(values) for values in found.values())
    if number is None or number == total:
        return [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())]
    return [_at(found, index) for index in random.Random(0).sample(range(total), number)]


def stages(rounds: int, trials: int) -> list[int]:
    """The rounds after which successive halving compares the trials that are left, the last one being all of them."""
    out = [rounds]
    while trials >= FACTOR and math.ceil(out[0] / FACTOR) >= LEAST_ROUNDS:
        out.insert(0, math.ceil(out[0] / FACTOR))
        trials = math.ceil(trials / FACTOR)
    return out


def search(
    sweep: Sweep, record_of: Callable[[str], Record | None], run: Callable[[list[PlannedRun]], object] = lambda runs: None
) -> list[Score]:
    """Do the trials, stage by stage, and return the score that each has reached; the best of each method come first.

    `run` does runs that have no record yet; without it the scores are those of the records there are.
    """
    left = list(sweep.trials)
    reached: dict[tuple[str, int], Score] = {}
    for stage, rounds in enumerate(sweep.stages):
        run(sweep.runs(left, rounds))
        scored = [score(sweep, trial, rounds, record_of) for trial in left]
        reached |= {(found.trial.method, found.trial.number): found for found in scored if not found.missing}
        if any(found.missing for found in scored):
            reached = {(s.trial.method, s.trial.number): s for s in scored} | reached
            break
        last = stage == len(sweep.stages) - 1
        left = left if last else [found.trial for method in sweep.methods() for found in _kept(scored, method)]
    return sorted(reached.values(), key=lambda found: (sweep.methods().index(found.trial.method), *_rank(found)))


def score(sweep: Sweep, trial: Trial, rounds: int, record_of: Callable[[str], Record | None]) -> Score:
    """A trial's best validation accuracy after so many rounds, over the seeds."""
    found = [record_of(sweep.planned(trial, seed, rounds).key) for seed in sweep.seeds]
    if any(record is None for record in found):
        return Score(trial, rounds, None, missing=True)
    if any(record is not None and record.failed for record in found):
        return Score(trial, rounds, None)
    return Score(trial, rounds, spread([best_validation(record) for record in found if record is not None]))


def best_validation(record: Record) -> float:
    """The best validation accuracy over the evaluated rounds."""
    return max((value for value in record.curves.get("val_accuracy") or [] if value is not None), default=0.0)


def best(scores: Sequence[Score], method: str) -> Trial | None:
    """The method's best trial, None if none was finished."""
    found = [each for each in scores if each.trial.method == method and each.value is not None]
    return min(found, key=_rank).trial if found else None


def _rank(found: Score) -> tuple[float, float, int]:
    """Further stages first, then the higher accuracy, then the order of the trials."""
    return -found.rounds, math.inf if found.value is None else -found.value.mean, found.trial.number


def _kept(scored: Sequence[Score], method: str) -> list[Score]:
    own = sorted((found for found in scored if found.trial.method == method), key=_rank)
    return own[: math.ceil(len(own) / FACTOR)]


def _parts(text: str) -> tuple[str | None, str]:
    """The method in front of `METHOD:KEY=V1,...`, None if it is for all, and the rest."""
    before, colon, _ = text.partition("=")[0].rpartition(":")
    return (before, text[len(before) + 1 :]) if colon and "=" in text else (None, text)


def _values(text: str) -> Space:
    key, _, values = text.partition("=")
    key = key.strip()
    if values.lstrip().startswith("["):
        found = parse_assignment(f"{key}={values}")[1]
    else:
        found = [parse_assignment(f"{key}={value.strip()}")[1] for value in values.split(",") if value.strip()]
    if not isinstance(found, list) or not found:
        raise ConfigError(f"--over {text}: write it as a.b=V1,V2,... or a.b=[V1, V2]")
    if key in FIXED:
        raise ConfigError(f"--over {text}: {key} can't be searched: {FIXED[key]}")
    twice = next((value for place, value in enumerate(found) if value in found[:place]), None)
    if twice is not None:
        raise ConfigError(f"--over {text}: {twice!r} is there twice, which would count as two trials")
    return {key: found}


def _at(found: Space, index: int) -> Setting:
    """The setting of the grid with this number."""
    out = {}
    for key, values in reversed(found.items()):
        index, place = divmod(index, len(values))
        out[key] = values[place]
    return {key: out[key] for key in found}


def _has(config: Config, key: str) -> bool:
    """Whether a configuration has a key."""
    table: Any = config.model_dump()
    for part in key.split("."):
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True
