"""Wide 3x3 convolutions on small maps, with 36 products in place of 144 for each tile of 4x4 outputs.

Winograd's minimal filtering (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016), F(4x4, 3x3).
In one direction four outputs come from six inputs and three taps. These are the coefficients of polynomials, and products of
polynomials are products of their values: inputs and taps are turned into values at six points, multiplied there, and turned
back into outputs. In both directions that is 6x6 places, at each of which a matrix of values, one row per tile and one column
per channel, meets a matrix of taps.

Everything is a matrix product, the turning, too. So the points can be chosen for their rounding alone: with these the error is
that of torch's own convolution in channels-last layout, within a factor of two (see docs/adr/0006).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

POINTS = (0.0, 0.625, -0.625, 1.6, -1.6)
"""And infinity."""
TILE, TAPS, PLACES = 4, 3, 6
SIDE = 16
"""The largest side of a map for which it pays."""
WIDE, WORK = 64, 1 << 18
"""The fewest channels, and the least of inputs times outputs times pixels, for which it pays."""
AT_ONCE = 1 << 21
"""Numbers in the taps that are turned at a time: those of a wide layer would not fit the cache."""
PIECE = 256
"""Images at a time."""


class TiledConv2d(nn.Conv2d):
    """A convolution (zeros around, no groups, no dilation) that is computed by tiles where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """As a convolution's."""
        if not (x.is_cpu and pays(tuple(x.shape[2:]), tuple(self.weight.shape), self.stride, self.padding)):
            return super().forward(x)
        pieces = [_Tiled.apply(piece, self.weight) for piece in x.split(PIECE)]  # type: ignore[no-untyped-call]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)


@cache
def pays(side: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: Any) -> bool:
    """Whether a layer is wide, its map small and made of whole tiles, and its kernel the one that this is for."""
    (height, width), (outputs, inputs, *kernel) = side, weight
    fits = kernel == [TAPS, TAPS] and stride == padding == (1, 1) and height == width <= SIDE and height % TILE == 0
    return fits and min(outputs, inputs) >= WIDE and outputs * inputs * height * width >= WORK


class Band(NamedTuple):
    """A row of tiles: these rows of the output come from these of the input, turned by this matrix (places, rows)."""

    outputs: slice
    inputs: slice
    turn: Tensor


class Plan(NamedTuple):
    """The matrices for maps of one size. Across a map all tiles are turned at once (places x tiles, columns)."""

    bands: list[Band]
    across: Tensor
    back: Tensor
    back_across: Tensor
    taps: Tensor


@cache
def plan(side: int, dtype: torch.dtype) -> Plan:
    """Matrices from inputs to places, from places to outputs (as places by outputs), and from nine taps to 36 places."""
    output, window, taps = filtering()
    tiles = side // TILE
    bands, across, back = [], window.new_zeros(PLACES, tiles, side), window.new_zeros(PLACES, tiles, side)
    for tile in range(tiles):
        start = tile * TILE
        first, last = max(0, start - 1), min(side, start + TILE + 1)  # what lies beyond the map is zero
        turn = window[:, first - start + 1 : last - start + 1]
        across[:, tile, first:last], back[:, tile, start : start + TILE] = turn, output
        bands.append(Band(slice(start, start + TILE), slice(first, last), turn.to(dtype).contiguous()))
    whole = [m.flatten(0, 1).to(dtype) for m in (across, back)]
    return Plan(bands, whole[0], output.to(dtype), whole[1], torch.kron(taps, taps).to(dtype))


def filtering() -> tuple[Tensor, Tensor, Tensor]:
    """For each place in one direction its factors for four outputs, six inputs and three taps, of equal size."""
    output, taps, product = (_values(n) for n in (TILE, TAPS, PLACES))
    parts = [output, torch.linalg.inv(product).T, taps]
    norms = [part.norm(dim=1, keepdim=True) for part in parts]
    size = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
    output, window, taps = (part / norm * size for part, norm in zip(parts, norms, strict=True))
    return output, window, taps


