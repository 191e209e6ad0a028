"""Texts with labels and users: Sent140, film critics, or anyone's CSV, parquet or LEAF file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedet.config.sources import expanded
from fedet.data import tokens
from fedet.data.decode import extra
from fedet.data.source import Dataset
from fedet.errors import DataError

if TYPE_CHECKING:
    from fedet.config import DataConfig, TextConfig

PREFIX = "text:"
"""`text:PATH` is a file of anyone's."""
FILES = {
    "sent140": ("training.1600000.processed.noemoticon.csv", "sent140", "sent140_pool.parquet"),
    "rt-critics": ("rt_critics.parquet",),
}
"""What each data set may be called inside the folder `text`, the first that is there counts."""
_OFFICIAL = ("label", "id", "date", "query", "user", "text")
"""Sent140's CSV has no header."""
_MOST_CLASSES = 1000


class Table(NamedTuple):
    """What a file says, row by row; users may be left out."""

    texts: list[str]
    labels: list[Any]
    users: list[Any] | None


def known(name: str) -> bool:
    """Whether this names texts."""
    return name in FILES or name.startswith(PREFIX)


def load(cfg: DataConfig, cache: Path) -> Dataset:
    """Read, leave out users with few texts, turn words into ids; the last is done once and kept in the cache."""
    path = locate(cfg.name, cfg.dir)
    vocabulary = tokens.vocabulary(cfg.text.vocab, cfg.dir)
    wanted = (cfg.text.model_dump(exclude={"vocab"}), cfg.min_samples, cfg.partition == "natural")
    target = expanded(cache) / f"{path.stem}-{tokens.fingerprint([*_files(path), vocabulary], wanted)}"
    if not target.is_dir():
        table = _often(read(path, cfg.text, cfg.partition == "natural"), cfg.min_samples, path)
        labels = _numbered(table.labels, path)
        users = np.empty(0, np.int64) if table.users is None else np.unique(table.users, return_inverse=True)[1].reshape(-1)
        tokens.keep(target, tokens.encode(table.texts, vocabulary, cfg.text.max_length), labels, users.astype(np.int64))
    ids, labels, users = tokens.kept(target)
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
        if not path.exists():
            raise DataError(f"data.name = '{name}', but {path} is not there: give its path from the folder you are in")
        return path
    root = directory or os.environ.get("FEDET_DATA")
    if not root:
        raise DataError(f"{name} is read from a folder and none is given: set FEDET_DATA or --data-dir to one that holds text/")
    folder = expanded(root) / "text"
    found = next((folder / file for file in FILES[name] if (folder / file).exists()), None)
    if found is None:
        raise DataError(
            f"{folder} holds none of {', '.join(FILES[name])}: put one there, or name yours with data.name = 'text:PATH'"
        )
    return found


def read(path: Path, cfg: TextConfig, need_users: bool) -> Table:
    """All rows of a file, by its kind."""
    if path.is_dir() or path.suffix == ".json":
        return _leaf(path)
    if path.suffix == ".parquet":
        names, columns = _parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        names, columns = _csv(path)
    else:
        raise DataError(f"{path}: texts are read from .csv, .tsv, .parquet, or LEAF's .json")
    return _chosen(path, names, columns, cfg, need_users)


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.json")) if path.is_dir() else [path]


def _chosen(path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]], cfg: TextConfig, need_users: bool) -> Table:
    """The columns that the configuration names, and of their rows those that `only` marks."""
    by_name = dict(zip(names, columns, strict=True))
    optional = [cfg.user] if not need_users else []
    for key, column in (("text", cfg.text), ("label", cfg.label), ("user", cfg.user), ("only", cfg.only)):
        if column is not None and column not in by_name and column not in optional:
            raise DataError(f"{path} has no column '{column}' (data.text.{key}); it has: {', '.join(names)}")
    rows = range(len(columns[0])) if cfg.only is None else [i for i, mark in enumerate(by_name[cfg.only]) if _true(mark)]
    texts, labels, users = (
        [by_name[name][i] for i in rows] if name in by_name else None for name in (cfg.text, cfg.label, cfg.user)
    )
    assert texts is not None
    assert labels is not None
    return Table(texts, labels, None if users is None else [str(user) for user in users])


