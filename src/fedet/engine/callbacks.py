"""Functions that a run calls to report its progress; one that raises `StopRun` ends the run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedet.errors import FedetWarning
from fedet.errors.tracebacks import in_library

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.engine.session import Result
    from fedet.storage.metrics import Record


def warn(text: str) -> None:
    """Issue a Python warning that points at the caller of the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and in_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FedetWarning, stacklevel=level)


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called as a run proceeds.

    `round` and `evaluation` may raise `fedet.StopRun`: the run ends after this round with its checkpoint, its models, its
    report and its result, whose `stopped` is "callback"; `fedet.resume` continues it. In a comparison all runs stop.
    """

    started: Callable[[Config, Path, int], None] = lambda config, path, done: None
    """Called with the configuration, the run's folder, and the number of rounds that are already finished."""
    round: Callable[[Record], None] = lambda record: None
    """Called with the round's record, as in metrics.jsonl."""
    stage: Callable[[str, int, int], None] = lambda stage, done, total: None
    """Called with the stage's name, how much of it is done, and how much there is to do; may come from another thread."""
    for_another_run: Callable[[], Callbacks] | None = None
    """Returns the callbacks for one of several concurrent runs; by default all runs share these."""
    warning: Callable[[str], None] = warn
    """Called with each warning about the run, once; by default it becomes a Python warning of the class `FedetWarning`."""
    evaluation: Callable[[Record], None] = lambda record: None
    """Called with the record of a round in which models were evaluated, after `round`."""
    ended: Callable[[Result | None], None] = lambda result: None
    """Called when the run has ended: with its result, or with None if an error or Ctrl-C ended it."""
    planned: Callable[[Sequence[Config]], None] = lambda configs: None
    """Called once by a comparison, before its runs, with their configurations."""

    def told(self, entry: Record) -> None:
        """Report a round, and its evaluation if there was one."""
        self.round(entry)
        if "accuracy" in entry:
            self.evaluation(entry)


def combined(parts: Sequence[Callbacks]) -> Callbacks:
    """Callbacks that call these in turn; a warning is given to the first that wants it."""

    def each(name: str) -> Callable[..., None]:
        functions = [getattr(part, name) for part in parts]

        def call(*arguments: object) -> None:
            for function in functions:
                function(*arguments)

        return call

    return Callbacks(
        each("started"),
        each("round"),
        each("stage"),
        lambda: combined([part.for_another_run() if part.for_another_run else part for part in parts]),
        next((part.warning for part in parts if part.warning is not warn), warn),
        each("evaluation"),
        each("ended"),
        each("planned"),
    )
