"""Where an error was raised in the user's own code, and errors that cross from one process to another."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedet.errors import ConfigError, DataError, Diverged, FedetError, Interrupted

LAST = 4
"""How many frames of the user's code are shown."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_TYPES: dict[str, type[FedetError]] = {kind.__name__: kind for kind in (ConfigError, DataError, Diverged, Interrupted)}


def debugging() -> bool:
    """Whether `FEDET_DEBUG` asks for whole tracebacks."""
    return bool(os.environ.get("FEDET_DEBUG"))


def details(error: BaseException) -> str:
    """The error's frames in the user's own code, as Python prints them, then its notes; with `FEDET_DEBUG` its whole traceback.

    Empty if neither the user's code nor a note has anything to add to the error's message.
    """
    if debugging():
        return "".join(traceback.format_exception(error)).rstrip("\n")
    frames = "".join(traceback.format_list(own_frames(error)[-LAST:])).rstrip("\n")
    return "\n".join(filter(None, [frames, *notes(error)]))


def notes(error: BaseException) -> list[str]:
    """The notes that were added to an error and its causes, those of the innermost cause last."""
    return [note for each in _chain(error) for note in vars(each).get("__notes__", ())]


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames in files that are neither fedet's nor Python's nor an installed package's, most recent call last."""
    return [frame for frame in _frames(error) if _is_own(frame.filename)]


def place(error: BaseException) -> str:
    """File name and line of the innermost frame in the user's own code, or else in fedet's: nothing private is in it."""
    frames = _frames(error)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    frame = (own_frames(error) or ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def to_message(error: BaseException) -> dict[str, Any]:
    """An error as plain data, for another process of the same user."""
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls in _TYPES.values()), None)
    text = str(error) if isinstance(error, FedetError) else f"{type(error).__name__}: {error}"
    return {"type": kind or FedetError.__name__, "text": text, "details": details(error)}


def from_message(message: Mapping[str, Any], context: str = "") -> FedetError:
    """The error that another process sent, with what happened there as a note."""
    error = _TYPES.get(message["type"], FedetError)(": ".join(filter(None, [context, message["text"]])))
    if message["details"]:
        error.add_note(message["details"])
    return error


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for each in _chain(error) for frame in traceback.extract_tb(each.__traceback__)]


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its explicit causes, the innermost last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def in_library(file: str) -> bool:
    """Whether this file belongs to fedet, to Python or to an installed package."""
    return file.startswith((_PACKAGE, *_LIBRARIES)) or not _INSTALLED.isdisjoint(Path(file).parts)


def _is_own(file: str) -> bool:
    return not in_library(file) and not file.startswith("<")  # frozen modules, generated code
