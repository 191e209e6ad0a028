"""What a client keeps between rounds, on its own disk, so that a server that starts again finds it as it was."""

from __future__ import annotations

from pathlib import Path

from fedet.core import ClientState
from fedet.storage import checkpoint

Version = tuple[int, int]


class VersionedStore:
    """One client's states in one run: a file for each exchange it took part in, until none can go back to it.

    The server says which version counts. What this client wrote after that was never counted: its reply was late, or the
    round was lost, or the server was put back to a checkpoint. Work on it is done again from the version that counts, so
    a round that is played again gives the same bits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, version: Version, keep: int) -> ClientState | None:
        """The state of this version, None if it is lost; drops what never counted and what no checkpoint goes back to."""
        have = self._versions()
        for other in [v for v in have if v > version]:
            self._path(other).unlink(missing_ok=True)
        counted = [v for v in have if v <= version]
        old = [v for v in counted if v[0] <= keep]
        for other in old[:-1]:
            self._path(other).unlink(missing_ok=True)
        if version == (0, 0):
            return {}
        return dict(checkpoint.load(self._path(version))[0]) if version in have else None

    def put(self, version: Version, kept: ClientState, before: Version) -> bool:
        """Write what the work left; False if this client has nothing to keep and never had."""
        if not kept and before == (0, 0):
            return False
        checkpoint.save(self._path(version), kept)
        return True

    def _path(self, version: Version) -> Path:
        return self.folder / f"{version[0]}-{version[1]}.safetensors"

    def _versions(self) -> list[Version]:
        names = (path.stem.split("-") for path in self.folder.glob("*-*.safetensors"))
        return sorted((int(number), int(step)) for number, step in names if number.isdigit() and step.isdigit())
