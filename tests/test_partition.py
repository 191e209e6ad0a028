"""Every training row goes to exactly one client, from the seed, with the sizes that Dir(alpha) implies."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedet.data import partition
from fedet.errors import ConfigError

CIFAR = np.repeat(np.arange(10), 4200)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sizes(parts: partition.Parts) -> np.ndarray:
    return np.diff(parts.offsets)


def assert_covers(parts: partition.Parts, n: int, clients: int) -> None:
    assert parts.offsets[0] == 0
    assert parts.offsets[-1] == n
    assert len(parts.offsets) == clients + 1
    assert (sizes(parts) >= 0).all()
    assert np.array_equal(np.sort(parts.rows), np.arange(n))


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    clients=st.integers(1, 30),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**63),
    min_size=st.integers(0, 1),
)
def test_dirichlet_deals_every_row_once(labels: list[int], clients: int, alpha: float, seed: int, min_size: int) -> None:
    parts = partition.dirichlet(np.array(labels), clients, alpha, rng(seed), min_size)
    assert_covers(parts, len(labels), clients)


@given(n=st.integers(0, 200), clients=st.integers(1, 50), seed=st.integers(0, 2**63))
def test_iid_deals_every_row_once_in_equal_shares(n: int, clients: int, seed: int) -> None:
    parts = partition.iid(n, clients, rng(seed))
    assert_covers(parts, n, clients)
    assert np.ptp(sizes(parts)) <= 1


@given(users=st.lists(st.integers(-5, 9), min_size=1, max_size=60))
def test_natural_gives_each_user_their_own_rows(users: list[int]) -> None:
    ids = np.array(users)
    parts = partition.natural(ids, len(set(users)))
    assert_covers(parts, len(users), len(set(users)))
    for k, user in enumerate(sorted(set(users))):
        mine = parts.rows[parts.offsets[k] : parts.offsets[k + 1]]
        assert (ids[mine] == user).all()


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=100), seed=st.integers(0, 2**63))
def test_every_prefix_of_a_stratified_order_is_in_proportion(labels: list[int], seed: int) -> None:
    y = np.array(labels)
    order = partition.stratified(y, np.arange(len(y)), rng(seed))
    assert np.array_equal(np.sort(order), np.arange(len(y)))
    for c in set(labels):
        share = (y == c).mean()
        off = np.cumsum(y[order] == c) - share * np.arange(1, len(y) + 1)
        assert np.abs(off).max() <= 1 + share * len(set(labels)) / 2


def test_a_stratified_cut_of_even_classes_is_exact() -> None:
    order = partition.stratified(CIFAR, np.arange(42000), rng())
    assert (np.bincount(CIFAR[order[:4200]]) == 420).all()


@pytest.mark.parametrize("make", [
    lambda seed: partition.dirichlet(CIFAR, 100, 0.1, rng(seed)),
    lambda seed: partition.iid(42000, 100, rng(seed)),
])  # fmt: skip
def test_the_seed_decides(make: object) -> None:
    first, again, other = (make(seed) for seed in (1, 1, 2))  # type: ignore[operator]
    assert np.array_equal(first.rows, again.rows)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.rows, other.rows)


@pytest.mark.parametrize(
    ("alpha", "empty", "below_64", "median", "largest", "classes"),
    [(0.1, 0.11, 13.3, 301, 2028, 4.9), (0.5, 0.0, 0.14, 392, 1027, 9.2)],
)
def test_sizes_are_those_of_dirichlet(
    alpha: float, empty: float, below_64: float, median: float, largest: float, classes: float
) -> None:
    found = []
    for seed in range(60):
        parts = partition.dirichlet(CIFAR, 100, alpha, rng(seed), min_size=0)
        n = sizes(parts)
        owner = np.repeat(np.arange(100), n)
        held = np.unique(owner * 10 + CIFAR[parts.rows]).size / 100
        found.append([(n == 0).sum(), (n < 64).sum(), np.median(n), n.max(), held])
    mean = np.mean(found, axis=0)
    assert mean[0] == pytest.approx(empty, abs=0.2)
    assert mean[1] == pytest.approx(below_64, rel=0.15, abs=0.3)
    assert mean[2] == pytest.approx(median, rel=0.05)
    assert mean[3] == pytest.approx(largest, rel=0.08)
    assert mean[4] == pytest.approx(classes, rel=0.05)


def test_a_wish_for_one_example_is_met_by_drawing_again() -> None:
    seed = next(s for s in range(500) if (sizes(partition.dirichlet(CIFAR, 100, 0.1, rng(s), 0)) == 0).any())
    assert (sizes(partition.dirichlet(CIFAR, 100, 0.1, rng(seed), 1)) > 0).all()


def test_a_condition_on_the_size_is_met() -> None:
    assert (sizes(partition.dirichlet(CIFAR, 100, 0.1, rng(), 10)) >= 10).all()


@pytest.mark.parametrize("min_size", [100, 421])
def test_an_impossible_size_is_an_error_with_advice(min_size: int) -> None:
    with pytest.raises(ConfigError, match=r"lower data\.min_size or data\.clients"):
        partition.dirichlet(CIFAR, 100, 0.1, rng(), min_size)


def test_fewer_examples_than_clients_leaves_clients_empty() -> None:
    parts = partition.dirichlet(np.arange(5), 20, 0.5, rng())
    assert_covers(parts, 5, 20)
    assert (sizes(parts) == 0).sum() >= 15


def test_a_tiny_alpha_gives_each_class_to_one_client() -> None:
    parts = partition.dirichlet(CIFAR, 100, 1e-4, rng(), 0)
    assert_covers(parts, 42000, 100)
    assert (sizes(parts) > 0).sum() <= 12


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    clients=st.integers(1, 30),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**63),
)
def test_equal_covers_in_shares_that_differ_by_one_at_most(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    parts = partition.equal(np.array(labels), clients, alpha, rng(seed))
    assert_covers(parts, len(labels), clients)
    assert np.ptp(sizes(parts)) <= 1


@pytest.mark.parametrize(("alpha", "low", "high"), [(0.1, 0.5, 0.9), (1000.0, 0.1, 0.15)])
def test_equal_shares_mix_classes_as_alpha_says(alpha: float, low: float, high: float) -> None:
    parts = partition.equal(CIFAR, 100, alpha, rng())
    assert (sizes(parts) == 420).all()
    largest = [np.bincount(CIFAR[parts.rows[i : i + 420]]).max() / 420 for i in parts.offsets[:-1]]
    assert low < np.mean(largest) < high


def test_natural_keeps_the_users_with_most_examples() -> None:
    users = np.array([7, 3, 3, 9, 9, 9, 1])
    parts = partition.natural(users, 2)
    assert parts.rows.tolist() == [1, 2, 3, 4, 5]
    assert parts.offsets.tolist() == [0, 2, 5]
    with pytest.raises(ConfigError, match=r"set data\.clients = 4"):
        partition.natural(users, 5)


@pytest.mark.parametrize("n", [42_000, 300_000])
def test_a_hundred_thousand_clients_are_cheap(n: int) -> None:
    labels = rng().integers(0, 10, n)
    start = time.process_time()
    parts = partition.dirichlet(labels, 100_000, 0.5, rng())
    assert time.process_time() - start < 3
    assert_covers(parts, n, 100_000)
