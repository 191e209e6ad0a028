"""Progress of runs and downloads, on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
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

from fedet import experiment
from fedet.cli import output
from fedet.config import Config
from fedet.engine.callbacks import Callbacks
from fedet.models.text import notice
from fedet.reporting.results import si
from fedet.storage.metrics import Record

STAGES = {
    "clients": "clients training",
    "teachers": "teachers predicting",
    "distil": "server distilling",
    "train": "server training",
    "evaluate": "evaluating",
}


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Callbacks]:
    """Callbacks that show a run's progress: a bar on a terminal, one line per round elsewhere, nothing if quiet."""
    if quiet:
        yield Callbacks(warning=once(output.log))
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bars() as bars:
            yield Bar(bars, once(lambda text: bars.console.print(text, markup=False))).callbacks()
    else:
        warning = once(output.log)
        yield Callbacks(_announce, _print_round, warning=warning, for_another_run=lambda: LabelledLines(warning).callbacks())


def once(show: Callable[[str], None]) -> Callable[[str], None]:
    """A function that shows each warning once, however many runs it concerns."""
    seen: set[str] = set()

    def warn(text: str) -> None:
        if text not in seen:
            seen.add(text)
            show(f"warning: {text}")

    return warn


@dataclass
class Bar:
    """A run's progress bar, with the stage of the current round."""

    bars: Progress
    warning: Callable[[str], None]
    task: Any = None

    def callbacks(self) -> Callbacks:
        """Callbacks for this run; a concurrent run gets a bar of its own."""
        return Callbacks(self.started, self.round, self.stage, lambda: Bar(self.bars, self.warning).callbacks(), self.warning)

    def started(self, config: Config, path: Path, done: int) -> None:
        """Add the bar when the run starts or resumes."""
        label = _label(config)
        if warning := notice(config.models.model_dump()):
            self.bars.console.print(f"[bold]{warning}")
        self.task = self.bars.add_task(label, total=config.run.rounds, completed=done, stage="", accuracy="")

    def round(self, entry: Record) -> None:
        """Advance by one round."""
        self.bars.update(self.task, completed=entry["round"], stage="")
        if "accuracy" in entry:
            self.bars.update(self.task, accuracy=f"accuracy {entry['accuracy']:.3f}")

    def stage(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage of the round is."""
        if self.task is not None:
            self.bars.update(self.task, stage=f"{STAGES.get(stage, stage)} {done}/{total}")


@dataclass
class LabelledLines:
    """One line per round, with the run's label because the lines of concurrent runs alternate."""

    warning: Callable[[str], None]
    label: str = ""

    def callbacks(self) -> Callbacks:
        """Callbacks for this run."""
        return Callbacks(self.started, lambda entry: _print_round(entry, f"{self.label}  "), warning=self.warning)

    def started(self, config: Config, path: Path, done: int) -> None:
        """Announce the run when it starts or resumes."""
        self.label = _label(config)
        _announce(config, path, done)


def _label(config: Config) -> str:
    return f"{config.method['name'].rpartition(':')[2]} s{config.run.seed}"


def _bars() -> Progress:
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
    output.log(f"{what}, in {path}{start}")
    if warning := notice(config.models.model_dump()):
        output.log(warning)


def _print_round(entry: Record, before: str = "") -> None:
    output.log(before + _line(entry))


def _line(entry: Record) -> str:
    scores = " ".join(f"{name} {value:.4f}" for name, value in entry.get("models", {}).items())
    trouble = " LOST" if entry["lost"] else (f" ({len(entry['failures'])} failed)" if entry["failures"] else "")
    seconds = entry["seconds"]["round"]
    return f"round {entry['round']}{trouble}  {scores}  sent {si(entry['params_total'])}  {seconds:.1f} s"


@contextlib.contextmanager
def download(name: str) -> Iterator[Callable[[int, int], None]]:
    """A callback that shows a download's progress: a bar on a terminal, one line elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        output.log(f"downloading {name}")
        yield lambda done, total: None
        return
    with Progress(TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total or None)
