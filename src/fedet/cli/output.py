"""Writing to standard output and standard error, and what to do when that fails."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, NoReturn, TextIO

_CONTROL = re.compile(r"\x1b(?!\[[0-9;]*m)|[\0-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that tell a terminal something, or turn text around; only changes of colour are left alone."""
LONGEST = 4000
"""Characters of an error message; the name or value that it quotes may have any length."""
_shown: list[str] = []
"""The word on the terminal that is still to be removed."""


class OutputError(Exception):
    """Standard output can't be written to; kept apart from `OSError`, which any file, pipe or socket may raise."""

    def __init__(self, cause: OSError):
        super().__init__(cause.strerror or str(cause))
        self.reader_gone = isinstance(cause, BrokenPipeError)


def printable(text: str) -> str:
    """The text with control characters written as escapes: names in files and messages may come from strangers."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def write(text: str) -> None:
    """Print a line on standard output."""
    clear_notice()
    try:
        print(printable(text))
    except OSError as error:
        raise OutputError(error) from error


def write_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    write(json.dumps(value))


def flush() -> None:
    """Write what is still buffered."""
    try:
        if sys.stdout is not None:  # it is None where the shell closed it: >&-
            sys.stdout.flush()
    except OSError as error:
        raise OutputError(error) from error


def log(text: str) -> None:
    """Print a line on standard error; a run does not end because nobody reads its progress."""
    if sys.stderr is None:
        return
    clear_notice()
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def notice(text: str) -> None:
    """Show a word on a terminal while nothing else is there yet; `clear_notice` and errors remove it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
        _shown.append(text)


def clear_notice() -> None:
    """Remove the word that `notice` showed."""
    if _shown and sys.stderr is not None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        _shown.clear()


def fail(message: str, code: int) -> NoReturn:
    """End the program with one line on standard error."""
    line = " ".join(line.strip() for line in message.splitlines())
    log(f"fedet: {line if len(line) <= LONGEST else f'{line[:LONGEST]}...'}")
    sys.exit(code)


def give_up(error: OutputError) -> NoReturn:
    """End the program because of standard output: in silence if its reader has left (`| head`), else with the reason."""
    _discard(sys.stdout)
    if error.reader_gone:
        sys.exit(0)
    fail(f"can't write to standard output: {error}", 1)


def _discard(stream: TextIO) -> None:
    """Send what is buffered to nowhere, so that the interpreter's last flush does not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
