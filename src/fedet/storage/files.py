"""Files that are replaced as a whole, and JSON that is checked when it is read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedet.errors import ConfigError, FedetError

MAX_JSON = 64 << 20
"""Bytes of a JSON file; what is read from one takes about ten times its size."""


@contextlib.contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[Path]:
    """A temporary file that becomes `path` when the block ends, complete or not at all; what `path` was becomes `keep`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        if keep is not None and path.exists():
            link(path, keep)
        os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def link(path: Path, other: Path) -> None:
    """Make `other` a second name of the file `path`, atomically; where a disk has no such names, `path` is renamed."""
    temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
    try:
        os.link(path, temporary)
        os.replace(temporary, other)
    except OSError:
        os.replace(path, other)
    finally:
        temporary.unlink(missing_ok=True)  # renaming one name of a file over another name of it does nothing


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes what it could write to
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary(folder: Path) -> None:
    """Remove what a killed process had not finished writing; call it only while no other process writes there."""
    for path in folder.rglob(".*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_error(path: Path, error: OSError) -> FedetError:
    """The error for a disk that is full or read-only."""
    return FedetError(
        f"can't write {path}: {error.strerror or error}. Files written earlier are intact: free some space or choose another "
        "folder, then continue the run with `fedet resume`"
    )


def not_a_run(path: Path) -> ConfigError:
    """The error for a folder that is not a run's, with what it is instead."""
    start = f"{path} is not a run folder"
    if (path / "comparison.json").is_file():
        return ConfigError(f"{start} but a comparison's: repeat its `fedet compare`, or give the folder of one of its runs")
    runs = sorted(found.parent for found in path.glob("*/config.toml"))
    if runs:
        return ConfigError(f"{start}, but there are runs in it: give one of them, such as {runs[-1]}")
    why = "it has no config.toml" if path.is_dir() else "there is no such folder"
    return ConfigError(f"{start}: {why}; `fedet runs` lists the folders that `fedet run` created")


def create(path: Path) -> None:
    """Create a folder; raises `FedetError` where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cant_create(path, error) from error


def cant_create(path: Path, error: OSError) -> FedetError:
    """The error for a folder that can't be created."""
    return FedetError(f"can't create the directory {path}: {error.strerror or error}; choose another folder with --out")


def check_header(path: Path, most: int) -> None:
    """Raise ValueError if a safetensors file says that its header is larger; a parser takes many times that in memory."""
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > most:
            raise ValueError(f"its header is larger than {most >> 20} MB")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """Read a JSON file whose object must match a schema; raises `FedetError` saying what is wrong with it."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it is larger than {MAX_JSON >> 20} MB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FedetError(f"{path} is damaged: {reason(error)}") from None
    return conform(value, schema, str(path))


def conform(value: Any, schema: type[BaseModel], what: str) -> dict[str, Any]:
    """The object as it is, if it matches a schema; keys that the schema doesn't list are left alone."""
    try:
        schema.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise FedetError(f"{what} is damaged: {reason(error)}") from None
    return dict(value)


def reason(error: Exception) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        words = first["msg"].removeprefix("Value error, ")
        return f"{place or 'its content'}: {words[0].lower()}{words[1:]}"
    return str(error)
