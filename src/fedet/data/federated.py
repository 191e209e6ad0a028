"""A federation's data: the clients' examples, the server's public inputs, and the test set, all determined by the seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedet.config import plugins
from fedet.core import seed_of
from fedet.data import partition, source, text, vision
from fedet.data.public import Public
from fedet.data.scaling import Scaling, fit
from fedet.data.source import Dataset, Examples, load_dataset
from fedet.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedet.config import DataConfig

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FederatedData:
    """One data set, split into the clients' examples, the server's public inputs, test and validation."""

    dataset: Dataset
    parts: partition.Parts
    test: Examples
    val: Examples | None = None
    public: Public | None = None
    scaling: Scaling | None = None
    """How the inputs were standardised, if they were."""

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

    @property
    def pooled(self) -> Examples:
        """The private examples of all clients together."""
        return Examples(self.dataset, torch.from_numpy(self.parts.rows))

    @property
    def majority(self) -> float | None:
        """The share of the largest class in the test part: the accuracy of always predicting it."""
        return float(torch.bincount(self.test.labels).max()) / len(self.test) if len(self.test) else None

    def label_counts(self) -> Ints:
        """How many examples of each class (column) each client (row) has."""
        clients = len(self.parts.offsets) - 1
        owner = np.repeat(np.arange(clients), self.sizes)
        cell = owner * self.num_classes + self.dataset.labels.numpy()[self.parts.rows]
        return np.bincount(cell, minlength=clients * self.num_classes).reshape(clients, self.num_classes)

    def split_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Which rows went where, and how inputs were standardised, for the run folder; `public` is rows of its own source."""
        none = np.empty(0, dtype=np.int64)
        return {
            "client_rows": self.parts.rows,
            "client_offsets": self.parts.offsets,
            "public": none if self.public is None else self.public.rows.numpy(),
            "test": self.test.rows.numpy(),
            "val": none if self.val is None else self.val.rows.numpy(),
            "label_counts": self.label_counts(),
            "sizes": self.sizes,
            **({"mean": self.scaling.mean.numpy(), "std": self.scaling.std.numpy()} if self.scaling else {}),
        }


def load(cfg: DataConfig, seed: int, cache: Path) -> FederatedData:
    """Read, split and partition the data; the same configuration and seed always give the same federation."""
    dataset = text.load(cfg, cache) if text.known(cfg.name) else load_dataset(cfg.name, cfg.dir, cache, _own_options(cfg))
    labels = dataset.labels.numpy()
    train, public, test = _split(dataset, cfg, np.random.default_rng(seed_of(seed, "split")))
    val = np.empty(0, dtype=np.int64)
    if cfg.val_fraction and cfg.partition == "natural" and dataset.users is not None:
        rng = np.random.default_rng(seed_of(seed, "validation"))
        val, train = partition.by_user(dataset.users, train, [cfg.val_fraction], rng)
    elif cfg.val_fraction:
        order = partition.stratified(labels, train, np.random.default_rng(seed_of(seed, "validation")))
        count = max(1, round(cfg.val_fraction * len(train)))
        val, train = order[:count], order[count:]
    parts = _partition(cfg, labels[train], dataset.users, train, np.random.default_rng(seed_of(seed, "partition")))
    scaling = fit(dataset, torch.from_numpy(train)) if cfg.standardise else None
    server_inputs = _public(cfg, dataset, public, seed, cache, scaling)
    if scaling:
        dataset = replace(dataset, inputs=scaling(dataset.inputs))
    return FederatedData(
        dataset,
        parts,
        Examples(dataset, torch.from_numpy(test)),
        Examples(dataset, torch.from_numpy(val)) if len(val) else None,
        server_inputs,
        scaling,
    )


def _own_options(cfg: DataConfig) -> Mapping[str, Any]:
    """The options of the data set: all but those that only the generator of public inputs accepts."""
    if not cfg.options or ":" not in cfg.public or cfg.public.startswith(("folder:", "text:")):
        return cfg.options
    taken = source.accepted(plugins.resolve(cfg.public, "generator of public inputs"), cfg.options)
    own = source.accepted(plugins.resolve(cfg.name, "data set"), cfg.options) if ":" in cfg.name else {}
    return {key: value for key, value in cfg.options.items() if key in own or key not in taken}


