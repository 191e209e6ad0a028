"""Decode the images of parquet files, in as many processes as there are cores.

Run as a program this module is one of those processes; it does not import torch.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedet.errors import DataError
from fedet.runtime import spawn_module

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Size = tuple[int, int]
Encoded = tuple[str, bytes]
"""An image's name for messages, and its file's bytes."""

HEAD = 12_000
"""Images that this process decodes while another one starts."""
_BLOCK = 1000


def extra(module: str) -> Any:
    """Import a module of the `data` extra, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"reading images needs {module.partition('.')[0]}: pip install 'fedet[data]'") from None


def read(path: Path, label: str) -> tuple[Bytes, Ints]:
    """All images (n, 3, h, w) and labels of one file."""
    images, labels = columns(path, label)
    return np.concatenate(list(_decoded(images, _size_of(images[0])))), labels


def columns(path: Path, label: str) -> tuple[list[Encoded], Ints]:
    """The encoded images and the labels of one file."""
    parquet = extra("pyarrow.parquet")
    try:
        table = parquet.read_table(path, columns=["img", label])
        encoded = table.column("img").combine_chunks().field("bytes").to_pylist()
        labels = table.column(label).to_numpy().astype(np.int64)
    except Exception as error:
        raise DataError(f"{path} is not a parquet file with columns img and {label}: download it again ({error})") from None
    if not encoded:
        raise DataError(f"{path} contains no images: download it again")
    return [(f"{path}: image {row}", data) for row, data in enumerate(encoded)], labels


def decode(target: Path, files: Sequence[Path], label: str) -> list[Ints]:
    """Decode all images of these files into one NumPy file, (n, 3, h, w), and return the labels of each."""
    parts = [columns(path, label) for path in files]
    images = [image for part, _ in parts for image in part]
    size = _size_of(images[0])
    with target.open("wb") as file:
        shape = (len(images), 3, *size)
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        start = file.tell()
    number = max(1, min(os.cpu_count() or 1, len(images) // HEAD))
    others_share = (len(images) - HEAD) // number
    ends = [0, *(len(images) - others_share * k for k in reversed(range(number)))]
    others = [
        spawn_module("fedet.data.decode", *map(str, (target, start, *size, first, last, label, *files)))
        for first, last in pairwise(ends[1:])
    ]
    try:
        _write(target, start, size, images, ends[0], ends[1])
        for other, (first, last) in zip(others, pairwise(ends[1:]), strict=True):
            other.communicate()
            if other.returncode:  # repeat its work here, where an error is reported
                _write(target, start, size, images, first, last)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    return [labels for _, labels in parts]


def _write(target: Path, start: int, size: Size, images: Sequence[Encoded], first: int, last: int) -> None:
    """Decode these rows and write them to their place in the file, whose images start at offset `start`."""
    with target.open("r+b") as file:
        file.seek(start + first * 3 * math.prod(size))
        for block in _decoded(images[first:last], size):
            file.write(block.data)


def _decoded(images: Sequence[Encoded], size: Size) -> Iterator[Bytes]:
    """Blocks of images (n, 3, height, width), all of which must have this size."""
    file_format = None
    for start in range(0, len(images), _BLOCK):
        part = images[start : start + _BLOCK]
        block = np.empty((len(part), 3, *size), dtype=np.uint8)
        for row, image in enumerate(part):
            pixels, file_format = _pixels(image, file_format)
            if pixels.shape[:2] != size:
                raise DataError(f"{image[0]} is {pixels.shape[:2]}, the first is {size}: all images must have the same size")
            block[row] = pixels.transpose(2, 0, 1)
        yield block


def _size_of(image: Encoded) -> Size:
    height, width = _pixels(image)[0].shape[:2]
    return height, width


def _pixels(image: Encoded, file_format: str | None = None) -> tuple[Bytes, str]:
    """An image (height, width, 3), and its file format.

    The previous image's format is tried first: trying all that the library knows takes as long as decoding.
    """
    name, data = image
    library = extra("PIL.Image")
    try:
        try:
            opened = library.open(io.BytesIO(data), formats=file_format and (file_format,))
        except library.UnidentifiedImageError:
            opened = library.open(io.BytesIO(data))
        with opened as decoded:
            return np.asarray(decoded if decoded.mode == "RGB" else decoded.convert("RGB")), decoded.format
    except Exception as error:
        raise DataError(f"{name} can't be decoded: download the file again ({error})") from None


def main() -> None:
    """Decode some of these files' images into the target file."""
    target, *numbers, label = sys.argv[1:8]
    start, height, width, first, last = map(int, numbers)
    files = map(Path, sys.argv[8:])
    try:
        images = [image for path in files for image in columns(path, label)[0]]
        _write(Path(target), start, (height, width), images, first, last)
    except Exception:
        sys.exit(1)  # the parent repeats the work and reports the error


if __name__ == "__main__":
    main()
