"""Random images, and the parquet files of tiny data sets made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedet.data.fetch import parquet
from fedet.data.vision import LAYOUTS

SHAPES = {"cifar10": (3, 32, 32), "fashion-mnist": (1, 28, 28)}


def pixels(n: int, seed: int = 0, name: str = "cifar10") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *SHAPES[name]), dtype=np.uint8)


def write_images(root: Path, train: int = 40, test: int = 10, name: str = "cifar10") -> Path:
    parts = {part: (pixels(n, n, name), {"label": np.arange(n) % 10}) for part, n in (("train", train), ("test", test))}
    root.mkdir(parents=True, exist_ok=True)
    return parquet.write(root / name, LAYOUTS[name], parts)
