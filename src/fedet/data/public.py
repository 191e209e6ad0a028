"""The server's public inputs: views of them drawn from the seed and the round, whole or as far as they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedet.core import Allocator, generator
from fedet.data import source
from fedet.data.augment import Draws, draw, transform

if TYPE_CHECKING:
    from fedet.config import AugmentConfig

_CHUNK = 1024
"""Public images whose random numbers are drawn at a time; part of what a seed means, as each chunk draws in turn."""
_PIECE = 2048
"""Public images transformed at a time."""


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
class Subset(Inputs):
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
        self._some: tuple[int, Tensor, Subset] | None = None

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

    def subset(self, round: int, rows: Tensor, allocate: Allocator = torch.empty) -> Inputs:
        """The view of the round as far as these rows, ascending, go: the same numbers, and the others are not made."""
        if self._mode == "fixed":
            return self.view(round)  # made once, all of it
        if self._some is None or self._some[0] != round or not torch.equal(self._some[1], rows):
            place = torch.full((len(self),), -1).index_put((rows,), torch.arange(len(rows)))
            self._some = (round, rows, Subset(self._drawn(round, rows, allocate), place))
        return self._some[2]

    def _drawn(self, number: int, wanted: Tensor, allocate: Allocator = torch.empty) -> Tensor:
        """These rows of a view. Random numbers are drawn for all, so that a row's do not depend on who else is wanted."""
        if self._pool.dtype != torch.uint8 or self._pool.ndim != 4:
            return source.ready(self._pool.index_select(0, self.rows[wanted]))
        random = generator(self._seed, "view", number)
        sizes = [min(_CHUNK, len(self) - start) for start in range(0, len(self), _CHUNK)]
        draws = Draws.joined([draw(n, self._augment, random) for n in sizes])
        view = allocate((len(wanted), *self._pool.shape[1:]))
        for piece, rows in zip(view.split(_PIECE), wanted.split(_PIECE), strict=True):  # type: ignore[no-untyped-call]
            transform(self._pool.index_select(0, self.rows[rows]), self._augment, draws.of(rows), out=piece)
        return view
