"""The package's functions: run, resume, compare. A worker process is started before torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedet import runtime
from fedet.config.sources import Source, overrides
from fedet.workers import fork_server

if TYPE_CHECKING:
    from fedet.engine.callbacks import Callbacks
    from fedet.engine.comparison import Comparison
    from fedet.engine.session import Result


def run(
    config: Source = None,
    *,
    out: str | Path = "runs",
    callbacks: Callbacks | None = None,
    command: str | None = None,
    **changes: Any,
) -> Result:
    """Run a preset, a file or a mapping with changes such as `method="fedavg"`, `rounds=20`, `data__alpha=0.1`."""
    prestart_worker(config, changes)
    try:
        with runtime.no_garbage_collection():
            from fedet import config as configuration
            from fedet.engine import session
        return session.run_config(
            configuration.load(config, overrides(changes)), Path(out), callbacks=callbacks, command=command
        )
    finally:
        fork_server.discard()


def resume(
    run_dir: str | Path, *, callbacks: Callbacks | None = None, rounds: int | None = None, workers: int | None = None
) -> Result:
    """Resume a run from its last checkpoint, optionally with more rounds or another number of workers."""
    prestart_worker(run_dir, {} if workers is None else {"run.workers": workers})
    try:
        with runtime.no_garbage_collection():
            from fedet.engine import session
        return session.resume(run_dir, callbacks=callbacks, rounds=rounds, workers=workers)
    finally:
        fork_server.discard()


def compare(configs: Source | list[Source] | tuple[Source, ...] = None, **options: Any) -> Comparison:
    """Compare methods or configurations; see `fedet.engine.comparison.compare`."""
    from fedet.engine import comparison

    return comparison.compare(configs, **options)


def prestart_worker(config: Source, changes: Mapping[str, Any]) -> None:
    """Start a worker process early if this configuration uses any."""
    fork_server.prestart(config, overrides(changes))
