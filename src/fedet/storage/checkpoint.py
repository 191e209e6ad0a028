"""Plain data to files and back: atomic, checked, without pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedet.errors import FedetError

FORMAT = "fedet-1"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` at the end, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def cannot_write(path: Path, error: OSError) -> FedetError:
    """The sentence for a full or read-only disk."""
    return FedetError(
        f"can't write {path}: {error.strerror or error}. What was written before is intact: make room or choose another place; "
        "a run goes on with `fedet resume`"
    )


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save(path: Path, value: Any, meta: dict[str, Any] | None = None) -> None:
    """Write nested dicts, lists, dataclasses, tensors and scalars as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    tree = _flatten(value, tensors, {})
    header = {"format": FORMAT, "tree": json.dumps(tree), "meta": json.dumps(meta or {}), "digest": _digest(tensors)}
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=header)
        except SafetensorError as error:
            raise OSError(None, str(error)) from error


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read back what `save` wrote; dataclasses come back as dicts of their fields."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise FedetError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FedetError(f"{path} is corrupt ({error}): delete it and start again, or restore it from a copy") from None
    if header.get("format") != FORMAT:
        raise FedetError(f"{path} was not written by this version of fedet: it can't be read as a checkpoint")
    if header.get("digest") != _digest(tensors):
        raise FedetError(f"{path} is corrupt (its checksum differs): delete it and start again, or restore it from a copy")
    return _restore(json.loads(header["tree"]), tensors), json.loads(header["meta"])


def _flatten(value: Any, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    """JSON with each tensor replaced by a reference; a tensor that stands in two places is stored once."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = str(len(tensors))
            tensors[seen[id(value)]] = value.detach().cpu().contiguous().clone()
        return {"$tensor": seen[id(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {"$dict": [[key, _flatten(inner, tensors, seen)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return [_flatten(inner, tensors, seen) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise FedetError(f"a method's state may hold tensors, dicts, lists and scalars, not {type(value).__name__}")


def _restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict) and "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if isinstance(tree, dict):
        return {key: _restore(inner, tensors) for key, inner in tree["$dict"]}
    return [_restore(inner, tensors) for inner in tree] if isinstance(tree, list) else tree


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        total.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
