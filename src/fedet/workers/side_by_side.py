"""Several whole runs side by side, each in a process of its own.

For many small runs this beats a pool inside each of them: no core waits for a round's slowest client, and a process imports
everything once. As a module it is that process: it reads one run per line, tells what happens, and answers with the outcome.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fedet import errors
from fedet.errors import FedetError, Interrupted
from fedet.runtime import spawn_module
from fedet.workers.process import ChildProcess, ProcessDied

Task = dict[str, Any]
"""A run as plain data: its `config`, the `folder` around its own, its `name` there, the `command`, and `workers` of its own."""
OnMessage = Callable[[int, dict[str, Any]], None]
"""Is told what a task's process says, by the task's place in the list."""


def play(tasks: Sequence[Task], size: int, on_message: OnMessage) -> None:
    """Do these runs, `size` of them at once; the first that fails stops the others, with a checkpoint."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(tasks)):
        waiting.put(place)
    failed: list[BaseException] = []
    children = [ChildProcess(spawn_module("fedet.engine.child_run")) for _ in range(min(size, len(tasks)))]

    def serve(child: ChildProcess) -> None:
        while not failed:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _follow(child, tasks[place], lambda message, place=place: on_message(place, message))  # type: ignore[misc]
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


def _follow(child: ChildProcess, task: Task, on_message: Callable[[dict[str, Any]], None]) -> None:
    try:
        child.send(task)
        while "done" not in (message := child.receive()):
            if "error" in message:
                kind, text = message["error"]
                raise getattr(errors, kind, FedetError)(text)
            on_message(message)
    except ProcessDied:
        code = child.process.wait()
        raise FedetError(
            f"the process of run {task['name']} died (exit code {code}): is there enough memory? "
            "The same command again goes on with what is there; --jobs 1 needs least memory"
        ) from None