def _values(coefficients: int) -> Tensor:
    """From a polynomial's coefficients to its values at all points; at infinity that is the last coefficient."""
    powers = torch.arange(coefficients, dtype=torch.float64)
    finite = torch.tensor(POINTS, dtype=torch.float64)[:, None] ** powers
    return torch.cat([finite, torch.eye(coefficients, dtype=torch.float64)[-1:]])


class _Tiled(torch.autograd.Function):
    """Maps are laid out as (rows, columns, images, channels) inside: then a turn is one product, whatever the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        outputs, inputs = weight.shape[:2]
        n, side = len(x), x.shape[2]
        x, w = _pixels(x), _pixels(weight).view(TAPS * TAPS, -1)
        y, matrices = x.new_empty(side, side, n, outputs), plan(side, x.dtype)
        for part in _parts(outputs * inputs):
            taps = torch.mm(_of(matrices.taps, part), w).view(-1, outputs, inputs).transpose(1, 2)
            for band in matrices.bands:
                values = _turn(x[band.inputs], band.turn[part], matrices.across).view(len(taps), -1, inputs)
                _turn_back(torch.bmm(values, taps), matrices.back[part], matrices.back_across, y[band.outputs], part.start > 0)
        ctx.save_for_backward(x, w)
        return _images(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        side, inputs = len(x), x.shape[3]
        outputs = gradient.shape[1]
        g, matrices = _pixels(gradient), plan(side, x.dtype)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.empty_like(w) if ctx.needs_input_grad[1] else None
        for part in _parts(outputs * inputs):
            turn = _of(matrices.taps, part)
            taps = torch.mm(turn, w).view(-1, outputs, inputs)
            sums = torch.empty_like(taps) if dw is not None else None
            for band in matrices.bands:
                errors = _turn(g[band.outputs], matrices.back[part], matrices.back_across).view(len(taps), -1, outputs)
                if dx is not None:
                    _turn_back(torch.bmm(errors, taps), band.turn[part], matrices.across, dx[band.inputs], True)
                if sums is not None:
                    values = _turn(x[band.inputs], band.turn[part], matrices.across).view(len(taps), -1, inputs)
                    sums.baddbmm_(errors.transpose(1, 2), values, beta=int(band.outputs.start > 0))
            if dw is not None and sums is not None:
                dw.addmm_(turn.t(), sums.view(len(turn), -1), beta=int(part.start > 0))
        return None if dx is None else _images(dx), None if dw is None else _images(dw.view(TAPS, TAPS, outputs, inputs))


def _parts(size: int) -> list[slice]:
    """The places down a map in parts, so that the turned taps of a part fit."""
    many = max(1, min(PLACES, AT_ONCE // (PLACES * size)))
    return [slice(first, min(PLACES, first + many)) for first in range(0, PLACES, many)]


def _of(taps: Tensor, part: slice) -> Tensor:
    return taps[part.start * PLACES : part.stop * PLACES]


def _turn(rows: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """A band's rows as values: (places down, places across x tiles, images x channels)."""
    half = torch.mm(down, rows.view(len(rows), -1)).view(len(down), rows.shape[1], -1)
    return torch.bmm(across.expand(len(down), -1, -1), half)


def _turn_back(values: Tensor, down: Tensor, across: Tensor, rows: Tensor, add: bool) -> None:
    """Into, or onto, the rows of a band."""
    half = torch.bmm(across.t().expand(len(down), -1, -1), values.view(len(down), len(across), -1))
    rows.view(len(rows), -1).addmm_(down.t(), half.view(len(down), -1), beta=int(add))


def _pixels(images: Tensor) -> Tensor:
    return images.permute(2, 3, 0, 1).contiguous()


def _images(pixels: Tensor) -> Tensor:
    return pixels.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
