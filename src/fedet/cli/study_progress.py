"""Progress of a study, on standard error: one display for all runs, and the plan's table as it fills."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedet.cli import output
from fedet.cli.console import plain
from fedet.study.plan import PlannedRun
from fedet.study.runner import Notify, Progress
from fedet.study.tables import Table as Cells
from fedet.tracking.progress import STAGES


@contextlib.contextmanager
def shown(title: str, fill: Callable[[], Cells], progress: Progress, quiet: bool) -> Iterator[Notify]:
    """A function to be told of events: a live display on a terminal, one line per event elsewhere, nothing if quiet."""
    if quiet:
        yield lambda what, run: None
    elif sys.stderr is not None and sys.stderr.isatty():
        display = Display(title, fill, progress)
        with Live(console=Console(stderr=True), get_renderable=display.render, refresh_per_second=2, transient=True):
            yield display.notify
    else:
        output.log(_counts(progress))
        yield Lines(progress).notify


class Display:
    """What the terminal shows."""

    def __init__(self, title: str, fill: Callable[[], Cells], progress: Progress) -> None:
        self.title, self.fill, self.progress = title, fill, progress
        self._table = self._filled()

    def notify(self, what: str, run: PlannedRun) -> None:
        """Fill the table when a run has ended."""
        if what in ("finished", "failed"):
            self._table = self._filled()

    def render(self) -> Group:
        """The counts, the runs in progress, and the table."""
        running = Table(box=None, show_header=False, padding=(0, 2))
        for now in list(self.progress.running.values()):
            accuracy = "" if now.accuracy is None else f"accuracy {now.accuracy:.3f}"
            rounds = f"round {now.round}/{now.run.config.run.rounds}"
            running.add_row(plain(_short(now.run)), rounds, accuracy, Text(STAGES.get(now.stage, now.stage), style="dim"))
        return Group(self._table, Text(_counts(self.progress), style="bold"), running)

    def _filled(self) -> Table:
        found = self.fill()
        view = Table(title=plain(self.title), title_justify="left", header_style="bold")
        for number, heading in enumerate(found.head):
            view.add_column(plain(heading), justify="right" if number else "left")
        for row in found.body:
            view.add_row(*map(plain, row))
        return view


class Lines:
    """One line when a run starts and one when it ends."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def notify(self, what: str, run: PlannedRun) -> None:
        """Print the event."""
        if what == "round":
            return
        record, error = self.progress.finished.get(run.key), self.progress.errors.get(run.key)
        if what == "failed":
            output.log(f"failed    {_short(run)}: {error or (record.failed if record else '')}")
        elif what == "finished" and record is not None:
            found = record.result
            score = "" if found["best"] is None else f"best {found['best']:.4f}, late {found['late']:.4f}, "
            output.log(f"finished  {_short(run)}: {score}{found['rounds']} rounds in {found['seconds']['total']:.0f} s")
            output.log(_counts(self.progress))
        else:
            now = self.progress.running.get(run.key)
            output.log(f"{what:<9} {_short(run)}" + (f", from round {now.round + 1}" if now and now.round else ""))


def _counts(progress: Progress) -> str:
    done, failed = len(progress.finished), len(progress.errors)
    text = f"{done} of {len(progress.runs)} done, {len(progress.running)} running, {len(progress.left)} left"
    text += f", {failed} failed" if failed else ""
    seconds = progress.seconds_left() if done + failed < len(progress.runs) else None
    return text if seconds is None else f"{text}; {_duration(seconds)} left, until about {_clock(seconds)}"


def _short(run: PlannedRun) -> str:
    """A run's coordinates, as far as they tell it from others."""
    shown = [value for name, value in run.coordinates.items() if name not in ("grid", "data", "seed")]
    words = [f"{value:g}" if isinstance(value, float) else str(value) for value in shown]
    return " ".join([*words, f"s{run.config.run.seed}"])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _clock(seconds: float) -> str:
    form = "%H:%M" if seconds < 12 * 3600 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(time.time() + seconds))
