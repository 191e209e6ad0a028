"""Several views of the public inputs in one round, and mixtures of pairs of them (mixup and CutMix)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedet.core import Allocator, seed_of
from fedet.data.public import Inputs, Public, Subset
from fedet.errors import ConfigError

Mix = Literal["none", "mixup", "cutmix", "both"]


class Pairs(NamedTuple):
    """How each of n inputs is mixed: with which other input, its own share, and whether by a rectangle (CutMix)."""

    partner: Tensor
    share: Tensor
    rectangle: Tensor
    corner: Tensor
    """Where the rectangle is, as a fraction of the room that it has in each direction."""

    def select(self, rows: Tensor) -> Pairs:
        """The pairs of some of the inputs."""
        return Pairs(*(values[rows] for values in self))


def draw_pairs(n: int, mix: Mix, beta: float, seed: int) -> Pairs:
    """Random pairs: the partners are a permutation, the shares are from Beta(beta, beta)."""
    rng = np.random.default_rng(seed)
    partner, share, corner = rng.permutation(n), rng.beta(beta, beta, n), rng.random((n, 2))
    rectangle = rng.random(n) < 0.5 if mix == "both" else np.full(n, mix == "cutmix")
    return Pairs(
        torch.from_numpy(partner), torch.from_numpy(share).float(), torch.from_numpy(rectangle), torch.from_numpy(corner)
    )


def mixed(own: Tensor, other: Tensor, pairs: Pairs, out: Tensor) -> Tensor:
    """Mix each input with its partner: a weighted mean, or a rectangle of the partner whose area is the partner's share."""
    weight = pairs.share.view(-1, *[1] * (own.dim() - 1)).expand_as(own)
    if pairs.rectangle.any():
        inside = _rectangles(pairs, own.shape[-2], own.shape[-1]).unsqueeze(1)
        weight = torch.where(pairs.rectangle.view(-1, 1, 1, 1), (~inside).float(), weight)
    return torch.lerp(other, own, weight, out=out)


def _rectangles(pairs: Pairs, height: int, width: int) -> Tensor:
    """Which pixels (n, height, width) are the partner's."""
    side = (1 - pairs.share).sqrt().double()
    bounds = []
    for axis, length in enumerate((height, width)):
        size = (side * length).round()
        start = ((length - size + 1) * pairs.corner[:, axis]).floor()
        position = torch.arange(length)
        bounds.append((position >= start[:, None]) & (position < (start + size)[:, None]))
    return bounds[0][:, :, None] & bounds[1][:, None, :]


class MixedViews:
    """The inputs of several independent views of the public inputs in a row, each mixed with another one of its view."""

    def __init__(self, public: Public, views: int = 1, mix: Mix = "none", beta: float = 1.0) -> None:
        if mix != "none" and not public.is_numeric:
            raise ConfigError("texts can't be mixed: set method.mix = 'none'")
        if mix in ("cutmix", "both") and not public.is_image:
            raise ConfigError(f"method.mix = '{mix}' needs images: set it to 'mixup' or 'none'")
        self._public, self._views, self._mix, self._beta = public, views, mix, beta
        self._latest: tuple[int, Tensor, Subset] | None = None

    def __len__(self) -> int:
        return self._views * len(self._public)

    def subset(self, round: int, rows: Tensor, allocate: Allocator = torch.empty) -> Inputs:
        """The round's inputs at these rows (ascending); the latest ones are cached."""
        latest = self._latest
        if latest is None or latest[0] != round or not torch.equal(latest[1], rows):
            offsets = torch.full((len(self),), -1).index_put((rows,), torch.arange(len(rows)))
            latest = self._latest = (round, rows, Subset(self._inputs(round, rows, allocate), offsets))
        return latest[2]

    def _inputs(self, round: int, rows: Tensor, allocate: Allocator) -> Tensor:
        """The inputs of one view after the other, in memory from the allocator."""
        n, start = len(self._public), 0
        if not self._public.is_numeric:  # texts have one view, and shared memory is for floats
            return self._public.rows_of_view(round, 0, rows % n)
        out = allocate((len(rows), *self._public.input_shape))
        for view in range(self._views):
            part = rows[(rows >= view * n) & (rows < (view + 1) * n)] - view * n
            self._write(round, view, part, out[start : start + len(part)])
            start += len(part)
        return out

    def _write(self, round: int, view: int, rows: Tensor, out: Tensor) -> None:
        if self._mix == "none":
            out.copy_(self._public.rows_of_view(round, view, rows))
            return
        seed = seed_of(self._public.seed, "mix", round, view)
        pairs = draw_pairs(len(self._public), self._mix, self._beta, seed).select(rows)
        needed, place = torch.unique(torch.cat([rows, pairs.partner]), return_inverse=True)
        inputs = self._public.rows_of_view(round, view, needed)
        mixed(inputs[place[: len(rows)]], inputs[place[len(rows) :]], pairs, out)
