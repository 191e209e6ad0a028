"""Users' own models, data and methods by `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedet.config.sources import expanded
from fedet.errors import ConfigError

_limit: ContextVar[tuple[Path, str] | None] = ContextVar("limit", default=None)


class UntrustedCode(ConfigError):
    """A configuration refers to code that it may not load here."""


@contextlib.contextmanager
def only_from(folder: Path | None, hint: str = "") -> Iterator[None]:
    """Refuse references to code outside this folder while the block runs; None lifts a limit."""
    token = _limit.set(None if folder is None else (folder.resolve(), hint))
    try:
        yield
    finally:
        _limit.reset(token)


def resolve(reference: str, what: str) -> Any:
    """The object behind a reference; the working folder is searched as `python` itself would."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' is no reference to a {what}: write module:name or file.py:name")
    _check_limit(reference, place)
    module = _from_file(Path(place), what) if place.endswith(".py") else _from_module(place, what)
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no '{name}' for a {what}")
    return getattr(module, name)


def _check_limit(reference: str, place: str) -> None:
    limit = _limit.get()
    if limit is not None:
        origins = _origins(place)
        if not origins or not all(Path(origin).resolve().is_relative_to(limit[0]) for origin in origins):
            raise UntrustedCode(f"'{reference}' is not in the app folder: {limit[1]}")


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


def _from_file(path: Path, what: str) -> Any:
    path = expanded(path).resolve()
    if not path.is_file():
        raise ConfigError(f"no file {path} for a {what}: give its path from the folder you are in")
    name = f"fedet_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} is not a Python file that can be loaded for a {what}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise ConfigError(f"{path} could not be loaded for a {what}: {type(error).__name__}: {error}") from error
    return sys.modules[name]


def _from_module(name: str, what: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"module '{name}' could not be loaded for a {what}: {type(error).__name__}: {error}") from error
