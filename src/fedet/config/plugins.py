"""Users' own models, data and methods, referenced as `module:name` or `path/to/file.py:name`.

Importing a reference runs its code. References in a configuration or a call are the user's own. A folder may come from
somebody else: whoever builds from one does so inside `code_from(folder, trust=...)`, which refuses references by default.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedet.config import objects
from fedet.config.sources import expanded, nearest
from fedet.errors import ConfigError

HOW_TO_TRUST = "if you trust its author, pass --trust-code (from Python: trust_code=True)"

MAIN = "__main__"
"""The module of a script or a notebook, which no other process can import."""

Check = Callable[[str, str, str], None]
"""Raises `UntrustedCode` for a reference, its module or file, and what it would be used as, if it may not be imported."""

_check: ContextVar[Check | None] = ContextVar("_check", default=None)
_files: ContextVar[tuple[Path, str] | None] = ContextVar("_files", default=None)
"""The folder to which the files that a configuration names are limited, and what to do about it."""


class UntrustedCode(ConfigError):
    """A reference to code that may not be imported here."""


def code_from(folder: str | os.PathLike[str], *, trust: bool) -> contextlib.AbstractContextManager[None]:
    """Within the block, `resolve` refuses references unless `trust`, because they were read from this folder."""

    def refuse(reference: str, place: str, kind: str) -> None:
        raise UntrustedCode(f"{os.fspath(folder)} asks to run the code in '{reference}' for a {kind}: {HOW_TO_TRUST}")

    return _checking(None if trust else refuse)


def only_from(folder: Path | None, hint: str = "") -> contextlib.AbstractContextManager[None]:
    """Within the block, `resolve` and `check_file` refuse code and files outside this folder; None lifts a limit."""

    def inside(reference: str, place: str, kind: str) -> None:
        assert folder is not None
        origins = _origins(place)
        if not origins or not all(Path(origin).resolve().is_relative_to(folder.resolve()) for origin in origins):
            raise UntrustedCode(f"'{reference}' is not in the app folder: {hint}")

    return _checking(None if folder is None else inside, None if folder is None else (folder, hint))


def check_file(path: Path, setting: str) -> None:
    """Refuse a file or folder that a submitted configuration names outside the folder that it came with."""
    limit = _files.get()
    if limit and not path.resolve().is_relative_to(limit[0].resolve()):
        raise UntrustedCode(f"{path} ({setting}) is not in the app folder: {limit[1]}")


@contextlib.contextmanager
def _checking(check: Check | None, files: tuple[Path, str] | None = None) -> Iterator[None]:
    code, places = _check.set(check), _files.set(files)
    try:
        yield
    finally:
        _check.reset(code)
        _files.reset(places)


def _origins(place: str) -> list[str | Path]:
    """Where a reference's code is; nothing is imported to find out: the top-level package decides."""
    if place.endswith(".py"):
        return [expanded(place)]
    try:
        spec = importlib.util.find_spec(place.partition(".")[0])
    except ValueError:  # a module without a spec, such as __main__
        return []
    if spec is None:
        return []
    return [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])


def only_in_this_process(table: Any) -> list[str]:
    """The references in a configuration, as plain data, that no other process can import; arrays reach others as files."""
    return [text for text in texts(table) if _local(text)]


def texts(table: Any) -> list[str]:
    """All strings in plain data."""
    if isinstance(table, str):
        return [table]
    inner = table.values() if isinstance(table, dict) else table if isinstance(table, list | tuple) else ()
    return [text for value in inner for text in texts(value)]


def _local(text: str) -> bool:
    return text.startswith(f"{MAIN}:") or (text.startswith(objects.PREFIX) and not objects.is_data(text))


def resolve(reference: str, kind: str) -> Any:
    """Import the object behind a reference; modules are also searched for in the working directory, as `python` does."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' is not a valid reference to a {kind}: write module:name or file.py:name")
    if (known := objects.given(reference)) is not None:
        return known
    if place.startswith(objects.PREFIX):
        raise ConfigError(
            f"'{name}', a {kind}, was passed from Python as an object that no file names: pass it again, as in "
            f"fedet.resume(RUN, {_example(kind, name)})"
        )
    if check := _check.get():
        check(reference, place, kind)
    module = _from_file(Path(place), kind) if place.endswith(".py") else _from_module(place, kind)
    try:
        return getattr(module, name)
    except AttributeError:
        if place == MAIN:  # the name of every process's own program
            raise ConfigError(
                f"'{reference}' exists only in the program that defines it, and a {kind} is needed in another process: move "
                f"it to a file and write file.py:{name}"
            ) from None
        close = nearest(name, (own for own in vars(module) if not own.startswith("_")))
        raise ConfigError(f"{place} has no '{name}' to use as a {kind}{close}") from None


def _example(kind: str, name: str) -> str:
    """How an object of this kind is passed."""
    keys = {"data set": "data__name={}", "model": "models__clients=[{}, ...]", "method": "method={}"}
    return keys.get(kind, "data__public={}").format(name)


def _from_file(path: Path, kind: str) -> Any:
    path = expanded(path)
    if not os.path.isfile(path):
        raise ConfigError(f"{path} (for a {kind}) does not exist: relative paths start at the working directory")
    path = path.resolve()
    name = f"fedet_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} (for a {kind}) is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ConfigError(f"{path} (for a {kind}) failed on import: {type(error).__name__}: {error}") from error
    return sys.modules[name]


def _from_module(name: str, kind: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"module '{name}' (for a {kind}) failed on import: {type(error).__name__}: {error}") from error
