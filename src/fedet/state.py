"""Plain data to files and back: atomic, checked, without pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedet.core import Weights
from fedet.errors import FedetError

FORMAT = "fedet-1"
ClientState = dict[str, Weights]
ELSEWHERE = "elsewhere"
"""The one group in a store of a client whose state lies on its own disk: which version of it counts."""


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


class ClientStore:
    """What clients keep between rounds: in memory up to a budget, on disk beyond, committed round by round.

    A file is named after client and round and never changed, so the checkpoint that lists it can always be resumed from.
    """

    def __init__(self, folder: Path, budget: int = 2 << 30):
        self.folder, self.budget = folder, budget
        self._cache: OrderedDict[int, ClientState] = OrderedDict()
        self._files: dict[int, str] = {}
        self._staged: dict[int, ClientState] = {}
        self._dirty: set[int] = set()

    def get(self, client: int) -> ClientState:
        """A client's state as of its last participation, or nothing yet."""
        if client in self._staged:
            return dict(self._staged[client])
        if client not in self._cache and client in self._files:
            self._cache[client] = load(self.folder / self._files[client])[0]
        if client in self._cache:
            self._cache.move_to_end(client)
        return dict(self._cache.get(client, {}))

    def clients(self) -> list[int]:
        """Who has a state."""
        return sorted({*self._staged, *self._cache, *self._files})

    def stage(self, client: int, state: ClientState) -> None:
        """Keep this state if the round is completed."""
        if state or client in self._cache or client in self._files:
            self._staged[client] = dict(state)

    def rollback(self) -> None:
        """Forget what the unfinished round staged."""
        self._staged.clear()

    def commit(self, number: int) -> None:
        """Make the round's states the current ones and move the longest unused to disk where memory runs short."""
        for client, state in self._staged.items():
            self._cache[client] = state
            self._cache.move_to_end(client)
            self._dirty.add(client)
        self._staged.clear()
        size = sum(_bytes(state) for state in self._cache.values()) if self._cache else 0
        while size > self.budget and len(self._cache) > 1:
            client, state = next(iter(self._cache.items()))
            self._write(client, number)
            del self._cache[client]
            size -= _bytes(state)

    def flush(self, number: int) -> dict[str, str]:
        """Write what is not yet on disk and return the list of files for the checkpoint."""
        for client in sorted(self._dirty):
            self._write(client, number)
        return {str(client): name for client, name in sorted(self._files.items())}

    def restore(self, files: dict[str, str]) -> None:
        """Take over the files of a checkpoint."""
        self._files = {int(client): name for client, name in files.items()}
        missing = [name for name in self._files.values() if not (self.folder / name).is_file()]
        if missing:
            raise FedetError(f"{self.folder / missing[0]} is missing: the run can't be resumed without it")

    def sweep(self) -> None:
        """Delete files that no checkpoint lists any more."""
        listed = set(self._files.values())
        for path in self.folder.glob("*.safetensors"):
            if path.name not in listed:
                path.unlink(missing_ok=True)

    def _write(self, client: int, number: int) -> None:
        if client in self._dirty:
            name = f"{client}-r{number}.safetensors"
            save(self.folder / name, self._cache[client])
            self._files[client] = name
            self._dirty.discard(client)


def _bytes(state: ClientState) -> int:
    return sum(tensor.nbytes for group in state.values() for tensor in group.values())
