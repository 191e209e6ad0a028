"""What clients keep between rounds."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from fedet.core import ClientState
from fedet.errors import FedetError
from fedet.storage.checkpoint import load, save


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
