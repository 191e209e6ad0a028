"""Nested data with tensors in one safetensors file and back: written atomically, checked when read, without pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedet.errors import FedetError
from fedet.storage.files import MAX_JSON, check_header, reason, replacing

FORMAT = "fedet-2"
"""Its digest covers every byte of the file except the digest itself."""
MAX_DEPTH = 100
ADVICE = ": restore it from a backup, or delete the run's folder and start again"
_UNSET = "0" * 32
_CHUNK = 1 << 20
_SCALARS = bool | int | float | str


def save(path: Path, value: Any, meta: dict[str, Any] | None = None, keep: Path | None = None) -> None:
    """Write nested dicts, lists, dataclasses, tensors and scalars as one safetensors file; the old one becomes `keep`."""
    tensors: dict[str, Tensor] = {}
    tree = _flatten(value, tensors, {})
    header = {"format": FORMAT, "tree": json.dumps(tree), "meta": json.dumps(meta or {}), "digest": _UNSET}
    with replacing(path, keep) as temporary:
        try:
            save_file(tensors, temporary, metadata=header)
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
        with temporary.open("r+b") as file:
            digest, position = _file_digest(file, _UNSET)
            file.seek(position)
            file.write(digest.encode())


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read back what `save` wrote; dataclasses come back as dicts of their fields."""
    if not path.is_file():  # a pipe would be waited for, and a device may have no end
        raise FedetError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    try:
        header, tensors = _read(path)
        tree, meta = json.loads(header["tree"]), json.loads(header["meta"])
        if not isinstance(meta, dict):
            raise ValueError("its metadata is not an object")
        return _restore(tree, tensors), meta
    except FedetError:
        raise
    except (KeyError, ValueError, RecursionError) as error:
        raise _damaged(path, reason(error)) from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file whose digest is right."""
    try:
        check_header(path, MAX_JSON)
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise FedetError(f"can't read {path}: {error.strerror or error}") from None
    except Exception as error:  # the parser raises many types, depending on where the damage is
        raise _damaged(path, str(error)) from None
    if header.get("format") != FORMAT:
        raise FedetError(f"{path} is not a checkpoint of this version of fedet")
    stored = header.get("digest", "")
    with path.open("rb") as file:
        expected = _file_digest(file, stored)[0]
    if stored != expected:
        raise _damaged(path, "its checksum is wrong")
    return header, tensors


def _damaged(path: Path, why: str) -> FedetError:
    return FedetError(f"{path} is damaged ({why}){ADVICE}")


def _flatten(value: Any, tensors: dict[str, Tensor], seen: dict[int, str], depth: int = 0) -> Any:
    """JSON in which each tensor is replaced by a reference; a tensor that occurs twice is stored once."""
    if depth > MAX_DEPTH:
        raise FedetError(f"a method's state is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = str(len(tensors))
            tensors[seen[id(value)]] = value.detach().cpu().contiguous().clone()
        return {"$tensor": seen[id(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {"$dict": [[_key(key), _flatten(inner, tensors, seen, depth + 1)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return [_flatten(inner, tensors, seen, depth + 1) for inner in value]
    if value is None or isinstance(value, _SCALARS):
        return value
    raise FedetError(f"a method's state may contain tensors, dicts, lists and scalars, not {type(value).__name__}")


def _key(key: Any) -> Any:
    if not isinstance(key, _SCALARS):
        raise FedetError(f"keys in a method's state are strings or numbers, not {type(key).__name__}")
    return key


def _restore(tree: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Undo `_flatten`; raises ValueError for anything that it would not have written."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(tree, list):
        return [_restore(inner, tensors, depth + 1) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"$tensor"} and isinstance(tree["$tensor"], str):
        if tree["$tensor"] not in tensors:
            raise ValueError(f"tensor {tree['$tensor']!r} is missing")
        return tensors[tree["$tensor"]]
    if tree.keys() == {"$dict"} and isinstance(tree["$dict"], list):
        return dict(_pair(pair, tensors, depth) for pair in tree["$dict"])
    raise ValueError("its tree contains an object that is neither a dict nor a tensor")


def _pair(pair: Any, tensors: dict[str, Tensor], depth: int) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], _SCALARS):
        raise ValueError("its tree contains an entry that is not a key with a value")
    return pair[0], _restore(pair[1], tensors, depth + 1)


def _file_digest(file: BinaryIO, stored: str) -> tuple[str, int]:
    """The digest of a file with its stored digest blanked out, and the position of the stored digest."""
    size = int.from_bytes(file.read(8), "little")
    header = file.read(size)
    field = f'"digest":"{stored}"'.encode()
    start = header.find(field) + len(b'"digest":"')
    total = hashlib.blake2b(header.replace(field, f'"digest":"{_UNSET}"'.encode()), digest_size=16)
    total.update(size.to_bytes(8, "little"))
    while chunk := file.read(_CHUNK):
        total.update(chunk)
    return total.hexdigest(), 8 + start
