"""Data of a federation: who holds what, the server's public inputs, and the test part; all of it from the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedet import plugins
from fedet.core import Room, generator, seed_of
from fedet.data import partition, source, text, vision
from fedet.data.augment import Draws, draw, transform
from fedet.data.source import Dataset, load_dataset
from fedet.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedet.config import AugmentConfig, DataConfig

__all__ = ["Dataset", "Examples", "FederatedData", "Inputs", "Public", "load", "load_dataset"]

Ints = npt.NDArray[np.int64]

_CHUNK = 1024
"""Public images whose random numbers are drawn at a time; part of what a seed means, as each chunk draws in turn."""
_PIECE = 2048
"""Public images transformed at a time."""


@dataclass(frozen=True)
class Examples:
    """Some rows of a data set with their labels: a client's, or the test part."""

    dataset: Dataset
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """The labels of all these examples."""
        return self.dataset.labels[self.rows]

    def inputs(self, index: Tensor) -> Tensor:
        """Model-ready inputs by their position among these examples."""
        return self.dataset.batch(self.rows[index])

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels by their position among these examples."""
        rows = self.rows[index]
        return self.dataset.batch(rows), self.dataset.labels[rows]


@dataclass(frozen=True)
class Inputs:
    """One view of the public inputs, transformed and model-ready."""

    data: Tensor

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, index: Tensor) -> Tensor:
        """These inputs by their position."""
        return self.data.index_select(0, index)


@dataclass(frozen=True)
class Some(Inputs):
    """Some of a view's inputs, to be had by their positions among all."""

    place: Tensor

    def __len__(self) -> int:
        return len(self.place)

    def inputs(self, index: Tensor) -> Tensor:
        """These inputs by their position among all; they must be among the some."""
        places = self.place[index]
        everything = len(places) == len(self.data) and torch.equal(places, torch.arange(len(places)))
        return self.data if everything else self.data.index_select(0, places)


class Public:
    """The server's unlabelled inputs. A view of them is a function of the seed and the round alone."""

    labels: Tensor | None
    """Only a method whose traits say labelled may read this."""

    def __init__(
        self,
        pool: Tensor,
        rows: Tensor,
        augment: AugmentConfig,
        seed: int,
        mode: Literal["fixed", "per_round"] = "fixed",
        labels: Tensor | None = None,
    ) -> None:
        self._pool, self.rows, self._augment, self._seed, self._mode = pool, rows, augment, seed, mode
        self.labels = labels
        self._latest: tuple[int, Inputs] | None = None
        self._some: tuple[int, Tensor, Some] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def without_labels(self) -> Public:
        """The same inputs for a method that must not see what they are."""
        return Public(self._pool, self.rows, self._augment, self._seed, self._mode)

    def view(self, round: int) -> Inputs:
        """All public inputs as this round sees them; the latest view is kept."""
        number = 0 if self._mode == "fixed" else round
        if self._latest is None or self._latest[0] != number:
            self._latest = (number, Inputs(self._drawn(number, torch.arange(len(self)))))
        return self._latest[1]

    def part(self, round: int, rows: Tensor, room: Room = torch.empty) -> Inputs:
        """The view of the round as far as these rows, ascending, go: the same numbers, and the others are not made."""
        if self._mode == "fixed":
            return self.view(round)  # made once, all of it
        if self._some is None or self._some[0] != round or not torch.equal(self._some[1], rows):
            place = torch.full((len(self),), -1).index_put((rows,), torch.arange(len(rows)))
            self._some = (round, rows, Some(self._drawn(round, rows, room), place))
        return self._some[2]

    def _drawn(self, number: int, wanted: Tensor, room: Room = torch.empty) -> Tensor:
        """These rows of a view. Random numbers are drawn for all, so that a row's do not depend on who else is wanted."""
        if self._pool.dtype != torch.uint8 or self._pool.ndim != 4:
            return source.ready(self._pool.index_select(0, self.rows[wanted]))
        random = generator(self._seed, "view", number)
        sizes = [min(_CHUNK, len(self) - start) for start in range(0, len(self), _CHUNK)]
        draws = Draws.joined([draw(n, self._augment, random) for n in sizes])
        view = room((len(wanted), *self._pool.shape[1:]))
        for piece, rows in zip(view.split(_PIECE), wanted.split(_PIECE), strict=True):  # type: ignore[no-untyped-call]
            transform(self._pool.index_select(0, self.rows[rows]), self._augment, draws.of(rows), out=piece)
        return view


