"""The server's public inputs: each round sees a view of them, transformed at random from the seed and the round alone."""

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
"""Public images whose random numbers are drawn together. Changing it changes what a seed gives."""
_PIECE = 2048
"""Public images transformed at a time."""


@dataclass(frozen=True)
class Inputs:
    """One view of the public inputs, transformed and model-ready."""

    data: Tensor

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, index: Tensor) -> Tensor:
        """Inputs at these positions."""
        return self.data.index_select(0, index)


@dataclass(frozen=True)
class Subset(Inputs):
    """Some of a view's inputs, still addressed by their positions in the whole view."""

    offsets: Tensor
    """Where each of the view's inputs is in `data`, or -1."""

    def __len__(self) -> int:
        return len(self.offsets)

    def inputs(self, index: Tensor) -> Tensor:
        """Inputs at these positions of the whole view, all of which must be in the subset."""
        offsets = self.offsets[index]
        everything = len(offsets) == len(self.data) and torch.equal(offsets, torch.arange(len(offsets)))
        return self.data if everything else self.data.index_select(0, offsets)


class Public:
    """The server's unlabelled inputs. A view of them is a function of the seed and the round alone."""

    labels: Tensor | None
    """Only for methods whose traits say "labelled"."""

    def __init__(
        self,
        pool: Tensor,
        rows: Tensor,
        augment: AugmentConfig,
        seed: int,
        mode: Literal["fixed", "per_round"] = "fixed",
        labels: Tensor | None = None,
    ) -> None:
        self._pool, self.rows, self._augment, self.seed, self._mode = pool, rows, augment, seed, mode
        self.labels = labels
        self._latest_view: tuple[int, Inputs] | None = None
        self._latest_subset: tuple[int, Tensor, Subset] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self._pool.shape[1:])

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images, which are augmented."""
        return self._pool.dtype == torch.uint8 and self._pool.ndim == 4

    @property
    def is_numeric(self) -> bool:
        """Whether inputs can be averaged; the word pieces of texts can't."""
        return self.is_image or self._pool.is_floating_point()

    def without_labels(self) -> Public:
        """The same inputs, for methods that must not see the labels."""
        return Public(self._pool, self.rows, self._augment, self.seed, self._mode)

    def view(self, round: int) -> Inputs:
        """All public inputs as this round sees them; the latest view is cached."""
        number = 0 if self._mode == "fixed" else round
        if self._latest_view is None or self._latest_view[0] != number:
            self._latest_view = (number, Inputs(self._transformed(number, torch.arange(len(self)))))
        return self._latest_view[1]

    def subset(self, round: int, rows: Tensor, allocate: Allocator = torch.empty) -> Inputs:
        """The round's view, computed for these rows (ascending) only: they have the same values as in the whole view."""
        if self._mode == "fixed":
            return self.view(round)  # the whole view is computed once per run
        latest = self._latest_subset
        if latest is None or latest[0] != round or not torch.equal(latest[1], rows):
            offsets = torch.full((len(self),), -1).index_put((rows,), torch.arange(len(rows)))
            latest = self._latest_subset = (round, rows, Subset(self._transformed(round, rows, allocate), offsets))
        return latest[2]

    def rows_of_view(self, round: int, view: int, rows: Tensor) -> Tensor:
        """These rows of one of a round's independent views; view 0 is the one that `view` and `subset` give."""
        return self._transformed(0 if self._mode == "fixed" else round, rows, view=view)

    def _transformed(self, number: int, wanted: Tensor, allocate: Allocator = torch.empty, view: int = 0) -> Tensor:
        """These rows of a view. Random numbers are drawn for all rows, so that no row depends on which others are wanted."""
        if not self.is_image:
            return source.prepare(self._pool.index_select(0, self.rows[wanted]))
        random = generator(self.seed, "view", number, *([view] if view else []))
        sizes = [min(_CHUNK, len(self) - start) for start in range(0, len(self), _CHUNK)]
        draws = Draws.concatenate([draw(n, self._augment, random) for n in sizes])
        out = allocate((len(wanted), *self._pool.shape[1:]))
        for piece, rows in zip(out.split(_PIECE), wanted.split(_PIECE), strict=True):  # type: ignore[no-untyped-call]
            transform(self._pool.index_select(0, self.rows[rows]), self._augment, draws.select(rows), out=piece)
        return out
