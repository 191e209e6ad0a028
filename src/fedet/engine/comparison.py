"""Compare methods or configurations under the same conditions, in runs one after the other or side by side."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fedet import config as configuration
from fedet import data as datasets
from fedet import experiment
from fedet.config import Config, objects, plugins
from fedet.config.sources import Source, nested, overrides
from fedet.engine.callbacks import Callbacks
from fedet.engine.session import Result, build, cant_import, run_or_resume
from fedet.errors import ConfigError, FedetError, Interrupted, StopRun
from fedet.methods import METHODS, REFERENCES
from fedet.methods.references import PublicLabels
from fedet.reporting import notebook, report, results
from fedet.reporting.run_data import read_run
from fedet.storage.files import create, read_json, write_json
from fedet.storage.metrics import Record
from fedet.storage.records import ComparisonRecord
from fedet.storage.run_folder import COMPARISON, RunFolder, cache_folder
from fedet.workers import side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several finished runs under the same conditions."""

    folder: Path
    results: list[Result]
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / "report.html"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per method or configuration."""
        return results.comparison_rows([read_run(result.run_dir) for result in self.results])

    def to_pandas(self) -> Any:
        """The table as a pandas data frame, one row per method or configuration."""
        return notebook.comparison_frame(self.rows)

    def plot(self) -> Figure:
        """A matplotlib figure of the accuracy of each output over the rounds; of several seeds mean and range."""
        return notebook.comparison_plot([read_run(result.run_dir) for result in self.results])

    def __repr__(self) -> str:
        try:
            return notebook.comparison_text(self.rows, self.folder)
        except FedetError:  # its folder is gone
            return f"{len(self.results)} runs, which were in {self.folder}"

    def _repr_html_(self) -> str:
        return notebook.comparison_table(self.rows, self.folder.name)


def compare(
    configs: Source | list[Source] | tuple[Source, ...] = None,
    *,
    methods: Iterable[Any] | None = None,
    seeds: Iterable[int] = (0,),
    out: str | Path = "runs",
    equal_traffic: bool = False,
    references: bool = False,
    jobs: int | None = None,
    callbacks: Callbacks | None = None,
    command: str | None = None,
    **changes: Any,
) -> Comparison:
    """Run methods or configurations for the same seeds, and so on the same partitions, cohorts and initial weights.

    `methods` are names, classes or instances; where a change takes a name, it can be an object, as in `fedet.run`.
    With `equal_traffic` every other run stops at the last round within the number of parameters that the first one sent.
    `references` adds runs that are not federated and show what was possible; they do all rounds and send nothing. `jobs` is
    how many runs are in progress at once (by default one per core). Called again, it keeps the runs that are finished and
    resumes the others.
    """
    sources = list(configs) if isinstance(configs, list | tuple) else [configs]
    entries = _entries(sources, _listed("methods", methods, "['fedet', 'fedavg']"), changes)
    seeds = _listed("seeds", seeds, "[0, 1, 2]")
    _check(entries, seeds, Path(out), jobs)
    seeds = [int(seed) for seed in seeds]  # NumPy's numbers are none of JSON's
    notes: list[str] = []
    if references:
        entries |= _references(sources, entries, changes, seeds[0], Path(out), notes)
    first, waves = _waves(entries, equal_traffic)
    folder = Path(out) / f"{COMPARISON}{next(iter(entries.values())).name}-{_digest(entries, seeds, equal_traffic)}"
    callbacks = _stopping(callbacks or Callbacks())
    runs_at_once = _jobs(list(entries.values()), jobs, callbacks)
    threads = _threads(folder, min(runs_at_once, len(seeds) * max(map(len, waves))))
    listing = {"runs": [f"{label}-s{seed}" for seed in seeds for label in entries], "seeds": seeds, "command": command}
    create(folder)
    write_json(folder / "comparison.json", listing | {"threads": threads, "notes": notes})
    found: dict[tuple[int, str], Result] = {}
    everything = [
        PlannedRun(config, folder, f"{label}-s{seed}", command) for seed in seeds for label, config in entries.items()
    ]
    callbacks.planned([run.config for run in everything if run.finished() is None])
    for wave in waves:
        planned = {}
        for seed, label in ((seed, label) for seed in seeds for label in wave):
            changed: dict[str, Any] = {"run.seed": seed, "run.threads": entries[label].run.threads or threads}
            if equal_traffic and label != first and not _is_reference(entries[label]):
                sent = found[seed, first].traffic
                changed["run.budget_params"] = sent["params_up"] + sent["params_down"]
            config = configuration.load(entries[label].model_dump(mode="json"), changed)
            planned[seed, label] = PlannedRun(config, folder, f"{label}-s{seed}", command)
        found |= dict(zip(planned, _run(list(planned.values()), runs_at_once, callbacks), strict=True))
    done = [found[seed, label] for seed in seeds for label in entries]
    report.write_comparison(folder, [read_run(result.run_dir) for result in done], notes)
    return Comparison(folder, done, notes)


def write_report(folder: Path) -> Path:
    """Write the report of a run or of a comparison again; runs of a comparison that have not started are left out."""
    listing = folder / "comparison.json"
    if not listing.is_file():
        return report.write_run(folder)
    try:
        record = read_json(listing, ComparisonRecord)
    except FedetError as error:
        raise FedetError(f"{error}; run the same comparison again, it keeps the runs that are finished") from None
    started = [path for name in record["runs"] if ((path := folder / Path(name).name) / "config.toml").is_file()]
    return report.write_comparison(folder, [read_run(path) for path in started], record.get("notes", []))


def _threads(folder: Path, runs_at_once: int) -> int:
    """The number of threads of every run: as stored when the comparison first started.

    It does not depend on how many runs are left, because the thread count changes floating-point rounding.
    """
    with contextlib.suppress(FedetError):  # missing or damaged
        threads = read_json(folder / "comparison.json", ComparisonRecord).get("threads")
        if threads:
            return int(threads)
    return 1 if runs_at_once > 1 else torch.get_num_threads()


def _check(entries: Mapping[str, Config], seeds: list[int], out: Path, jobs: int | None) -> None:
    """Report mistakes before the first run starts, not after hours of them."""
    whole = all(isinstance(seed, Integral) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds) or not whole or min(seeds) < 0:
        raise ConfigError(f"seeds = {seeds}: give at least one whole number, without duplicates or negative numbers")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: it must be at least 1")
    for config in entries.values():
        build(
            config.model_copy(update={"run": config.run.model_copy(update={"seed": seeds[0]})}), cache_folder(out), Callbacks()
        )


def _listed(key: str, values: Any, example: str) -> list[Any]:
    """A list that a program passed; None is an empty one."""
    if isinstance(values, str) or not isinstance(values, Iterable | None):
        raise ConfigError(f"{key} = {values!r}: give a list, such as {example}")
    return [] if values is None else list(values)


def _entries(sources: list[Source], methods: list[str], changes: Mapping[str, Any]) -> dict[str, Config]:
    if methods == ["all"]:
        methods = [cls.name for cls in METHODS]
    elif "all" in methods:
        raise ConfigError("methods: 'all' means all ten, so it stands alone; --references adds what is not federated")
    entries: dict[str, Config] = {}
    for source in sources:
        for chosen in [{"method.name": method} for method in methods] or [{}]:
            config = configuration.load(source, overrides({**changes, **chosen}))
            short = config.method["name"].rpartition(":")[2]
            label = short if len(sources) == 1 else (f"{config.name}-{short}" if methods else config.name)
            if label in entries:
                raise ConfigError(f"'{label}' is listed twice: name each method or configuration once")
            entries[label] = config
    return entries


def _references(
    sources: list[Source], entries: Mapping[str, Config], changes: Mapping[str, Any], seed: int, out: Path, notes: list[str]
) -> dict[str, Config]:
    """The references of the configurations; those that differ in nothing but the method have the first one's in common."""
    by_conditions: dict[str, list[Config]] = {}
    for source in sources:
        found = [configuration.load(source, _for_method(cls, changes)) for cls in REFERENCES]
        by_conditions.setdefault(json.dumps(found[0].model_dump(mode="json", exclude={"name", "method"})), found)
    added = {}
    for config in (config for found in by_conditions.values() for config in found):
        name = config.method["name"]
        label = name if len(by_conditions) == 1 else f"{config.name}-{name}"
        if name == PublicLabels.name and not _has_public_labels(config, seed, out):
            notes.append(f"{label} was left out: it needs public data with labels, and data.public = '{config.data.public}'")
        elif label not in entries:
            added[label] = config
    _check(added, [seed], out, None)
    return added