def _true(mark: Any) -> bool:
    return str(mark).strip().lower() in ("true", "1", "yes")


def _parquet(path: Path) -> tuple[list[str], list[list[Any]]]:
    try:
        table = extra("pyarrow.parquet").read_table(path)
        return list(table.column_names), [table.column(name).to_pylist() for name in table.column_names]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from None


def _csv(path: Path) -> tuple[list[str], list[list[Any]]]:
    """A CSV with a header, or Sent140's own, which has none."""
    csv.field_size_limit(1 << 30)
    try:
        data = path.read_bytes()
        try:
            lines = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            lines = data.decode("latin-1")  # as Sent140's file is
        rows = list(csv.reader(lines.splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ","))
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file that can be read: {error}") from None
    rows = [row for row in rows if row]
    if not rows:
        raise DataError(f"{path} is empty")
    official = len(rows[0]) == len(_OFFICIAL) and rows[0][0] in ("0", "2", "4") and rows[0][1].isdigit()
    names, rows = (list(_OFFICIAL), rows) if official else (rows[0], rows[1:])
    odd = next((number for number, row in enumerate(rows) if len(row) != len(names)), None)
    if odd is not None:
        raise DataError(f"{path}: row {odd + 1} has {len(rows[odd])} fields, the others have {len(names)}: is a quote missing?")
    return names, [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]


def _leaf(path: Path) -> Table:
    """LEAF's JSON: for each user lists x (the tweet's fields, the text being the fifth) and y."""
    texts, labels, users = [], [], []
    files = _files(path)
    if not files:
        raise DataError(f"{path} is a folder without LEAF's .json files")
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))["user_data"]
            for user, own in data.items():
                texts += [x if isinstance(x, str) else x[4] for x in own["x"]]
                labels += list(own["y"])
                users += [user] * len(own["y"])
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(f"{file} is not in LEAF's layout (user_data, x, y): {type(error).__name__}: {error}") from None
    if len(texts) != len(labels):
        raise DataError(f"{path} has {len(texts)} texts but {len(labels)} labels")
    return Table(texts, labels, users)


def _often(table: Table, least: int, path: Path) -> Table:
    """Without the users who wrote fewer than this."""
    if not table.texts:
        raise DataError(f"{path} has no texts left: is data.text.only too strict?")
    if table.users is None or least <= 1:
        return table
    owner, counts = np.unique(table.users, return_inverse=True, return_counts=True)[1:]
    rows = np.flatnonzero(counts[owner.reshape(-1)] >= least)
    if not len(rows):
        raise DataError(f"nobody in {path} wrote {least} texts, the most is {counts.max()}: lower data.min_samples")
    return Table(*([column[i] for i in rows] for column in (table.texts, table.labels, table.users)))


def _numbered(labels: Sequence[Any], path: Path) -> npt.NDArray[np.int64]:
    """Labels counted from 0 in their order: 0 and 4 become 0 and 1, words go by the alphabet."""
    if any(label is None or label == "" or isinstance(label, float) for label in labels):
        raise DataError(f"{path}: labels are whole numbers or words, and every text has one")
    try:
        values = np.array([int(label) for label in labels], dtype=np.int64)
    except (TypeError, ValueError):
        values = np.array([str(label) for label in labels])
    kinds, numbers = np.unique(values, return_inverse=True)
    if not 2 <= len(kinds) <= _MOST_CLASSES:
        raise DataError(f"{path} has {len(kinds)} different labels: a task has 2 to {_MOST_CLASSES}; is data.text.label right?")
    return numbers.reshape(-1).astype(np.int64)
