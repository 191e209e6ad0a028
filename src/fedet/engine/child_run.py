"""A process that does runs of a comparison: reads one per line, reports progress and the outcome as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedet.errors import FedetError, tracebacks


def main() -> None:
    """Do runs until the input ends."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        _do_runs()
    except KeyboardInterrupt:
        os._exit(130)  # at once: a second signal could interrupt an orderly exit


def _do_runs() -> None:
    tasks, messages = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the user's code must not mix with the messages

    from fedet.config import Config
    from fedet.engine import session
    from fedet.engine.callbacks import Callbacks

    def send(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=messages, flush=True)
        except BrokenPipeError:  # the parent is gone: stop as if by Ctrl-C, with a checkpoint
            raise KeyboardInterrupt from None

    for line in tasks:
        task = json.loads(line)
        if not task.get("plots", True):
            os.environ["FEDET_PLOTS"] = "off"
        config = Config.model_validate(task["config"])
        callbacks = Callbacks(
            started=lambda config, path, done: send({"started": [str(path), done]}),
            round=lambda entry: send({"round": entry}),
            stage=_throttled(send),
            warning=lambda text: send({"warning": text}),
        )
        try:
            session.run_or_resume(config, Path(task["folder"]), task["name"], callbacks, task["command"], task["workers"])
            send({"done": True})
        except FedetError as error:
            send({"error": tracebacks.to_message(error)})
        except Exception as error:  # reported by the parent process
            message = tracebacks.to_message(error)
            send({"error": message | {"text": f"{task['name']}: {message['text']}"}})


def _throttled(send: Callable[[dict[str, Any]], None]) -> Callable[[str, int, int], None]:
    """Send at most five stages a second: nobody can read more."""
    last = 0.0

    def stage(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2:
            last = now
            send({"stage": [name, done, total]})

    return stage


if __name__ == "__main__":
    main()
