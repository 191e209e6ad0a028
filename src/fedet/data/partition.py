"""Partition examples among clients: all clients' rows in one array, and the offset of each client's first (CSR)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedet.errors import ConfigError

Ints = npt.NDArray[np.int64]

_HOPELESS = 50
"""A draw that leaves this many clients too small is not repeated: the chance of a better one is below 1e-10."""


class Parts(NamedTuple):
    """Client k holds `rows[offsets[k]:offsets[k + 1]]`."""

    rows: Ints
    offsets: Ints


def dirichlet(labels: Ints, clients: int, alpha: float, rng: np.random.Generator, min_size: int = 1) -> Parts:
    """Split each class among the clients by proportions drawn from Dir(alpha, ..., alpha).

    Repeated until every client has `min_size` examples. With a `min_size` of 0 or 1 clients may stay empty after 100 draws,
    or at once if there are too few examples; with more, 1,000 failed draws are an error.
    """
    classes, counts = np.unique(labels, return_counts=True)
    _check_size(len(labels), clients, min_size)
    for _ in range(100 if min_size <= 1 else 1000):
        sizes = _class_sizes(counts, clients, alpha, rng)
        small = int((sizes.sum(axis=0) < min_size).sum())
        if small == 0 or small >= _HOPELESS or (min_size <= 1 and clients > len(labels)):
            break
    if small and min_size > 1:
        raise ConfigError(
            f"no draw of Dir({alpha:g}) gave each of {clients} clients at least {min_size} examples: "
            "lower data.min_size or data.clients, or raise data.alpha"
        )
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner = np.repeat(np.tile(np.arange(clients), len(classes)), sizes.ravel())
    return _grouped(by_class, owner, clients)


def equal(labels: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Equal sizes (to within one), each client with class proportions from Dir(alpha) as long as the classes last."""
    classes, counts = np.unique(labels, return_counts=True)
    sizes = np.diff(_even_offsets(len(labels), clients))
    mixes = _shares(len(classes), alpha, clients, rng)
    left, taken = counts.astype(np.int64), np.zeros((clients, len(classes)), dtype=np.int64)
    for k in range(clients):
        while missing := sizes[k] - taken[k].sum():
            chances = (mixes[k] + 1e-12) * (left > 0)  # when its own classes are used up, a client gets any other
            more = np.minimum(rng.multinomial(missing, chances / chances.sum()), left)
            taken[k] += more
            left -= more
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return _grouped(by_class, np.repeat(np.tile(np.arange(clients), len(classes)), taken.T.ravel()), clients)


def iid(n: int, clients: int, rng: np.random.Generator) -> Parts:
    """Split n examples at random into equal sizes (to within one)."""
    return Parts(rng.permutation(n).astype(np.int64), _even_offsets(n, clients))


def natural(users: Ints, clients: int | Literal["all"]) -> Parts:
    """One client per user, in the order of their ids; if there are more users than clients, those with the most examples."""
    ids, owner, counts = np.unique(users, return_inverse=True, return_counts=True)
    clients = len(ids) if clients == "all" else clients
    if len(ids) < clients:
        raise ConfigError(
            f"data.clients = {clients}, but the training part has {len(ids)} users: set data.clients = {len(ids)}"
        )
    kept = np.sort(np.argsort(-counts, kind="stable")[:clients])
    position = np.full(len(ids), -1, dtype=np.int64)
    position[kept] = np.arange(clients)
    owner = position[owner.reshape(-1)]
    rows = np.flatnonzero(owner >= 0)
    return _grouped(rows, owner[rows], clients)


def by_user(users: Ints, rows: Ints, cuts: Sequence[float], rng: np.random.Generator) -> list[Ints]:
    """Split these rows by user, in random order, at these fractions of the number of users."""
    ids, owner = np.unique(users[rows], return_inverse=True)
    position = rng.permutation(len(ids))[owner.reshape(-1)]
    ends = [0, *(int(np.floor(cut * len(ids) + 0.5)) for cut in cuts), len(ids)]
    return [rows[(position >= first) & (position < last)] for first, last in pairwise(ends)]


def stratified(labels: Ints, rows: Ints, rng: np.random.Generator) -> Ints:
    """Shuffle rows so that every prefix has each class in proportion, to within an example or two."""
    shuffled = rng.permutation(rows)
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.unique(labels[order], return_counts=True)[1]
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    quantile = (np.arange(len(order)) - starts + 0.5) / np.repeat(counts, counts)
    return order[np.lexsort((rng.random(len(order)), quantile))]


def _class_sizes(counts: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    shares = _shares(clients, alpha, len(counts), rng)
    cuts = np.minimum(np.floor(np.cumsum(shares, axis=1) * counts[:, None]).astype(np.int64), counts[:, None])
    cuts[:, -1] = counts
    return np.diff(cuts, axis=1, prepend=0)


def _shares(parts: int, alpha: float, draws: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    shares = rng.dirichlet(np.full(parts, alpha), size=draws)
    if not np.isfinite(shares).all():
        raise ConfigError(f"data.alpha = {alpha:g} is too small to draw from: use 0.001 or more")
    return shares


def _check_size(n: int, clients: int, min_size: int) -> None:
    if min_size > 1 and clients * min_size > n:
        raise ConfigError(
            f"{clients} clients with at least {min_size} examples each need {clients * min_size}, the training part has {n}: "
            "lower data.min_size or data.clients"
        )


def _grouped(rows: Ints, owner: Ints, clients: int) -> Parts:
    sizes = np.bincount(owner, minlength=clients)
    return Parts(rows[np.argsort(owner, kind="stable")].astype(np.int64), _offsets(sizes))


def _even_offsets(n: int, clients: int) -> Ints:
    sizes = np.full(clients, n // clients, dtype=np.int64)
    sizes[: n % clients] += 1
    return _offsets(sizes)


def _offsets(sizes: npt.NDArray[np.integer]) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
