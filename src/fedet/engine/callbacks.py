"""Functions that a run calls to report its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.storage.metrics import Record


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
