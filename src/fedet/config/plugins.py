"""Users' own models, data and methods by `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

from fedet.config.sources import expanded
from fedet.errors import ConfigError


def resolve(reference: str, what: str) -> Any:
    """The object behind a reference; the working folder is searched as `python` itself would."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' is no reference to a {what}: write module:name or file.py:name")
    module = _from_file(Path(place), what) if place.endswith(".py") else _from_module(place, what)
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no '{name}' for a {what}")
    return getattr(module, name)


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
