"""Run several experiments at once, each in a process of its own.

For many small runs this beats a pool of workers inside each of them: no core waits for a round's slowest client, and a process
imports everything once. What such a process does is in `fedet.engine.child_run`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from fedet.errors import FedetError, Interrupted, tracebacks
from fedet.runtime import spawn_module
from fedet.workers.process import ChildProcess, ProcessDied

RUNNER = "fedet.engine.child_run"
RunTask = dict[str, Any]
"""A run as plain data: `config`, the `folder` in which its own is made, its `name` there, `command`, its `workers`, and
`plots`, false if its report needs no figures."""
OnMessage = Callable[[int, dict[str, Any]], None]
"""Called with a task's index and each message about its progress; the last one of a run that succeeds has the key `done`."""
OnEnd = Callable[[int, FedetError | None], None]
"""Called when a task has ended, with its index and the error with which it failed, if any."""


def that_fit() -> int:
    """How many runs this machine can do at once: one per core, if there are about 2 GB of memory for each."""
    return min(os.cpu_count() or 1, max(1, int(psutil.virtual_memory().available) // 2**31))


def run_all(tasks: Sequence[RunTask], at_once: int, on_message: OnMessage, on_end: OnEnd | None = None) -> None:
    """Do these runs, `at_once` at a time, in this order.

    When one fails, the others stop with a checkpoint; with `on_end`, which is then told about it, they go on.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        pending.put(index)
    failed: list[BaseException] = []
    children = [ChildProcess(spawn_module(RUNNER)) for _ in range(min(at_once, len(tasks)))]

    def attempt(place: int, index: int) -> None:
        error = None
        try:
            _run(children[place], tasks[index], lambda message: on_message(index, message))
        except FedetError as reason:
            if on_end is None or failed or isinstance(reason, Interrupted):
                raise
            error = reason
            if children[place].process.poll() is not None:
                children[place] = ChildProcess(spawn_module(RUNNER))
        if on_end is not None:
            on_end(index, error)

    def serve(place: int) -> None:
        while not failed:
            try:
                index = pending.get_nowait()
            except queue.Empty:
                return
            try:
                attempt(place, index)
            except BaseException as error:
                failed.append(error)
                for other in children:
                    other.interrupt()

    threads = [threading.Thread(target=serve, args=(place,), daemon=True) for place in range(len(children))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        failed.append(Interrupted("stopped"))
        for child in children:
            child.interrupt()
        for thread in threads:  # until the checkpoints are written; a second Ctrl-C does not wait
            thread.join()
        raise
    finally:
        for child in children:
            child.stop()
    if failed:
        raise failed[0]


def _run(child: ChildProcess, task: RunTask, on_message: Callable[[dict[str, Any]], None]) -> None:
    """Have one run done, passing on its messages; raises the error with which it ended."""
    try:
        child.send(task)
        message: dict[str, Any] = {}
        while "done" not in message:
            message = child.receive()
            if "error" in message:
                raise tracebacks.from_message(message["error"])
            on_message(message)
    except ProcessDied:
        raise FedetError(
            f"the process of run {task['name']} died (exit code {child.exit_code()}), perhaps for lack of memory: "
            "repeat the command to go on with what was saved; --jobs 1 needs the least memory"
        ) from None
