"""The page of a study while its runs go on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedet.storage import files

EVERY = 10.0
"""Seconds between two versions of the page at least."""
SHARE = 0.1
"""The share of one core that drawing it may take from the runs."""


@contextlib.contextmanager
def page(folder: Path, write: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Write the page at once, and again some time after each call of the function that this gives.

    Meanwhile the folder names this process, so that others can see that the study is in progress. The last version is left to
    the caller, who also gets its errors.
    """
    due, over = threading.Event(), threading.Event()
    due.set()

    def keep_writing() -> None:
        while due.wait() and not over.is_set():
            due.clear()
            began = time.monotonic()
            with contextlib.suppress(Exception):
                write()
            over.wait(max(EVERY, (time.monotonic() - began) / SHARE))

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.cant_create(folder, error) from error
    files.write_text(folder / ".pid", f"{os.getpid()}\n")
    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    try:
        yield due.set
    finally:
        over.set()
        due.set()
        writer.join()
        (folder / ".pid").unlink(missing_ok=True)
