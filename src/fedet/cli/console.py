"""What a person sees in the terminal: progress, tables, results."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedet import experiment
from fedet.config import Config
from fedet.data import text as texts
from fedet.engine import session
from fedet.engine.callbacks import Callbacks
from fedet.engine.comparison import Comparison
from fedet.errors import ConfigError, DataError
from fedet.models.text import notice
from fedet.reporting import results
from fedet.reporting.results import si
from fedet.storage.files import replacing
from fedet.storage.metrics import Record
from fedet.storage.run_folder import RunFolder, cache_folder

STAGES = {"clients": "clients train", "teachers": "teachers predict", "distil": "server distils", "evaluate": "evaluating"}


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callbacks]:
    """Who watches a run: a bar on a terminal, one line a round elsewhere, nobody if quiet."""
    if quiet:
        yield Callbacks()
    elif sys.stderr.isatty():
        with _bar() as bars:
            yield Bars(bars).callbacks()
    else:
        yield Callbacks(_announce, _print_round, for_another_run=lambda: Lines().callbacks())


@dataclass
class Bars:
    """A progress bar per run, with what is going on inside the round."""

    bars: Progress
    task: Any = None

    def callbacks(self) -> Callbacks:
        """One for this run, and others for runs beside it."""
        return Callbacks(self.started, self.round, self.stage, for_another_run=lambda: Bars(self.bars).callbacks())

    def started(self, config: Config, path: Path, done: int) -> None:
        """A run begins or goes on."""
        label = _label(config)
        if warning := notice(config.models.model_dump()):
            self.bars.console.print(f"[bold]{warning}")
        self.task = self.bars.add_task(label, total=config.run.rounds, completed=done, stage="", accuracy="")

    def round(self, entry: Record) -> None:
        """A round is over."""
        self.bars.update(self.task, completed=entry["round"], stage="")
        if "accuracy" in entry:
            self.bars.update(self.task, accuracy=f"accuracy {entry['accuracy']:.3f}")

    def stage(self, stage: str, done: int, total: int) -> None:
        """Something inside the round moved on."""
        if self.task is not None:
            self.bars.update(self.task, stage=f"{STAGES.get(stage, stage)} {done}/{total}")


@dataclass
class Lines:
    """One line a round, under the run's name because others come in between."""

    label: str = ""

    def callbacks(self) -> Callbacks:
        """For this run."""
        return Callbacks(self.started, lambda entry: _print_round(entry, f"{self.label}  "))

    def started(self, config: Config, path: Path, done: int) -> None:
        """A run begins or goes on."""
        self.label = _label(config)
        _announce(config, path, done)


def _label(config: Config) -> str:
    return f"{config.method['name'].rpartition(':')[2]} s{config.run.seed}"


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[stage]}"),
        console=Console(stderr=True),
        refresh_per_second=5,
    )


def _announce(config: Config, path: Path, done: int) -> None:
    start = f", from round {done + 1}" if done else ""
    what = f"{config.method['name']} on {config.data.name}, seed {config.run.seed}"
    where = experiment.device(config.run.device)
    if config.run.device == "auto":
        what += ", no GPU found" if where == "cpu" else f", on {where}"
    print(f"{what}, in {path}{start}", file=sys.stderr, flush=True)
    if warning := notice(config.models.model_dump()):
        print(warning, file=sys.stderr, flush=True)


def _print_round(entry: Record, before: str = "") -> None:
    print(before + _line(entry), file=sys.stderr, flush=True)


def _line(entry: Record) -> str:
    scores = " ".join(f"{name} {value:.4f}" for name, value in entry.get("models", {}).items())
    trouble = " LOST" if entry["lost"] else (f" ({len(entry['failures'])} failed)" if entry["failures"] else "")
    seconds = entry["seconds"]["round"]
    return f"round {entry['round']}{trouble}  {scores}  sent {si(entry['params_total'])}  {seconds:.1f} s"