@dataclass(frozen=True)
class FederatedData:
    """One data set dealt out: to clients, to the server as public inputs, and for test and validation."""

    dataset: Dataset
    parts: partition.Parts
    test: Examples
    val: Examples | None = None
    public: Public | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes of the task."""
        return self.dataset.num_classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.dataset.input_shape

    @property
    def sizes(self) -> Ints:
        """How many examples each client has."""
        return np.diff(self.parts.offsets)

    def client(self, k: int) -> Examples:
        """The private examples of client k."""
        if not 0 <= k < len(self.parts.offsets) - 1:
            raise IndexError(f"no client {k} among {len(self.parts.offsets) - 1}")
        rows = self.parts.rows[self.parts.offsets[k] : self.parts.offsets[k + 1]]
        return Examples(self.dataset, torch.from_numpy(rows))

    def label_counts(self) -> Ints:
        """How many examples of each class (column) each client (row) has."""
        clients = len(self.parts.offsets) - 1
        owner = np.repeat(np.arange(clients), self.sizes)
        cell = owner * self.num_classes + self.dataset.labels.numpy()[self.parts.rows]
        return np.bincount(cell, minlength=clients * self.num_classes).reshape(clients, self.num_classes)

    def split_arrays(self) -> dict[str, Ints]:
        """Who holds which rows, for the record; `public` counts in the rows of its own source."""
        none = np.empty(0, dtype=np.int64)
        return {
            "client_rows": self.parts.rows,
            "client_offsets": self.parts.offsets,
            "public": none if self.public is None else self.public.rows.numpy(),
            "test": self.test.rows.numpy(),
            "val": none if self.val is None else self.val.rows.numpy(),
            "label_counts": self.label_counts(),
            "sizes": self.sizes,
        }


def load(cfg: DataConfig, seed: int, cache: Path) -> FederatedData:
    """Read, split, partition; the same configuration and seed always give the same federation."""
    dataset = text.load(cfg, cache) if text.known(cfg.name) else load_dataset(cfg.name, cfg.dir, cache, _own_options(cfg))
    labels = dataset.labels.numpy()
    train, public, test = _split(dataset, cfg, np.random.default_rng(seed_of(seed, "split")))
    val = np.empty(0, dtype=np.int64)
    if cfg.val_fraction and cfg.partition == "natural" and dataset.users is not None:
        rng = np.random.default_rng(seed_of(seed, "validation"))
        val, train = partition.by_user(dataset.users, train, [cfg.val_fraction], rng)
    elif cfg.val_fraction:
        order = partition.stratified(labels, train, np.random.default_rng(seed_of(seed, "validation")))
        held = max(1, round(cfg.val_fraction * len(train)))
        val, train = order[:held], order[held:]
    parts = _deal(cfg, labels[train], dataset.users, train, np.random.default_rng(seed_of(seed, "partition")))
    return FederatedData(
        dataset,
        parts,
        Examples(dataset, torch.from_numpy(test)),
        Examples(dataset, torch.from_numpy(val)) if len(val) else None,
        _public(cfg, dataset, public, seed, cache),
    )


def _own_options(cfg: DataConfig) -> Mapping[str, Any]:
    """The options of the data set: all but those that only the generator of public inputs has parameters for."""
    if not cfg.options or ":" not in cfg.public or cfg.public.startswith(("folder:", "text:")):
        return cfg.options
    taken = source.named(plugins.resolve(cfg.public, "generator of public inputs"), cfg.options)
    own = source.named(plugins.resolve(cfg.name, "data set"), cfg.options) if ":" in cfg.name else {}
    return {key: value for key, value in cfg.options.items() if key in own or key not in taken}


def _split(dataset: Dataset, cfg: DataConfig, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Train, public and test rows with exact totals, each class in proportion."""
    rows = np.arange(len(dataset))
    if dataset.official_test is not None and not cfg.pool_official_test:
        rows = np.flatnonzero(~dataset.official_test)
    if cfg.partition == "natural" and dataset.users is not None:
        return _split_users(dataset, cfg, rows, rng)
    order = partition.stratified(dataset.labels.numpy(), rows, rng)
    first, second = (int(np.floor(cut * len(rows) + 0.5)) for cut in _cuts(cfg))
    train, public, test = order[:first], order[first:second], order[second:]
    if not len(train) or not len(test):
        raise DataError(f"{dataset.name} has {len(rows)} examples, too few to split {':'.join(f'{s:g}' for s in cfg.split)}")
    return train, public, test


