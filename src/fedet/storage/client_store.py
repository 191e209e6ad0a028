"""The state that clients keep between rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from fedet.core import ClientState
from fedet.errors import FedetError
from fedet.storage.checkpoint import load, save
from fedet.storage.files import sync_names


class ClientStore:
    """The state that clients keep between rounds: in memory up to a budget of bytes, on disk beyond it, committed per round.

    A file is named after client and round and never modified, so a run can always resume from a checkpoint that lists it.
    """

    def __init__(self, folder: Path, budget: int = 2 << 30):
        self.folder, self.budget = folder, budget
        self._cache: OrderedDict[int, ClientState] = OrderedDict()
        self._files: dict[int, str] = {}
        self._staged: dict[int, ClientState] = {}
        self._dirty: set[int] = set()

    def get(self, client: int) -> ClientState:
        """A client's state after its last participation; empty before the first."""
        if client in self._staged:
            return dict(self._staged[client])
        if client in self._cache:
            self._cache.move_to_end(client)
        elif client in self._files:
            self._cache[client] = _load(self.folder / self._files[client])
            self._shrink([other for other in self._cache if other not in self._dirty and other != client])
        return dict(self._cache.get(client, {}))

    def clients(self) -> list[int]:
        """The clients that have a state, without loading any."""
        known = (self._cache.keys() | self._files.keys()) - self._staged.keys()
        return sorted(known | {client for client, state in self._staged.items() if state})

    def stage(self, client: int, state: ClientState) -> None:
        """Set a client's state from the end of this round on."""
        if state or client in self._cache or client in self._files:
            self._staged[client] = dict(state)

    def rollback(self) -> None:
        """Discard the states staged in an unfinished round."""
        self._staged.clear()

    def commit(self, number: int) -> None:
        """Make the staged states current, and move the least recently used ones to disk if they exceed the budget."""
        for client, state in self._staged.items():
            self._cache.pop(client, None)
            self._dirty.discard(client)
            if state:
                self._cache[client] = state
                self._dirty.add(client)
            else:  # as before its first participation
                self._files.pop(client, None)
        self._staged.clear()
        self._shrink(list(self._cache)[:-1], number)

    def _shrink(self, candidates: Iterable[int], number: int = 0) -> None:
        """Move these states out of memory, the first ones first, as far as all exceed the budget."""
        size = sum(_bytes(state) for state in self._cache.values())
        for client in candidates:
            if size <= self.budget:
                break
            self._write(client, number)
            size -= _bytes(self._cache.pop(client))

    def flush(self, number: int) -> dict[str, str]:
        """Write all states that are not on disk yet, and return the list of files for the checkpoint."""
        for client in sorted(self._dirty):
            self._write(client, number)
        sync_names(self.folder)
        return {str(client): name for client, name in sorted(self._files.items())}

    def restore(self, files: Any) -> None:
        """Take over the list of files from a checkpoint."""
        if not isinstance(files, dict) or not all(_listed(client, name) for client, name in files.items()):
            raise FedetError(f"the checkpoint's list of files in {self.folder} is damaged: the run can't be resumed")
        self._files = {int(client): name for client, name in files.items()}
        missing = [name for name in self._files.values() if not (self.folder / name).is_file()]
        if missing:
            raise FedetError(f"{self.folder / missing[0]} is missing: the run can't be resumed without it")

    def verify(self) -> None:
        """Read every file, so that a damaged one is found when a run is resumed and not rounds later."""
        for name in self._files.values():
            _load(self.folder / name)

    def sweep(self, also: Iterable[str] = ()) -> None:
        """Delete files that neither the checkpoint lists nor the one before it, whose list is `also`."""
        listed = {*self._files.values(), *also}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in listed:
                path.unlink(missing_ok=True)

    def _write(self, client: int, number: int) -> None:
        if client in self._dirty:
            name = f"{client}-r{number}.safetensors"
            save(self.folder / name, self._cache[client])
            self._files[client] = name
            self._dirty.discard(client)


def _listed(client: Any, name: Any) -> bool:
    """Whether an entry of the list names a file of this client, in this folder."""
    return str(client).isdecimal() and isinstance(name, str) and name.startswith(f"{client}-r") and Path(name).name == name


def _load(path: Path) -> ClientState:
    state = load(path)[0]
    groups = list(state.values()) if isinstance(state, dict) else [None]
    if not all(isinstance(g, dict) and all(isinstance(t, Tensor) for t in g.values()) for g in groups):
        raise FedetError(f"{path} is damaged: it does not contain the state of a client")
    return dict(state)


def _bytes(state: ClientState) -> int:
    return sum(tensor.nbytes for group in state.values() for tensor in group.values())