def _split(dataset: Dataset, cfg: DataConfig, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Train, public and test rows in exact proportion, stratified by class."""
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
    """The same split by users: all examples of a user are in one part, and users with fewer than `min_samples` are left out."""
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
    """Where the training and the public part end, as fractions of the whole."""
    shares = np.array(cfg.split, dtype=np.float64)
    return np.asarray(np.cumsum(shares / shares.sum())[:2])


def _partition(cfg: DataConfig, labels: Ints, users: Ints | None, rows: Ints, rng: np.random.Generator) -> partition.Parts:
    if cfg.partition == "dirichlet":
        parts = partition.dirichlet(labels, int(cfg.clients), cfg.alpha, rng, cfg.min_size)
    elif cfg.partition == "equal":
        parts = partition.equal(labels, int(cfg.clients), cfg.alpha, rng)
    elif cfg.partition == "iid":
        parts = partition.iid(len(labels), int(cfg.clients), rng)
    elif users is None:
        raise ConfigError(f"data.partition = 'natural' needs users and {cfg.name} has none: use 'dirichlet' or 'iid'")
    else:
        parts = partition.natural(users[rows], cfg.clients)
    return partition.Parts(rows[parts.rows], parts.offsets)


def _public(
    cfg: DataConfig, dataset: Dataset, rows: Ints, seed: int, cache: Path, scaling: Scaling | None = None
) -> Public | None:
    """The configured public inputs, at most `public_size` of them."""
    rng = np.random.default_rng(seed_of(seed, "public"))
    labels = None
    if cfg.public == "none" or (cfg.public == "split" and not len(rows)):
        return None
    if cfg.public == "split":
        pool, rows = dataset.inputs, _sample(rows, cfg.public_size, rng)
        labels = dataset.labels[torch.from_numpy(rows)]
    elif cfg.public.startswith("folder:"):
        files = vision.image_files(cfg.public.removeprefix("folder:"))
        rows = _sample(np.arange(len(files)), cfg.public_size, rng)
        pool = torch.from_numpy(vision.read_images([files[row] for row in rows], dataset.input_shape))
        rows = np.arange(len(pool))
    else:
        pool, all_labels = _external(cfg, dataset, len(rows), seed, cache)
        rows = _sample(np.arange(len(pool)), cfg.public_size, rng)
        labels = None if all_labels is None else all_labels[torch.from_numpy(rows)]
    pool = source.convert(pool, dataset.input_shape, dataset.inputs.dtype, cfg.public)
    pool = scaling(pool) if scaling else pool
    return Public(pool, torch.from_numpy(rows), cfg.augment, seed_of(seed, "public"), cfg.public_view, labels)


def _external(cfg: DataConfig, dataset: Dataset, n: int, seed: int, cache: Path) -> tuple[Tensor, Tensor | None]:
    """Inputs from another source; labels only from a user's function, as another data set's classes are not ours."""
    if text.known(cfg.public):
        changes = {"name": cfg.public, "partition": "iid", "min_samples": 1, "text": cfg.text.model_copy(update={"only": None})}
        return text.load(cfg.model_copy(update=changes), cache).inputs, None
    if ":" not in cfg.public:
        return load_dataset(cfg.public, cfg.dir, cache).inputs, None
    values = {"n": cfg.public_size or n, "seed": seed_of(seed, "generator"), "input_shape": dataset.input_shape}
    return source.generate(cfg.public, {**values, "num_classes": dataset.num_classes, **cfg.options})


def _sample(rows: Ints, limit: int | None, rng: np.random.Generator) -> Ints:
    return rows if limit is None or limit >= len(rows) else np.sort(rng.permutation(rows)[:limit])


def load_public(cfg: DataConfig, dataset: Dataset, seed: int, cache: Path) -> Public | None:
    """The public inputs for a client with its own data; None if they are split from the server's data."""
    return _public(cfg, dataset, np.empty(0, dtype=np.int64), seed, cache)