def _split_users(dataset: Dataset, cfg: DataConfig, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """The same of users, those with fewer than `min_samples` left out: what one of them wrote is all in one part."""
    assert dataset.users is not None
    counts = np.bincount(dataset.users[rows])
    rows = rows[counts[dataset.users[rows]] >= cfg.min_samples]
    train, public, test = partition.by_user(dataset.users, rows, list(_cuts(cfg)), rng)
    if not len(train) or not len(test):
        users = len(np.unique(dataset.users[rows]))
        raise DataError(
            f"{dataset.name} has {users} users with data.min_samples = {cfg.min_samples} examples or more, too few to split "
            f"{':'.join(f'{s:g}' for s in cfg.split)}"
        )
    return train, public, test


def _cuts(cfg: DataConfig) -> npt.NDArray[np.float64]:
    """Where the training part ends, and the public part, as shares of the whole."""
    shares = np.array(cfg.split, dtype=np.float64)
    return np.asarray(np.cumsum(shares / shares.sum())[:2])


def _deal(cfg: DataConfig, labels: Ints, users: Ints | None, rows: Ints, rng: np.random.Generator) -> partition.Parts:
    if cfg.partition == "dirichlet":
        parts = partition.dirichlet(labels, int(cfg.clients), cfg.alpha, rng, cfg.min_size)
    elif cfg.partition == "equal":
        parts = partition.equal(labels, int(cfg.clients), cfg.alpha, rng)
    elif cfg.partition == "iid":
        parts = partition.iid(len(labels), int(cfg.clients), rng)
    elif users is None:
        raise ConfigError(f"data.partition = 'natural' needs users and {cfg.name} has none: take 'dirichlet' or 'iid'")
    else:
        parts = partition.natural(users[rows], cfg.clients)
    return partition.Parts(rows[parts.rows], parts.offsets)


def _public(cfg: DataConfig, dataset: Dataset, rows: Ints, seed: int, cache: Path) -> Public | None:
    """The public inputs from wherever the configuration says, at most `public_size` of them."""
    rng = np.random.default_rng(seed_of(seed, "public"))
    labels = None
    if cfg.public == "none" or (cfg.public == "split" and not len(rows)):
        return None
    if cfg.public == "split":
        pool, rows = dataset.inputs, _some(rows, cfg.public_size, rng)
        labels = dataset.labels[torch.from_numpy(rows)]
    elif cfg.public.startswith("folder:"):
        files = vision.pictures(cfg.public.removeprefix("folder:"))
        rows = _some(np.arange(len(files)), cfg.public_size, rng)
        pool = torch.from_numpy(vision.read_pictures([files[row] for row in rows], dataset.input_shape))
        rows = np.arange(len(pool))
    else:
        pool, known = _other(cfg, dataset, len(rows), seed, cache)
        rows = _some(np.arange(len(pool)), cfg.public_size, rng)
        labels = None if known is None else known[torch.from_numpy(rows)]
    pool = source.fit(pool, dataset.input_shape, dataset.inputs.dtype, cfg.public)
    return Public(pool, torch.from_numpy(rows), cfg.augment, seed_of(seed, "public"), cfg.public_view, labels)


def _other(cfg: DataConfig, dataset: Dataset, n: int, seed: int, cache: Path) -> tuple[Tensor, Tensor | None]:
    """Inputs from elsewhere; labels only from a user's own function, as those of another data set mean something else."""
    if text.known(cfg.public):
        alike = {"name": cfg.public, "partition": "iid", "min_samples": 1, "text": cfg.text.model_copy(update={"only": None})}
        return text.load(cfg.model_copy(update=alike), cache).inputs, None
    if ":" not in cfg.public:
        return load_dataset(cfg.public, cfg.dir, cache).inputs, None
    values = {"n": cfg.public_size or n, "seed": seed_of(seed, "generator"), "input_shape": dataset.input_shape}
    return source.generate(cfg.public, {**values, "num_classes": dataset.num_classes, **cfg.options})


def _some(rows: Ints, limit: int | None, rng: np.random.Generator) -> Ints:
    return rows if limit is None or limit >= len(rows) else np.sort(rng.permutation(rows)[:limit])


def load_public(cfg: DataConfig, dataset: Dataset, seed: int, cache: Path) -> Public | None:
    """The public inputs for a client with data of its own: None where they would be a part of the server's."""
    return _public(cfg, dataset, np.empty(0, dtype=np.int64), seed, cache)
