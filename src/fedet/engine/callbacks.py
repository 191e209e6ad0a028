"""Functions that a run calls to report its progress."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedet.errors import FedetWarning
from fedet.tracebacks import in_library

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.storage.metrics import Record


def warn(text: str) -> None:
    """Issue a Python warning that points at the caller of the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and in_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FedetWarning, stacklevel=level)


@dataclass(frozen=True)
class Callbacks:
    """Functions that are called when a run starts, after each round, and at the stages of a round."""

    started: Callable[[Config, Path, int], None] = lambda config, path, done: None
    """Called with the configuration, the run's folder, and the number of rounds that are already finished."""
    round: Callable[[Record], None] = lambda record: None
    """Called with the round's record, as in metrics.jsonl."""
    stage: Callable[[str, int, int], None] = lambda stage, done, total: None
    """Called with the stage's name, how much of it is done, and how much there is to do."""
    for_another_run: Callable[[], Callbacks] | None = None
    """Returns the callbacks for one of several concurrent runs; by default all runs share these."""
    warning: Callable[[str], None] = warn
    """Called with each warning about the run, once; by default it becomes a Python warning of the class `FedetWarning`."""
