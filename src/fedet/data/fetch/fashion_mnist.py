"""The sources of Fashion-MNIST: the four official IDX files, and Debian's package, which contains them."""

from __future__ import annotations

import gzip
import math
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedet.data.decode import Bytes
from fedet.data.fetch.download import Get, members, run_downloader
from fedet.data.fetch.parquet import Part, Parts
from fedet.errors import DataError

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
DEBIAN_PACKAGE = "dataset-fashion-mnist"
_PREFIXES = {"train": "train", "test": "t10k"}
_SIZE = (28, 28)
_UNSIGNED_BYTES = 8  # the type's code in the header of an IDX file


def official(work: Path, get: Get) -> Parts:
    """Download and read the official files."""
    for name, md5 in MD5.items():
        get(URL + name, work / name, md5)
    return _parts({name: (work / name).read_bytes() for name in MD5}, URL)


def debian(work: Path, get: Get) -> Parts:
    """Read the files of Debian's package, which `apt-get` downloads and nobody installs."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        advice = "use --source official", "`apt-get update`, run as root, may help"
        package = run_downloader(["apt-get", "download", DEBIAN_PACKAGE], Path(folder), "*.deb", *advice)
        return _parts(dict(members(_unpacked(package), "-ubyte.gz")), DEBIAN_PACKAGE)


def _unpacked(package: Path) -> Path:
    """The package's files as a tar archive; dpkg-deb reads every compression that packages have."""
    archive = package.with_suffix(".tar")
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    try:
        with archive.open("wb") as out:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True)
        failure = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        failure = str(error)
    if failure:
        raise DataError(f"Debian's package {package.name} can't be unpacked: use --source official ({failure})")
    return archive


def _parts(files: Mapping[str, bytes], source: str) -> Parts:
    missing = [name for name in MD5 if name not in files]
    if missing:
        raise DataError(f"{source} does not contain {', '.join(missing)}: choose another source with --source")
    return {part: _part(files, prefix) for part, prefix in _PREFIXES.items()}


def _part(files: Mapping[str, bytes], prefix: str) -> Part:
    names = f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"
    images, labels = (read_idx(name, files[name], shape) for name, shape in zip(names, (_SIZE, ()), strict=True))
    if len(images) != len(labels):
        raise DataError(f"{names[0]} has {len(images)} images but {names[1]} {len(labels)} labels: run the command again")
    return images[:, None], {"label": labels.astype(np.int64)}


def read_idx(name: str, packed: bytes, shape: tuple[int, ...]) -> Bytes:
    """The content of a gzip-compressed IDX file of unsigned bytes, (n, *shape)."""
    try:
        data = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} is not a complete gzip file: run the command again ({error})") from None
    dimensions = 1 + len(shape)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise DataError(f"{name} is not an IDX file of unsigned bytes in {dimensions} dimensions: run the command again")
    sizes = struct.unpack_from(f">{dimensions}I", data, 4)
    if sizes[1:] != shape:
        raise DataError(f"{name} has items of shape {sizes[1:]}, expected {shape}: run the command again")
    if len(data) - header != math.prod(sizes):
        raise DataError(
            f"{name} has {len(data) - header} bytes after its header, which announces {math.prod(sizes)}: run the command again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(sizes)
