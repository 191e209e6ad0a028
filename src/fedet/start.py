"""`fedet.run` and `fedet.resume`: a worker's imports begin before our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedet import imports, nursery
from fedet.layers import Source, overrides

if TYPE_CHECKING:
    from fedet.api import Result
    from fedet.config import Config
    from fedet.record import Record


@dataclass(frozen=True)
class Watch:
    """Who is told of progress: each finished round, and the stages inside one."""

    started: Callable[[Config, Path, int], None] = lambda config, path, done: None
    round: Callable[[Record], None] = lambda record: None
    stage: Callable[[str, int, int], None] = lambda stage, done, total: None
    another: Callable[[], Watch] | None = None
    """Makes a watch for one of several runs that go on at once; left out, all are told to this one."""


def run(
    config: Source = None, *, out: str | Path = "runs", watch: Watch | None = None, command: str | None = None, **changes: Any
) -> Result:
    """Run a preset, a file or a mapping with changes such as `method="fedavg"`, `rounds=20`, `data__alpha=0.1`."""
    expect(config, changes)
    try:
        with imports.quick():
            from fedet import api
            from fedet import config as configuration
        return api.run_config(configuration.load(config, overrides(changes)), Path(out), watch=watch, command=command)
    finally:
        nursery.forget()


def resume(run_dir: str | Path, *, watch: Watch | None = None, rounds: int | None = None, workers: int | None = None) -> Result:
    """Go on with a run from its last checkpoint, if asked to another number of rounds or with other workers."""
    expect(run_dir, {} if workers is None else {"run.workers": workers})
    try:
        with imports.quick():
            from fedet import api
        return api.resume(run_dir, watch=watch, rounds=rounds, workers=workers)
    finally:
        nursery.forget()


def expect(config: Source, changes: Mapping[str, Any]) -> None:
    """Start a worker now if these settings will want some."""
    nursery.expect(config, overrides(changes))
