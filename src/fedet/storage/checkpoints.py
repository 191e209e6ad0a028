"""The last two checkpoints of a run: if the newest can't be used, the run goes on from the one before it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedet.errors import FedetError
from fedet.storage import checkpoint, files
from fedet.storage.client_store import ClientStore
from fedet.storage.records import CheckpointRecord


class Checkpoints:
    """Two files and the client states that they list; whenever the process ends, at least one of them is whole."""

    def __init__(self, folder: Path, store: ClientStore) -> None:
        self.folder, self.store = folder, store
        self.newest = folder / "checkpoint.safetensors"
        self.previous = folder / "previous-checkpoint.safetensors"
        self.damaged = folder / "damaged-checkpoint.safetensors"
        """The last file that could not be used, for whoever wants to know what happened to it."""
        self.meta: dict[str, Any] = {}
        """What was saved beside the fields of the one that was loaded last."""
        self._states: dict[str, str] = {}
        """The client states that the newest one lists."""

    def save(self, fields: dict[str, Any], config: str, **more: Any) -> None:
        """Write first the client states, then the file that lists them; the newest so far becomes the one before."""
        states = self.store.flush(fields["round"])
        checkpoint.save(self.newest, fields, {"config": config, "clients": states, **more}, keep=self.previous)
        files.sync_names(self.folder)
        self.store.sweep(self._states.values())
        self._states = states

    def load(self, config: str) -> dict[str, Any] | None:
        """The fields of the newest one, whose client states become current; None if there is none."""
        return self._load(self.newest, config) if self.newest.exists() else None

    def repair(self, config: str) -> str | None:
        """If the newest one is missing or damaged, put the one before in its place, and say so in a sentence.

        Raises the newest one's error if the one before can't be used either; no file is touched then.
        """
        if not self.previous.exists():
            return None
        try:
            if not self.newest.exists():
                raise FedetError(f"{self.newest} is missing")
            self._load(self.newest, config)
            self.store.verify()
            return None
        except FedetError as error:
            number = self._verified_previous(config, error)
            why = str(error).removesuffix(checkpoint.ADVICE)
        kept = ""
        try:
            if self.newest.exists():
                os.replace(self.newest, self.damaged)
                kept = f"; the unusable file is now {self.damaged.name}"
            files.link(self.previous, self.newest)
        except OSError as error:
            raise files.write_error(self.newest, error) from error
        return f"{why}: the run continues from the checkpoint before it, after round {number}{kept}"

    def _verified_previous(self, config: str, error: FedetError) -> int:
        try:
            number = int(self._load(self.previous, config)["round"])
            self.store.verify()
        except FedetError:
            raise error from None
        return number

    def _load(self, path: Path, config: str) -> dict[str, Any]:
        fields, meta = read_checkpoint(path)
        if meta.get("config") != config:
            raise FedetError(f"{path} and {self.folder.parent / 'config.toml'} belong to different configurations")
        self.store.restore(meta.get("clients"))
        self.meta, self._states = meta, dict(meta["clients"])
        return fields


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and the metadata of a run's checkpoint, with the types that a run needs."""
    fields, meta = checkpoint.load(path)
    return files.conform(fields, CheckpointRecord, str(path)), meta
