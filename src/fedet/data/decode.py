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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from fedet.errors import DataError
from fedet.runtime import spawn_module

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Shape = tuple[int, int, int]
Encoded = tuple[str, bytes]
"""An image's name for messages, and its file's bytes."""


class Layout(NamedTuple):
    """How a data set's parquet files store it: the columns of images and labels, and an image's channels, 1 or 3."""

    image: str
    label: str
    channels: int


HEAD = 12_000
"""Images that this process decodes while another one starts."""
_BLOCK = 1000


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "GIF", "TIFF")
"""Image files that are decoded; among the others that the library knows are some for which it starts another program."""
MAX_PIXELS = 1 << 24
"""Of one image."""
MEMORY_SHARE = 4
"""What the content of a table may take of the machine's memory: one part in this many."""
_ROWS = 256
"""Rows that are decoded at a time, if their content can't be too large."""
_ROW_BYTES = 200
"""Roughly what a row takes beside its content, once it consists of Python's objects."""
PURPOSES = {"pyarrow": "parquet files need pyarrow", "PIL": "image files need pillow"}
"""The packages of the `data` extra, and what each is needed for."""


def extra(module: str) -> Any:
    """Import a module of the `data` extra, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{PURPOSES[module.partition('.')[0]]}: pip install 'fedet[data]'") from None


def read_parquet(path: Path, columns: Sequence[str]) -> Any:
    """These columns as a table; a small file can decode to any size, so rows are read in blocks until there are too many."""
    file = extra("pyarrow.parquet").ParquetFile(path)
    blocks, size, most = [], 0, memory_limit()
    stated = _stated_sizes(file.metadata, columns)
    if sum(stated) > most:  # it says so itself: nothing is read
        raise too_large(path)
    for block in file.iter_batches(batch_size=_rows_at_a_time(stated), columns=list(columns)):
        size += block.nbytes + _ROW_BYTES * len(block)
        if size > most:
            raise too_large(path)
        blocks.append(block)
    return extra("pyarrow").Table.from_batches(blocks) if blocks else file.schema_arrow.empty_table().select(columns)


def memory_limit() -> int:
    """Bytes that the content of a file may take."""
    return int(psutil.virtual_memory().total) // MEMORY_SHARE


def too_large(path: Path) -> DataError:
    """The error for a file whose content would take more than that."""
    return DataError(
        f"{path} needs more than {memory_limit() >> 20:,} MB, 1/{MEMORY_SHARE} of this machine's memory: use less of it"
    )


def _stated_sizes(metadata: Any, columns: Sequence[str]) -> list[int]:
    """The bytes, uncompressed, that a file says these columns have in each row group; less than none counts as none."""
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    parts = [group.column(i) for group in groups for i in range(group.num_columns)]
    wanted = [part for part in parts if any(f"{part.path_in_schema}.".startswith(f"{name}.") for name in columns)]
    return [max(0, part.total_uncompressed_size) for part in wanted]


def _rows_at_a_time(stated: Sequence[int]) -> int:
    """How many rows of columns with these sizes can be decoded before their real size is looked at.

    A value that many rows share is stored once. It is no larger than its column in its row group, so that many times this
    size is the most that a block can have; a block may take as much as a quarter of what the whole file may.
    """
    return int(max(1, min(_ROWS, memory_limit() // 4 // max(1, *stated, 1))))


def read(path: Path, layout: Layout) -> tuple[Bytes, Ints]:
    """All images (n, channels, h, w) and labels of one file."""
    images, labels = columns(path, layout)
    return np.concatenate(list(_decoded(images, _shape_of(images[0], layout)))), labels


def columns(path: Path, layout: Layout) -> tuple[list[Encoded], Ints]:
    """The encoded images and the labels of one file."""
    names = [layout.image, layout.label]
    try:
        table = read_parquet(path, names)
        encoded = table.column(layout.image).combine_chunks().field("bytes").to_pylist()
        labels = table.column(layout.label).to_numpy().astype(np.int64)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{path} is not a parquet file with columns {' and '.join(names)}: download it again ({error})"
        ) from None
    if not encoded:
        raise DataError(f"{path} contains no images: download it again")
    return [(f"{path}: image {row}", data) for row, data in enumerate(encoded)], labels


def decode(target: Path, files: Sequence[Path], layout: Layout) -> list[Ints]:
    """Decode all images of these files into one NumPy file, (n, channels, h, w), and return the labels of each."""
    parts = [columns(path, layout) for path in files]
    images = [image for part, _ in parts for image in part]
    shape = _shape_of(images[0], layout)
    with target.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), *shape)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
    number = max(1, min(os.cpu_count() or 1, len(images) // HEAD))
    others_share = (len(images) - HEAD) // number
    ends = [0, *(len(images) - others_share * k for k in reversed(range(number)))]
    others = [
        spawn_module("fedet.data.decode", *map(str, (target, *layout, start, *shape[1:], first, last, *files)))
        for first, last in pairwise(ends[1:])
    ]
    try:
        _write(target, start, shape, images, ends[0], ends[1])
        for other, (first, last) in zip(others, pairwise(ends[1:]), strict=True):
            other.communicate()
            if other.returncode:  # repeat its work here, where an error is reported
                _write(target, start, shape, images, first, last)
    finally:
        for other in others:
            other.kill()
            other.communicate()
    return [labels for _, labels in parts]


def _write(target: Path, start: int, shape: Shape, images: Sequence[Encoded], first: int, last: int) -> None:
    """Decode these rows and write them to their place in the file, whose images start at offset `start`."""
    with target.open("r+b") as file:
        file.seek(start + first * math.prod(shape))
        for block in _decoded(images[first:last], shape):
            file.write(block.data)


def _decoded(images: Sequence[Encoded], shape: Shape) -> Iterator[Bytes]:
    """Blocks of images (n, channels, height, width), all of which must have this shape."""
    file_format, size = None, shape[1:]
    for start in range(0, len(images), _BLOCK):
        part = images[start : start + _BLOCK]
        block = np.empty((len(part), *shape), dtype=np.uint8)
        for row, image in enumerate(part):
            pixels, file_format = _pixels(image, shape[0], file_format)
            if pixels.shape[:2] != size:
                raise DataError(f"{image[0]} is {pixels.shape[:2]}, the first is {size}: all images must have the same size")
            block[row] = pixels.transpose(2, 0, 1)
        yield block


def _shape_of(image: Encoded, layout: Layout) -> Shape:
    height, width, channels = _pixels(image, layout.channels)[0].shape
    return channels, height, width


def _pixels(image: Encoded, channels: int, file_format: str | None = None) -> tuple[Bytes, str]:
    """An image (height, width, channels), and its file format.

    The previous image's format is tried first: trying all that the library knows takes as long as decoding.
    """
    name, data = image
    mode = "L" if channels == 1 else "RGB"
    library = extra("PIL.Image")
    try:
        try:
            opened = library.open(io.BytesIO(data), formats=(file_format,) if file_format else FORMATS)
        except library.UnidentifiedImageError:
            opened = library.open(io.BytesIO(data), formats=FORMATS)
        with opened as decoded:
            check_size(decoded)
            pixels = np.asarray(decoded if decoded.mode == mode else decoded.convert(mode))
            return pixels.reshape(*pixels.shape[:2], channels), decoded.format
    except Exception as error:
        raise DataError(f"{name} can't be decoded: download the file again ({error})") from None


def check_size(image: Any) -> None:
    """Refuse an image that is too large, before it is decoded: a few bytes can say that it has any size."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}")


def main() -> None:
    """Decode some of these files' images into the target file."""
    target, image_column, label_column = sys.argv[1:4]
    channels, start, height, width, first, last = map(int, sys.argv[4:10])
    layout = Layout(image_column, label_column, channels)
    try:
        images = [image for path in sys.argv[10:] for image in columns(Path(path), layout)[0]]
        _write(Path(target), start, (channels, height, width), images, first, last)
    except Exception:
        sys.exit(1)  # the parent repeats the work and reports the error


if __name__ == "__main__":
    main()
