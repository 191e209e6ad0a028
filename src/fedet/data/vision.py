"""Images from disk: Hugging Face style parquet folders, decoded once and memory-mapped, and folders of image files."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedet.config import plugins
from fedet.config.sources import expanded
from fedet.data import decode
from fedet.data.decode import Bytes, Ints, Layout, extra
from fedet.errors import DataError

LAYOUTS = {
    "cifar10": Layout("img", "label", 3),
    "cifar100": Layout("img", "fine_label", 3),
    "fashion-mnist": Layout("image", "label", 1),
}
"""The data sets that are read from parquet files."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".pgm"}
_FILES = ("images", "labels", "official_test")


def data_dir(name: str, directory: str | os.PathLike[str] | None) -> Path:
    """The folder that holds this data set, from the configuration or else from FEDET_DATA."""
    root = directory or os.environ.get("FEDET_DATA")
    if not root:
        raise DataError(
            f"{name} is read from a folder and none is given: set FEDET_DATA or --data-dir to the folder that holds {name}/, "
            f"or get it with `fedet data fetch {name} --dir DIR`"
        )
    return folder_in(expanded(root), name)


def folder_in(root: Path, name: str) -> Path:
    """The data set's folder in this one; its name may have underscores instead of hyphens, as on Hugging Face."""
    choices = [root / name, root / name.replace("-", "_")]
    return next((folder for folder in choices if os.path.isfile(folder / "train.parquet")), choices[0])


def load_parquet(name: str, directory: str | os.PathLike[str] | None, cache: Path) -> tuple[Bytes, Ints, npt.NDArray[np.bool_]]:
    """Images (n, channels, h, w), labels and the official test mask; decoded on the first call, then mapped from the cache."""
    folder = data_dir(name, directory)
    files = [folder / "train.parquet", folder / "test.parquet"]
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing:
        raise DataError(
            f"{missing} is missing: get it with `fedet data fetch {name} --dir {folder.parent}`, "
            f"or set FEDET_DATA or --data-dir to the folder that holds {name}/"
        )
    target = expanded(cache) / f"{name}-{_fingerprint(files)}"
    if not target.is_dir():
        _decode_into(target, files, LAYOUTS[name])
    try:
        images, labels, official = (np.load(target / f"{part}.npy", mmap_mode="c") for part in _FILES)
    except (OSError, ValueError) as error:
        raise DataError(f"the decoded copy in {target} can't be read: delete that folder and try again ({error})") from None
    return images, np.array(labels), np.array(official)


def image_files(folder: str) -> list[Path]:
    """The image files under a folder, sorted by name."""
    root = expanded(folder)
    if not os.path.isdir(root):
        raise DataError(
            f"data.public names the folder {root}, which does not exist: relative paths start from the current folder"
        )
    plugins.check_file(root, "data.public")
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())
    for path in found:  # a link may lead out of a folder that may not be left
        plugins.check_file(path, "data.public")
    if not found:
        raise DataError(f"{root} contains no images ({', '.join(sorted(_SUFFIXES))})")
    return found


def read_images(files: Sequence[Path], shape: tuple[int, ...]) -> Bytes:
    """Decode image files, resized (bilinear) to this (channels, height, width), gray or RGB."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"a folder of images can't be used with a data set whose inputs have shape {shape}")
    image = extra("PIL.Image")
    mode = "L" if shape[0] == 1 else "RGB"
    out = np.empty((len(files), *shape), dtype=np.uint8)
    for row, path in enumerate(files):
        try:
            with image.open(path, formats=decode.FORMATS) as picture:
                decode.check_size(picture)
                resized = picture.convert(mode).resize((shape[2], shape[1]), image.Resampling.BILINEAR)
        except Exception as error:
            raise DataError(f"{path} can't be read as an image: remove or replace it ({error})") from None
        out[row] = np.asarray(resized).reshape(*shape[1:], shape[0]).transpose(2, 0, 1)
    return out


def _fingerprint(files: Sequence[Path]) -> str:
    stats = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.blake2b(repr(stats).encode(), digest_size=6).hexdigest()


def _decode_into(target: Path, files: Sequence[Path], layout: Layout) -> None:
    """Decode into a temporary folder and rename it; if two processes do so at once, the first to finish wins."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        work.mkdir()
    except OSError as error:
        raise DataError(f"can't write to the cache folder {target.parent}: choose another ({error})") from None
    try:
        labels = decode.decode(work / "images.npy", files, layout)
        np.save(work / "labels.npy", np.concatenate(labels))
        np.save(work / "official_test.npy", np.repeat([False, True], [len(part) for part in labels]))
        os.replace(work, target)
    except OSError as error:
        if not target.is_dir():
            raise DataError(f"can't write the decoded images to {target}: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
