"""Progress of runs, live on a terminal or in a notebook: one line per run, and one for a whole comparison."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedet import experiment
from fedet.config import Config, objects
from fedet.engine import session
from fedet.engine.callbacks import Callbacks, warn
from fedet.methods import REFERENCES
from fedet.models.text import notice
from fedet.storage.metrics import Record

STAGES = {
    "clients": "clients training",
    "teachers": "teachers predicting",
    "distil": "server distilling",
    "train": "server training",
    "evaluate": "evaluating",
}
RECENT = 3
"""How many evaluations are compared with as many before them to see a trend."""
CLEAR = 0.005
"""The smallest change in accuracy that counts as a trend."""
BARS = ((100, 12), (140, 16))
"""Terminals with fewer columns than the first number get bars of the second."""


def wanted(asked: bool | None) -> bool:
    """Whether progress is shown: if asked for, or by default on a terminal and in a notebook."""
    return (on_terminal() or in_notebook()) if asked is None else asked


def on_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


@contextlib.contextmanager
def bars(warning: Callable[[str], None] | None = None) -> Iterator[Callbacks]:
    """Callbacks that show progress for as long as the block lasts, in the notebook or on standard error."""
    board = Board()
    with _notebook(board) if in_notebook() else _terminal(board, Console(stderr=True)):
        yield Line(board, warning or warn).callbacks()


def describe(config: Config, path: Path, done: int) -> str:
    """What runs, where, and on what."""
    workers = session.num_workers(config)
    count = "one process" if not workers else f"{workers} worker{'s' if workers > 1 else ''}"
    start = f", from round {done + 1}" if done else ""
    what = f"{config.method['name'].rpartition(':')[2]} on {objects.shown(config.data.name)}, seed {config.run.seed}"
    return f"{what}, {_device(config)}, {count}, in {path}{start}"


def _device(config: Config) -> str:
    where = experiment.device(config.run.device)
    return "cpu (no GPU found)" if config.run.device == "auto" and where == "cpu" else where


@dataclass
class Board:
    """What is shown: a heading, the lines of runs, and if there are several runs a line for all of them."""

    heading: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    rounds: int = 0
    """Rounds of all planned runs; 0 if there is only one run."""
    runs: int = 0
    finished: int = 0
    rounds_finished: int = 0
    best: tuple[float, str] = (-1.0, "")
    change: Callable[[], None] = lambda: None
    """Called when there is something new."""
    _start: float = field(default_factory=time.monotonic)

    def plan(self, configs: Sequence[Config]) -> None:
        """Expect these runs."""
        self.runs, self.rounds = len(configs), sum(config.run.rounds for config in configs)

    def rows(self) -> list[tuple[str, int, int, list[str]]]:
        """Label, rounds done, rounds to do, and words in the order of their importance, of each line."""
        lines = list(self.lines)
        rows = [(line.label, line.done, line.total, line.words()) for line in lines if self.runs < 2 or not line.over]
        if self.runs < 2:
            return rows
        done = self.rounds_finished + sum(line.done for line in lines if not line.over)
        words = [f"{self.finished}/{self.runs} runs"]
        if 0 < done < self.rounds:
            words.append(f"{duration((time.monotonic() - self._start) / done * (self.rounds - done))} left")
        if self.best[1]:
            words.append(f"best {self.best[0]:.1%} {self.best[1]}")
        return [*rows, ("all runs", done, self.rounds, words)]


@dataclass(eq=False)
class Line:
    """A run's line: its round, its accuracy and trend, the best so far, the time left, the consensus, the stage."""

    board: Board
    warning: Callable[[str], None]
    label: str = ""
    done: int = 0
    total: int = 0
    over: bool = False
    reference: bool = False
    stage: str = ""
    models: Record = field(default_factory=dict)
    accuracies: list[float] = field(default_factory=list)
    _start: float = 0.0
    _first: int = 0

    def callbacks(self) -> Callbacks:
        """Callbacks for this run; another run gets a line of its own."""
        return Callbacks(
            started=self.start,
            round=self.advance,
            stage=self.show_stage,
            for_another_run=lambda: Line(self.board, self.warning).callbacks(),
            warning=self.warning,
            ended=lambda result: self.end(),
            planned=self.board.plan,
        )

    def start(self, config: Config, path: Path, done: int) -> None:
        """Add the line when the run starts or resumes; the runs of a sequence use one after the other."""
        self.label = f"{config.method['name'].rpartition(':')[2]} s{config.run.seed}"
        self.done, self.total, self.over, self.stage, self.models, self.accuracies = done, config.run.rounds, False, "", {}, []
        self.reference = config.method["name"] in {cls.name for cls in REFERENCES}
        self._start, self._first = time.monotonic(), done
        if self not in self.board.lines:
            self.board.lines.append(self)
        if self.board.runs < 2:
            self.board.heading.append(describe(config, path, done))
        elif not self.board.heading:
            what = f"{self.board.runs} runs on {objects.shown(config.data.name)}"
            self.board.heading.append(f"{what}, {_device(config)}, in {path.parent}")
        if (told := notice(config.models.model_dump())) and told not in self.board.heading:
            self.board.heading.append(told)
        self.board.change()

    def advance(self, entry: Record) -> None:
        """Show a finished round."""
        self.done, self.stage = entry["round"], ""
        if "accuracy" in entry:
            self.accuracies.append(entry["accuracy"])
            self.models = self.models | entry.get("models", {})
            if not self.reference:
                self.board.best = max(self.board.best, (entry["accuracy"], self.label))
        self.board.change()

    def show_stage(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage of the round is."""
        self.stage = f"{STAGES.get(stage, stage)} {done}/{total}"
        self.board.change()

    def end(self) -> None:
        """Count the run as finished."""
        self.over, self.stage = True, ""
        self.board.finished += 1
        self.board.rounds_finished += self.total
        self.board.change()

    def words(self) -> list[str]:
        """What is said beside the bar, the most important first."""
        found = []
        if self.accuracies:
            found += [
                f"accuracy {self.accuracies[-1]:.1%} {trend(self.accuracies)}".rstrip(),
                f"best {max(self.accuracies):.1%}",
            ]
        seconds, rounds = time.monotonic() - self._start, self.done - self._first
        if self.over:
            found.append(f"in {duration(seconds)}")
        elif rounds:
            found.append(f"{duration(seconds / rounds * (self.total - self.done))} left")
        if "consensus" in self.models:
            found.append(f"consensus {self.models['consensus']:.1%}")
        return [*found, self.stage] if self.stage else found


def trend(values: Sequence[float]) -> str:
    """An arrow: the mean of the last evaluations against that of those before; empty while there are too few."""
    if len(values) < 2 * RECENT:
        return ""
    late, before = sum(values[-RECENT:]) / RECENT, sum(values[-2 * RECENT : -RECENT]) / RECENT
    return "↗" if late > before + CLEAR else "↘" if late < before - CLEAR else "→"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"


@contextlib.contextmanager
def _terminal(board: Board, console: Console) -> Iterator[None]:
    shown, over = 0, False

    def render() -> Group:
        rows = board.rows()
        room = max((len(label) for label, *_ in rows), default=0)  # so that all bars begin at the same place
        lines = [row(console.width, *line, room=max(room, 12)) for line in rows]
        waiting = [] if over else [Text("preparing data and models ...", style="dim")]
        return Group(*(lines or waiting))

    def announce() -> None:
        nonlocal shown
        for text in board.heading[shown:]:
            short = text if len(text) <= console.width else text.replace(", in ", "\nin ", 1)  # a path is not torn apart
            console.print(short, markup=False, highlight=False, soft_wrap=True)
        shown = len(board.heading)

    board.change = announce
    with Live(console=console, get_renderable=render, refresh_per_second=2):
        yield
        over = True  # a comparison whose runs were all finished leaves nothing behind


def row(width: int, label: str, done: int, total: int, words: Sequence[str], room: int = 12) -> Table:
    """A line of the terminal: as many of the words as fit beside the bar; the label has at least this much room."""
    bar, count = next((size for limit, size in BARS if width < limit), 24), f"{done}/{total}"
    left = width - max(len(label), room) - bar - len(count) - 6
    text = ""
    for word in words:
        if len(text) + len(word) + 2 <= left:
            text += f"{word}  "
    grid = Table.grid(padding=(0, 1))
    for size in (max(len(label), room), bar, None, None):
        grid.add_column(width=size, no_wrap=True)
    grid.add_row(label, ProgressBar(total=max(total, 1), completed=done, width=bar), count, Text(text.rstrip()))
    return grid


@contextlib.contextmanager
def _notebook(board: Board) -> Iterator[None]:
    display: Any = sys.modules["IPython"].display
    handle = display.display(display.HTML(""), display_id=True)
    last = 0.0

    def show(now: bool = False) -> None:
        nonlocal last
        if now or time.monotonic() - last > 0.3:
            last = time.monotonic()
            handle.update(display.HTML(as_html(board)))

    board.change = show
    try:
        yield
    finally:
        show(now=True)


def as_html(board: Board) -> str:
    """The board for a notebook."""
    heading = "".join(f"<div>{html.escape(text)}</div>" for text in board.heading)
    lines = "".join(
        f"<tr><td>{html.escape(label)}</td><td><progress value='{done}' max='{max(total, 1)}'></progress></td>"
        f"<td>{done}/{total}</td><td>{html.escape(', '.join(words))}</td></tr>"
        for label, done, total, words in board.rows()
    )
    return f"{heading}<table>{lines}</table>"
