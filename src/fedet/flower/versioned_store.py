"""A client's state between rounds, on the client's own disk, so that a restarted server finds it as it was."""

from __future__ import annotations

from pathlib import Path

from fedet.core import ClientState
from fedet.errors import FedetError
from fedet.storage import checkpoint

Version = tuple[int, int]


class VersionedStore:
    """One client's states in one run: a file for each step that it took part in, until no checkpoint needs it.

    The server says which version is current. Anything newer was never accepted: its reply was late or rejected, the round
    was lost, or the server returned to a checkpoint. That work is done again from the current version, so a repeated round
    gives the same bits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, version: Version) -> ClientState | None:
        """The state of this version, None if it is lost; version (0, 0) is the empty state."""
        if version == (0, 0):
            return {}
        if not self._path(version).is_file():
            return None
        try:
            return dict(checkpoint.load(self._path(version))[0])
        except FedetError:  # corrupt
            return None

    def save(self, version: Version, state: ClientState, previous: Version) -> bool:
        """Write the state that the work left; False if there is none and never was."""
        if not state and previous == (0, 0):
            return False
        checkpoint.save(self._path(version), state)
        return True

    def prune(self, current: Version, last_checkpoint: int) -> None:
        """Delete versions that were never accepted, and those older than what the server's checkpoints refer to."""
        versions = self._versions()
        newer = [v for v in versions if v > current]
        checkpointed = [v for v in versions if v <= current and v[0] <= last_checkpoint]
        for version in [*newer, *checkpointed[:-1]]:
            self._path(version).unlink(missing_ok=True)

    def _path(self, version: Version) -> Path:
        return self.folder / f"{version[0]}-{version[1]}.safetensors"

    def _versions(self) -> list[Version]:
        names = (path.stem.split("-") for path in self.folder.glob("*-*.safetensors"))
        return sorted((int(name[0]), int(name[1])) for name in names if len(name) == 2 and all(part.isdigit() for part in name))