@contextlib.contextmanager
def download(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a download, on a terminal."""
    if not sys.stderr.isatty():
        print(f"fetching {name}", file=sys.stderr)
        yield lambda done, total: None
        return
    with Progress(TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of plain values as a table on standard output."""
    view = Table(title=title, title_justify="left", header_style="bold")
    for key in rows[0] if rows else ():
        right = all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
        view.add_column(key, justify="right" if right else "left", overflow="fold")
    for row in rows:
        view.add_row(*(_cell(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(view)  # a file or a pipe has no width to wrap at


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def result(outcome: session.Result) -> None:
    """A finished run: its models, its traffic, where things are."""
    table("Test accuracy", model_table(outcome))
    summary = outcome.summary
    sent = summary["params_up"] + summary["params_down"]
    took = f"{summary['rounds']} rounds in {summary['seconds']:.0f} s"
    print(f"{took}; {si(sent)} parameters sent; stopped by {summary['stopped']}")
    if warning := notice(RunFolder(outcome.run_dir).config().models.model_dump()):
        print(warning)
    print(f"best server model  {outcome.run_dir / 'best'}")
    print(f"report             {outcome.report}")


def model_table(outcome: session.Result) -> list[dict[str, Any]]:
    """Final and best accuracy of every model of a run, with its size."""
    summary = outcome.summary
    evaluated = [entry["models"] for entry in outcome.metrics if "models" in entry]
    rows = []
    for name in dict.fromkeys(name for models in evaluated for name in models):
        values = [models[name] for models in evaluated if name in models]
        arch = summary["server"] if name == "server" else name
        rows.append(
            {
                "model": f"server ({arch})" if name == "server" else name,
                "parameters": summary["arch_params"].get(arch),
                "final": f"{values[-1]:.4f}",
                "best": f"{max(values):.4f}",
            }
        )
    return rows


def comparison(outcome: Comparison) -> None:
    """For the first seed every model of the first run beside the others' outputs; then the table over all seeds."""
    first, *others = outcome.results
    seed = first.summary["seed"]
    rows = [_sent(first, row) for row in model_table(first)]
    rows += [_sent(other, row) for other in others if other.summary["seed"] == seed for row in model_table(other)[:1]]
    table(f"Test accuracy, seed {seed}", rows)
    head, body = results.table(outcome.rows)
    table("Comparison", [dict(zip(head, cells, strict=True)) for cells in body])
    print(f"report  {outcome.report}")


def _sent(outcome: session.Result, row: dict[str, Any]) -> dict[str, Any]:
    total = outcome.traffic["params_up"] + outcome.traffic["params_down"]
    return {"method": outcome.summary["method"], **row, "parameters sent": si(total)}


def checks(outcomes: Sequence[Any]) -> None:
    """What the conformance checks found."""
    table("Checks", [{"check": o.name, "ok": o.ok, "detail": o.detail} for o in outcomes])


def verification(outcomes: Sequence[tuple[str, bool, str]]) -> None:
    """What the verification of a data set found."""
    table("Verification", [{"check": name, "ok": ok, "detail": detail} for name, ok, detail in outcomes])


def method_rows() -> list[dict[str, Any]]:
    """The paper's Table 1, from the methods themselves."""
    from fedet.methods import METHODS

    rows = []
    for cls in METHODS:
        t = cls.traits
        needs = "N/A" if t.public_data == "none" else t.public_data
        access = "N/A" if t.public_data == "none" else ("required" if t.clients_read_public else "not required")
        rows.append(
            {
                "method": cls.name,
                "client model heterogeneity": t.heterogeneous,
                "public data": needs,
                "client access to public data": access,
                "server model size": "> client model" if t.larger_server else "= client model",
                "tasks": t.tasks,
            }
        )
    return rows


def model_rows(classes: int, shape: Sequence[int]) -> list[dict[str, Any]]:
    """The model families."""
    from fedet import models

    return models.describe(classes, tuple(shape))


def data_folder(given: Path | None) -> Path:
    """Where data sets are: as told, or by FEDET_DATA."""
    place = given or os.environ.get("FEDET_DATA")
    if not place:
        raise DataError("say where the data is or goes: --data-dir DIR, or set FEDET_DATA")
    return Path(place)


def data_rows(given: Path | None) -> list[dict[str, Any]]:
    """The data sets, and whether they are here."""
    place = given or (Path(os.environ["FEDET_DATA"]) if os.environ.get("FEDET_DATA") else None)
    rows = [{"name": "digits", "what": "1,797 images of 8x8, 10 classes (scikit-learn)", "here": "embedded"}]
    for name, what in (("cifar10", "60,000 images of 32x32, 10 classes"), ("cifar100", "60,000 images of 32x32, 100 classes")):
        found = place is not None and (place / name / "train.parquet").is_file()
        rows.append({"name": name, "what": what, "here": str(place) if found else f"no: fedet data fetch {name} --dir DIR"})
    for name, files in texts.FILES.items():
        found = place is not None and any((place / "text" / file).exists() for file in files)
        rows.append(
            {"name": name, "what": "texts with users, 2 classes", "here": str(place) if found else "no: see docs/guide/text.md"}
        )
    return [*rows, {"name": "module:function", "what": "your own", "here": "see docs/guide/data.md"}]


def doctor_rows(out: Path, data_dir: Path | None) -> list[dict[str, Any]]:
    """Versions, hardware, data, disk."""
    from fedet.storage.run_folder import environment

    facts = {k: v for k, v in environment("").items() if k not in ("command", "started", "pid")}
    facts["gpu"] = "yes" if experiment.device("auto") == "cuda" else "none: runs use the processor"
    free = shutil.disk_usage(next(p for p in [out.resolve(), *out.resolve().parents] if p.exists())).free
    facts["free disk"] = f"{free / 2**30:.1f} GB at {out}"
    for row in data_rows(data_dir):
        facts[f"data {row['name']}"] = row["here"]
    return [{"what": key, "value": str(value)} for key, value in facts.items()]


def distribution(config: Config, out: Path, figure: Path | None) -> Path:
    """Draw who holds what and return the picture's path."""
    from fedet.reporting import plots

    path = figure or out / f"{config.data.name.rpartition(':')[2]}-{config.data.partition}-s{config.run.seed}.png"
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    ready = experiment.build(config, cache_folder(out))
    counts = ready.data.label_counts()
    picture = plots.distribution(counts, [c.arch for c in ready.clients])
    with replacing(path) as draft:
        picture.savefig(draft, format=path.suffix[1:])
    sizes = ready.data.sizes
    held = (counts > 0).sum(axis=1)
    print(
        f"{len(sizes)} clients, {sizes.sum()} examples; per client: median {int(sorted(sizes)[len(sizes) // 2])}, "
        f"largest {sizes.max()}, {int((sizes == 0).sum())} empty; {held.mean():.1f} classes on average",
        file=sys.stderr,
    )
    return path
