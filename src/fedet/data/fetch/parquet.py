"""Write images and labels as the parquet files that `data/vision.py` reads."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedet.data.decode import Bytes, Ints, Layout, extra

Part = tuple[Bytes, dict[str, Ints]]
"""Images (n, channels, h, w), and the columns of labels."""
Parts = Mapping[str, Part]
"""The parts `train` and `test` of a data set."""


def write(folder: Path, layout: Layout, parts: Parts) -> Path:
    """Write all files to a temporary folder, then move them into this one, and return it."""
    pyarrow, parquet = extra("pyarrow"), extra("pyarrow.parquet")
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        for part, (images, labels) in parts.items():
            rows = [{"bytes": png(image), "path": f"{part}/{i:05d}.png"} for i, image in enumerate(images)]
            table = {layout.image: pyarrow.array(rows, kind), **dict(sorted(labels.items(), reverse=True))}
            parquet.write_table(pyarrow.table(table), Path(work) / f"{part}.parquet")
        folder.mkdir(exist_ok=True)
        for part in parts:
            os.replace(Path(work) / f"{part}.parquet", folder / f"{part}.parquet")
    return folder


def png(image: Bytes) -> bytes:
    """An image (channels, h, w), gray or RGB, as a PNG file."""
    buffer = io.BytesIO()
    pixels = np.ascontiguousarray(image.transpose(1, 2, 0)) if len(image) == 3 else image[0]
    extra("PIL.Image").fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
