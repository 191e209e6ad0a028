"""Arrays that a program passed as data, in a file for its worker processes and for a later resume."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedet.config import objects
from fedet.data.source import Dataset
from fedet.errors import DataError

_FIELDS = ("users", "official_test", "num_classes")
"""What a `Dataset` has besides inputs and labels."""


def save(references: Iterable[str], cache: Path) -> None:
    """Write the arrays behind these references, as far as they are arrays and not written yet."""
    for reference in references:
        target = _file(reference, cache)
        if objects.is_data(reference) and objects.given(reference) and not target.exists():
            _write(target, _as_plain(objects.given(reference)()))


def saved(references: Iterable[str], cache: Path) -> dict[str, Callable[[], Any]]:
    """Functions that read the arrays behind these references, as far as this process has only their file."""
    wanted = [reference for reference in references if objects.is_data(reference) and not objects.given(reference)]
    files = {reference: _file(reference, cache) for reference in wanted}
    return {reference: _reader(file) for reference, file in files.items() if file.is_file()}


def _file(reference: str, cache: Path) -> Path:
    return cache / f"{reference.partition(':')[0].replace('/', '-')}.npz"


def _as_plain(made: Any) -> dict[str, Any]:
    if not isinstance(made, Dataset):
        return {str(place): np.asarray(part) for place, part in enumerate(made if isinstance(made, tuple) else (made,))}
    more = {name: getattr(made, name) for name in _FIELDS}
    return {"inputs": made.inputs.numpy(), "labels": made.labels.numpy()} | {k: v for k, v in more.items() if v is not None}


def _write(target: Path, arrays: dict[str, Any]) -> None:
    temporary = target.with_name(f".{target.stem}-{uuid.uuid4().hex}.npz")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, **arrays)
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"can't write the data for worker processes to {target}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _reader(file: Path) -> Callable[[], Any]:
    def read() -> Any:
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (OSError, ValueError) as error:
            raise DataError(f"{file} can't be read: delete it, and pass the data again from Python ({error})") from None
        if "inputs" not in arrays:
            return tuple(arrays.values()) if len(arrays) > 1 else arrays["0"]
        inputs, labels = (torch.from_numpy(arrays[name]) for name in ("inputs", "labels"))
        return Dataset("", inputs, labels, int(arrays["num_classes"]), arrays.get("users"), arrays.get("official_test"))

    return read
