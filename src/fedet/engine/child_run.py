"""A process of a comparison: reads one run per line, reports progress, and answers with the outcome."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedet.errors import FedetError


def main() -> None:
    """Serve until input ends."""
    orders, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's code prints must not mix with the answers

    from fedet.config import Config
    from fedet.engine import session
    from fedet.engine.callbacks import Callbacks

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)

    def tell(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=answers, flush=True)
        except BrokenPipeError:  # the parent is gone: stop as if by Ctrl-C, with a checkpoint
            raise KeyboardInterrupt from None

    try:
        for line in orders:
            task = json.loads(line)
            config = Config.model_validate(task["config"])
            callbacks = Callbacks(
                started=lambda config, path, done: tell({"started": [str(path), done]}),
                round=lambda entry: tell({"round": entry}),
                stage=_sparingly(tell),
            )
            try:
                session.run_or_resume(config, Path(task["folder"]), task["name"], callbacks, task["command"], task["workers"])
                tell({"done": True})
            except FedetError as error:
                tell({"error": [type(error).__name__, str(error)]})
            except Exception as error:  # reported in the parent, where someone can see it
                tell({"error": ["FedetError", f"{task['name']}: {type(error).__name__}: {error}"]})
    except KeyboardInterrupt:
        os._exit(130)  # a second signal could come in the middle of an orderly end, and nothing is left to do


def _sparingly(tell: Callable[[dict[str, Any]], None]) -> Callable[[str, int, int], None]:
    """Stages pass in milliseconds; a person can read a few a second."""
    last = 0.0

    def stage(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2:
            last = now
            tell({"stage": [name, done, total]})

    return stage


if __name__ == "__main__":
    main()