def _for_method(cls: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes without those hyper-parameters that this method does not have."""
    wanted = nested(overrides(changes))
    own = {key: value for key, value in wanted.get("method", {}).items() if key in {f.name for f in fields(cls)}}
    return wanted | {"method": own | {"name": cls.name}}


def _has_public_labels(config: Config, seed: int, out: Path) -> bool:
    public = datasets.load(config.data, seed, cache_folder(out)).public
    return public is not None and public.labels is not None


def _is_reference(config: Config) -> bool:
    return bool(configuration.method_class(config.method["name"]).reference)


def _waves(entries: Mapping[str, Config], equal_traffic: bool) -> tuple[str, list[list[str]]]:
    """The first federated run, and the groups of runs that can be done at the same time."""
    federated = [label for label, config in entries.items() if not _is_reference(config)]
    if not equal_traffic:
        return "", [[*entries]]
    if not federated:
        raise ConfigError("equal traffic needs a federated method to compare with: references send nothing")
    return federated[0], [federated[:1], [label for label in entries if label != federated[0]]]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison, which may be finished, unfinished or not started."""

    config: Config
    folder: Path
    name: str
    command: str | None

    def finished(self) -> Result | None:
        """The result, if the run is finished; its report is what a run writes last."""
        run = RunFolder(self.folder / self.name)
        if not (run.path / "report.html").is_file():
            return None
        result = run.result()
        return Result(run.path, result, objects.code()) if result.get("stopped") else None


def _run(planned: Sequence[PlannedRun], runs_at_once: int, callbacks: Callbacks) -> list[Result]:
    """Do the runs that are not finished, one after the other or side by side, and return the results of all."""
    todo = [run for run in planned if run.finished() is None]
    try:
        if min(runs_at_once, len(todo)) < 2:
            for run in todo:
                run_or_resume(run.config, run.folder, run.name, callbacks, run.command)
        else:
            _run_side_by_side(todo, runs_at_once, callbacks)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; or continue the whole comparison with the same command") from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped, with checkpoints in {todo[0].folder}; continue with the same command") from None
    return [run.finished() or _missing(run) for run in planned]


