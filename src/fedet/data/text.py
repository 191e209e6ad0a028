"""Read labelled texts with users: Sent140, film reviews, or your own CSV, parquet or LEAF files."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
import torch

from fedet.config import plugins
from fedet.config.sources import expanded
from fedet.data import tokens
from fedet.data.decode import Ints, extra, memory_limit, read_parquet, too_large
from fedet.data.source import Dataset
from fedet.errors import DataError

if TYPE_CHECKING:
    from fedet.config import DataConfig, TextConfig

PREFIX = "text:"
"""`text:PATH` is a file of the user's."""
FILES = {
    "sent140": ("training.1600000.processed.noemoticon.csv", "sent140", "sent140_pool.parquet"),
    "rt-critics": ("rt_critics.parquet",),
}
"""Possible file names of each data set in the folder `text`; the first that exists is used."""
_SENT140_COLUMNS = ("label", "id", "date", "query", "user", "text")
"""Sent140's CSV has no header."""
_MAX_CLASSES = 1000
_FIELD_BYTES, _CONTAINER_BYTES = 60, 240
"""Roughly what a string, and a list or an object, takes beside its content."""


class Table(NamedTuple):
    """The columns of a file; users are optional."""

    texts: list[str]
    labels: list[Any]
    users: list[Any] | None


def known(name: str) -> bool:
    """Whether this is the name of a text data set."""
    return name in FILES or name.startswith(PREFIX)


def load(cfg: DataConfig, cache: Path) -> Dataset:
    """Read a data set, drop users with few texts, and encode texts as ids; the result is cached."""
    path = locate(cfg.name, cfg.dir)
    vocabulary = tokens.vocabulary(cfg.text.vocab, cfg.dir)
    settings = (cfg.text.model_dump(exclude={"vocab"}), cfg.min_samples, cfg.partition == "natural")
    target = expanded(cache) / f"{path.stem}-{tokens.fingerprint([*_files(path), vocabulary], settings)}"
    if not target.is_dir():
        table = _drop_rare_users(read(path, cfg.text, cfg.partition == "natural"), cfg.min_samples, path)
        labels = _encode_labels(table.labels, path)
        users = np.empty(0, np.int64) if table.users is None else _numbered(table.users)[1]
        tokens.write_cache(target, tokens.encode(table.texts, vocabulary, cfg.text.max_length), labels, users)
    ids, labels, users = tokens.read_cache(target)
    return Dataset(
        cfg.name,
        torch.from_numpy(ids),
        torch.from_numpy(labels),
        int(labels.max()) + 1,
        users if len(users) else None,
        vocab_size=tokens.size(vocabulary),
    )


def locate(name: str, directory: str | None) -> Path:
    """The file (or LEAF folder) of a data set."""
    if name.startswith(PREFIX):
        path = expanded(name.removeprefix(PREFIX))
        if not os.path.exists(path):
            raise DataError(f"data.name = '{name}', but {path} does not exist: paths are relative to the current directory")
        plugins.check_file(path, "data.name")
        return path
    root = directory or os.environ.get("FEDET_DATA")
    if not root:
        raise DataError(f"no data folder is given for {name}: set FEDET_DATA or --data-dir to a folder that contains text/")
    folder = expanded(root) / "text"
    found = next((folder / file for file in FILES[name] if os.path.exists(folder / file)), None)
    if found is None:
        raise DataError(
            f"{folder} contains no {' or '.join(FILES[name])}: add it, or use your own file with data.name = 'text:PATH'"
        )
    return found


def read(path: Path, cfg: TextConfig, need_users: bool) -> Table:
    """All rows of a file, in any supported format."""
    if path.is_dir() or path.suffix == ".json":
        return _checked(_leaf(path), path)
    if path.suffix == ".parquet":
        names, columns = _parquet(path, {cfg.text, cfg.label, cfg.user, *([cfg.only] if cfg.only else [])})
    elif path.suffix in (".csv", ".tsv"):
        names, columns = _csv(path)
    else:
        raise DataError(f"{path} is not a supported text file: use .csv, .tsv, .parquet, or LEAF's .json")
    return _checked(_select_columns(path, names, columns, cfg, need_users), path)


def _checked(table: Table, path: Path) -> Table:
    """The table, if its texts are texts."""
    odd = next((text for text in table.texts if not isinstance(text, str | None)), None)
    if odd is not None:
        raise DataError(f"{path} has {type(odd).__name__} {str(odd)[:60]!r} where a text should be: is data.text.text right?")
    return table


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.json"))
    for file in files:  # a link may lead out of a folder that may not be left
        plugins.check_file(file, "data.name")
    return files


def _numbered(values: Sequence[str]) -> tuple[list[str], Ints]:
    """The different values, sorted, and the number of each one among them.

    NumPy would give every value the room of the longest one, so that one of a megabyte takes gigabytes.
    """
    different = sorted(set(values))
    numbers = {value: number for number, value in enumerate(different)}
    return different, np.array([numbers[value] for value in values], dtype=np.int64)


def _select_columns(
    path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]], cfg: TextConfig, need_users: bool
) -> Table:
    """The configured columns, restricted to the rows that the column `only` marks."""
    by_name = dict(zip(names, columns, strict=True))
    optional = [cfg.user] if not need_users else []
    for key, column in (("text", cfg.text), ("label", cfg.label), ("user", cfg.user), ("only", cfg.only)):
        if column is not None and column not in by_name and column not in optional:
            raise DataError(f"{path} has no column '{column}' (data.text.{key}); it has: {', '.join(names)}")
    rows = (
        range(len(by_name[cfg.text])) if cfg.only is None else [i for i, mark in enumerate(by_name[cfg.only]) if _is_true(mark)]
    )
    texts, labels, users = (
        [by_name[name][i] for i in rows] if name in by_name else None for name in (cfg.text, cfg.label, cfg.user)
    )
    assert texts is not None
    assert labels is not None
    return Table(texts, labels, None if users is None else [str(user) for user in users])


