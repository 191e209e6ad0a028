"""Several whole runs side by side, each in a process of its own.

For many small runs this beats a pool inside each of them: no core waits for a round's slowest client, and a process imports
everything once. As a module it is that process: it reads one run per line, tells what happens, and answers with the outcome.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedet import errors
from fedet.child import Child, Died, spawn
from fedet.errors import FedetError, Interrupted

Task = dict[str, Any]
"""A run as plain data: its `config`, the `folder` around its own, its `name` there, the `command`, and `workers` of its own."""
Hear = Callable[[int, dict[str, Any]], None]
"""Is told what a task's process says, by the task's place in the list."""


def play(tasks: Sequence[Task], size: int, hear: Hear) -> None:
    """Do these runs, `size` of them at once; the first that fails stops the others, with a checkpoint."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(tasks)):
        waiting.put(place)
    failed: list[BaseException] = []
    children = [Child(spawn("fedet.side")) for _ in range(min(size, len(tasks)))]

    def serve(child: Child) -> None:
        while not failed:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _follow(child, tasks[place], lambda message, place=place: hear(place, message))  # type: ignore[misc]
            except BaseException as error:
                failed.append(error)
                for other in children:
                    other.interrupt()

    threads = [threading.Thread(target=serve, args=(child,), daemon=True) for child in children]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        failed.append(Interrupted("stopped"))
        for child in children:
            child.interrupt()
        for thread in threads:
            thread.join()
        raise
    finally:
        for child in children:
            child.stop()
    if failed:
        raise failed[0]


def _follow(child: Child, task: Task, hear: Callable[[dict[str, Any]], None]) -> None:
    try:
        child.say(task)
        while "done" not in (message := child.hear()):
            if "error" in message:
                kind, text = message["error"]
                raise getattr(errors, kind, FedetError)(text)
            hear(message)
    except Died:
        code = child.process.wait()
        raise FedetError(
            f"the process of run {task['name']} died (exit code {code}): is there enough memory? "
            "The same command again goes on with what is there; --jobs 1 needs least memory"
        ) from None


def main() -> None:
    """Serve until input ends."""
    orders, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's code prints must not mix with the answers

    from fedet import api
    from fedet.config import Config

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
            watch = api.Watch(
                started=lambda config, path, done: tell({"started": [str(path), done]}),
                round=lambda entry: tell({"round": entry}),
                stage=_sparingly(tell),
            )
            try:
                api.once(config, Path(task["folder"]), task["name"], watch, task["command"], task["workers"])
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