def _run_side_by_side(planned: Sequence[PlannedRun], runs_at_once: int, callbacks: Callbacks) -> None:
    cores = (os.cpu_count() or 1) // runs_at_once
    observers = [callbacks.for_another_run() if callbacks.for_another_run else callbacks for _ in planned]
    started: set[int] = set()
    ended: set[int] = set()

    def on_message(index: int, message: Mapping[str, Any]) -> None:
        if "started" in message:
            started.add(index)
            path, done = message["started"]
            observers[index].started(planned[index].config, Path(path), done)
        elif "round" in message:
            observers[index].told(message["round"])
        elif "warning" in message:
            observers[index].warning(message["warning"])
        elif "done" in message:
            ended.add(index)
            observers[index].ended(planned[index].finished())
        else:
            observers[index].stage(*message["stage"])

    specs = []
    for run in planned:
        workers = 0 if cores < 2 or run.config.run.workers == 0 else cores
        spec = {"config": run.config.model_dump(mode="json"), "folder": str(run.folder), "name": run.name}
        specs.append(spec | {"command": run.command, "workers": workers})
        experiment.share_arrays(run.config, cache_folder(run.folder))
    try:
        side_by_side.run_all(specs, runs_at_once, on_message)
    finally:
        for index in started - ended:
            observers[index].ended(None)


def _stopping(callbacks: Callbacks) -> Callbacks:
    """The same callbacks; one that asks to stop stops the whole comparison, as Ctrl-C does."""

    def stopping(function: Callable[[Record], None]) -> Callable[[Record], None]:
        def call(entry: Record) -> None:
            try:
                function(entry)
            except StopRun:
                raise KeyboardInterrupt from None

        return call

    other = callbacks.for_another_run
    return replace(
        callbacks,
        round=stopping(callbacks.round),
        evaluation=stopping(callbacks.evaluation),
        for_another_run=(lambda: _stopping(other())) if other else None,
    )


def _jobs(configs: Sequence[Config], wanted: int | None, callbacks: Callbacks) -> int:
    """As many as wanted, or as the machine can do if each of them uses one core."""
    local = [found for config in configs for found in plugins.only_in_this_process(config.model_dump(mode="json"))]
    if local:
        if (wanted or os.cpu_count() or 1) > 1:
            callbacks.warning(cant_import(local[0]))
        return 1
    if wanted is not None:
        return wanted
    if any((config.run.threads or 1) > 1 or experiment.device(config.run.device) != "cpu" for config in configs):
        return 1
    return side_by_side.that_fit()


def _missing(run: PlannedRun) -> NoReturn:
    raise FedetError(f"{run.folder / run.name} has no result: run the same comparison again")


def _digest(entries: Mapping[str, Config], seeds: list[int], equal_traffic: bool) -> str:
    parts = [f"{label} {config.digest()} {config.run.rounds}" for label, config in entries.items()]
    return hashlib.blake2b(f"{parts} {seeds} {equal_traffic}".encode(), digest_size=4).hexdigest()