def _is_true(mark: Any) -> bool:
    return str(mark).strip().lower() in ("true", "1", "yes")


def _parquet(path: Path, wanted: set[str]) -> tuple[list[str], list[list[Any]]]:
    """The names of all columns, and the content of those that are wanted; the others stay empty."""
    try:
        names = list(extra("pyarrow.parquet").read_schema(path).names)
        table = read_parquet(path, [name for name in names if name in wanted])
        return names, [table.column(name).to_pylist() if name in wanted else [] for name in names]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None


def _csv(path: Path) -> tuple[list[str], list[list[Any]]]:
    """A CSV file with a header, or Sent140's, which has none."""
    try:
        try:
            rows = _csv_rows(path, "utf-8-sig")
        except UnicodeDecodeError:
            rows = _csv_rows(path, "latin-1")  # the encoding of Sent140
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} is not a readable CSV file: {error}") from None
    if not rows:
        raise DataError(f"{path} is empty")
    is_sent140 = len(rows[0]) == len(_SENT140_COLUMNS) and rows[0][0] in ("0", "2", "4") and rows[0][1].isdigit()
    names, rows = (list(_SENT140_COLUMNS), rows) if is_sent140 else (rows[0], rows[1:])
    bad = next((number for number, row in enumerate(rows) if len(row) != len(names)), None)
    if bad is not None:
        raise DataError(f"{path}: row {bad + 1} has {len(rows[bad])} fields, the others have {len(names)}: is a quote missing?")
    return names, [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]


def _csv_rows(path: Path, encoding: str) -> list[list[str]]:
    """The rows that are not empty."""
    csv.field_size_limit(1 << 30)
    comma = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding=encoding, newline="") as file:
        return [row for row in csv.reader(_counted_lines(file, comma, path), delimiter=comma) if row]


def _counted_lines(file: TextIO, comma: str, path: Path) -> Iterator[str]:
    """The lines of a table until their fields take too much memory; a field of one character takes 60 bytes."""
    size, most = 0, memory_limit()
    while line := file.readline(most // 8 + 1):
        size += len(line) + _FIELD_BYTES * (line.count(comma) + 2)
        if size > most or len(line) > most // 8:
            raise too_large(path)
        yield line


def _leaf(path: Path) -> Table:
    """LEAF's JSON: for each user lists x (the tweet's fields, the text being the fifth) and y."""
    texts, labels, users = [], [], []
    files, kept, most = _files(path), 0, memory_limit()
    if not files:
        raise DataError(f"{path} contains no .json files in LEAF's format")
    for file in files:
        try:
            if kept + os.path.getsize(file) > most or kept + _parsed_size(content := file.read_bytes()) > most:
                raise too_large(path)
            data = json.loads(content.decode("utf-8"))["user_data"]
            for user, own in data.items():
                texts += [x if isinstance(x, str) else x[4] for x in own["x"]]
                labels += list(own["y"])
                users += [user] * len(own["y"])
            kept += len(content)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise DataError(f"{file} is not in LEAF's format (user_data, x, y): {type(error).__name__}: {error}") from None
    if len(texts) != len(labels):
        raise DataError(f"{path} has {len(texts)} texts but {len(labels)} labels")
    return Table(texts, labels, users)


def _parsed_size(content: bytes) -> int:
    """About the most that a JSON file takes once it is parsed: two of its characters can become an object of 64 bytes."""
    fields = content.count(b",") + content.count(b'"') // 2
    return 3 * len(content) + _FIELD_BYTES * fields + _CONTAINER_BYTES * (content.count(b"[") // 3 + content.count(b"{"))


def _drop_rare_users(table: Table, least: int, path: Path) -> Table:
    """Drop users with fewer than `least` texts."""
    if not table.texts:
        raise DataError(f"{path} has no texts left: is data.text.only too strict?")
    if table.users is None or least <= 1:
        return table
    owner = _numbered(table.users)[1]
    counts = np.bincount(owner)
    rows = np.flatnonzero(counts[owner] >= least)
    if not len(rows):
        raise DataError(f"no user in {path} has {least} texts, the maximum is {counts.max()}: lower data.min_samples")
    return Table(*([column[i] for i in rows] for column in (table.texts, table.labels, table.users)))


def _encode_labels(labels: Sequence[Any], path: Path) -> npt.NDArray[np.int64]:
    """Number the sorted labels from 0: 0 and 4 become 0 and 1, words are sorted alphabetically."""
    if any(label is None or label == "" or isinstance(label, float) for label in labels):
        raise DataError(f"{path}: every text must have a label, and labels must be integers or words")
    try:
        values = np.array([int(label) for label in labels], dtype=np.int64)
        different, numbers = np.unique(values, return_inverse=True)
        classes, numbers = len(different), numbers.reshape(-1)
    except (TypeError, ValueError, OverflowError):
        words, numbers = _numbered([str(label) for label in labels])
        classes = len(words)
    if not 2 <= classes <= _MAX_CLASSES:
        raise DataError(
            f"{path} has {classes} different labels, but there must be 2 to {_MAX_CLASSES}: is data.text.label right?"
        )
    return numbers.astype(np.int64)
