"""Progress of runs and downloads, on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedet.cli import output
from fedet.config import Config
from fedet.engine.callbacks import Callbacks
from fedet.engine.run_warnings import why_lost
from fedet.models.text import notice
from fedet.reporting.results import si
from fedet.storage.metrics import Record
from fedet.tracking import progress


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Callbacks]:
    """Callbacks that show a run's progress: a bar on a terminal, one line per round elsewhere, nothing if quiet."""
    output.clear_notice()
    if quiet:
        yield Callbacks(warning=once(output.log))
    elif progress.on_terminal():
        with progress.bars(once(output.log)) as callbacks:
            yield callbacks
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


def _announce(config: Config, path: Path, done: int) -> None:
    output.log(progress.describe(config, path, done))
    if warning := notice(config.models.model_dump()):
        output.log(warning)


def _print_round(entry: Record, before: str = "") -> None:
    output.log(before + _line(entry))


def _line(entry: Record) -> str:
    scores = " ".join(f"{name} {value:.4f}" for name, value in entry.get("models", {}).items())
    trouble = (
        f" LOST ({why_lost([entry])})"
        if entry["lost"]
        else (f" ({len(entry['failures'])} failed)" if entry["failures"] else "")
    )
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
