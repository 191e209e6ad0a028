"""What a program is told while a run goes on."""

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
    """Functions that are called as a run starts, after each round, and at the stages inside one."""

    started: Callable[[Config, Path, int], None] = lambda config, path, done: None
    """With the configuration, the run's folder, and how many rounds are done already."""
    round: Callable[[Record], None] = lambda record: None
    """With the round's record, as in metrics.jsonl."""
    stage: Callable[[str, int, int], None] = lambda stage, done, total: None
    """With the stage's name, and how much of it is done, out of how much."""
    for_another_run: Callable[[], Callbacks] | None = None
    """Makes the callbacks of one of several concurrent runs; if left out, all runs share these."""
