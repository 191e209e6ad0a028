"""The statistics of a study: spread over seeds, paired differences with a confidence interval, late accuracy, convergence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PART = 5
"""The late accuracy and the test for convergence use the last of this many parts of a curve."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation; the deviation of a single value is not known."""

    mean: float
    std: float | None
    n: int


def spread(values: Sequence[float]) -> Spread | None:
    """The mean and deviation of values, None if there are none."""
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and the half width of its confidence interval, which a single pair does not have."""

    mean: float
    half_width: float | None
    n: int
    wins: int
    """In how many pairs the difference is above zero."""
    p: float | None = None
    """The two-sided p-value of Student's t test that the mean is zero, which a single pair does not have."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def paired(ours: Mapping[int, float], others: Mapping[int, float], level: float = 0.95) -> Difference | None:
    """`ours` minus `others` over the seeds that both have, with Student's t interval; None if they share no seed."""
    seeds = sorted(ours.keys() & others.keys())
    differences = [ours[seed] - others[seed] for seed in seeds]
    found, wins = spread(differences), sum(value > 0 for value in differences)
    if found is None:
        return None
    if found.std is None:
        return Difference(found.mean, None, 1, wins)
    half = t_quantile(0.5 + level / 2, found.n - 1) * found.std / math.sqrt(found.n)
    error = found.std / math.sqrt(found.n)
    sure = 1.0 if error == 0 and found.mean else 0.0 if error == 0 else t_probability(abs(found.mean) / error, found.n - 1)
    return Difference(found.mean, half, found.n, wins, 1 - sure)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: of several tests, the chance that any below 5 % is a false alarm is 5 % at most."""
    out, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        out[place] = largest
    return out


def t_probability(t: float, df: int) -> float:
    """The probability that |T| is at most t >= 0, for Student's t with a whole number of degrees of freedom.

    The finite sums for odd and even degrees: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd, df - 1, 2):  # 2 terms in the sum for df = 4 and df = 5
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(probability: float, df: int) -> float:
    """The t that Student's t with these degrees of freedom stays below with this probability, at least 0.5."""
    low, high = 0.0, 1.0
    while (1 + t_probability(high, df)) / 2 < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + t_probability(middle, df)) / 2 < probability else (low, middle)
    return (low + high) / 2


def late(curve: Sequence[float]) -> float | None:
    """The late accuracy: the mean of the last fifth of the evaluated rounds, of at least one; None without any."""
    return statistics.fmean(curve[-math.ceil(len(curve) / PART) :]) if curve else None


def converged(curve: Sequence[float]) -> bool | None:
    """Whether the last fifth rises by less than its deviation; None if there are fewer than six evaluated rounds.

    The rise is the mean of the last fifth minus the mean of the fifth before it; the deviation is the sample standard
    deviation within the last fifth.
    """
    size = math.ceil(len(curve) / PART)
    if size < 2:
        return None
    last, before = curve[-size:], curve[-2 * size : -size]
    return statistics.fmean(last) - statistics.fmean(before) <= statistics.stdev(last)
