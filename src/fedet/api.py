"""The package's functions: run, resume, compare. A worker process is started before torch is imported here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
    tracker: Any = None,
    progress: bool | None = None,
    command: str | None = None,
    **changes: Any,
) -> Result:
    """Run a preset, a file or a mapping with changes such as `method="fedavg"`, `rounds=20`, `data__alpha=0.1`.

    Where a name is taken, an object can be given: `data=load` or `data=(inputs, labels)`, `models__clients=[Net]`,
    `models__server=make`, `method=MyMethod()`. `tracker` is `"tensorboard"`, `"mlflow"`, or a module or object with `init`,
    `log` and `finish`, or a list of these. `progress` shows a bar; by default where standard error is a terminal, and in
    notebooks.
    """
    prestart_worker(config, changes)
    with _ready(progress, callbacks, tracker) as callbacks:
        from fedet import config as configuration
        from fedet.engine import session

        loaded = configuration.load(config, overrides(changes))
        return session.run_config(loaded, Path(out), callbacks=callbacks, command=command)


def resume(
    run_dir: str | Path,
    *,
    callbacks: Callbacks | None = None,
    tracker: Any = None,
    progress: bool | None = None,
    rounds: int | None = None,
    workers: int | None = None,
    **objects: Any,
) -> Result:
    """Resume a run from its last checkpoint, optionally with more rounds or another number of workers.

    Objects that were passed to `fedet.run` and that no file names are passed again, under the same keys.
    """
    prestart_worker(run_dir, {} if workers is None else {"run.workers": workers})
    with _ready(progress, callbacks, tracker) as callbacks:
        from fedet.engine import session

        return session.resume(run_dir, callbacks=callbacks, rounds=rounds, workers=workers, passed=overrides(objects))


def compare(
    configs: Source | list[Source] | tuple[Source, ...] = None,
    *,
    callbacks: Callbacks | None = None,
    tracker: Any = None,
    progress: bool | None = None,
    **options: Any,
) -> Comparison:
    """Compare methods or configurations; see `fedet.engine.comparison.compare` for the options, `run` for the others."""
    with _ready(progress, callbacks, tracker) as callbacks:
        from fedet.engine import comparison

        return comparison.compare(configs, callbacks=callbacks, **options)


def prestart_worker(config: Source, changes: Mapping[str, Any]) -> None:
    """Start a worker process early if this configuration uses any."""
    fork_server.prestart(config, overrides(changes))


@contextlib.contextmanager
def _ready(shown: bool | None, callbacks: Callbacks | None, tracker: Any) -> Iterator[Callbacks]:
    """Import what is large, find objects by their references, show progress, and end a worker that was not needed."""
    with contextlib.ExitStack() as stack:
        stack.callback(fork_server.discard)
        with runtime.no_garbage_collection():
            from fedet.config import objects
            from fedet.engine import session  # noqa: F401 - all that is large is imported here, once
            from fedet.engine.callbacks import Callbacks, combined
            from fedet.errors import ConfigError
            from fedet.tracking import progress, trackers
        stack.enter_context(objects.scope())
        if not isinstance(callbacks, Callbacks | None):
            raise ConfigError(f"callbacks = {callbacks!r}: give fedet.Callbacks(round=...), with the functions to be called")
        given = [callbacks] if callbacks else []
        bar = [stack.enter_context(progress.bars(given[0].warning if given else None))] if progress.wanted(shown) else []
        yield combined([*bar, *trackers.callbacks(tracker), *given])  # given ones last: they may stop the run
