"""Wide 3x3 convolutions, with 36 products in place of 144 for each tile of 4x4 outputs.

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
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

POINTS = (0.0, 0.625, -0.625, 1.6, -1.6)
"""And infinity."""
TILE, TAPS, PLACES = 4, 3, 6
WIDE, WORK = 64, 1 << 18
"""The fewest channels, and the least of inputs times outputs times pixels, for which it pays."""
AT_ONCE = 1 << 21
"""Numbers in the images, and in the turned taps, that are dealt with at a time: more would not fit the cache."""
ROWS = 64
"""Rows of a matrix of values for each thread, more for many channels: images, or fewer of them and tiles side by side."""


class TiledConv2d(nn.Conv2d):
    """A convolution (zeros around, no groups, no dilation) that is computed by tiles where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """As a convolution's."""
        exact = x.dtype in (torch.float32, torch.float64)  # the rounding of shorter numbers would show
        here = exact and x.is_cpu and len(x)
        if not (here and pays(tuple(x.shape[2:]), tuple(self.weight.shape), self.stride, self.padding)):
            return super().forward(x)
        images = max(ROWS, AT_ONCE // x.shape[1:].numel())
        pieces = [_Tiled.apply(piece, self.weight) for piece in x.split(images)]  # type: ignore[no-untyped-call]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return y if self.bias is None else y.add_(self.bias.view(-1, 1, 1))


@cache
def pays(side: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: Any) -> bool:
    """Whether a layer is wide, its map made of whole tiles, and its kernel the one that this is for."""
    (height, width), (outputs, inputs, *kernel) = side, weight
    fits = kernel == [TAPS, TAPS] and stride == padding == (1, 1) and height == width and height % TILE == 0
    return fits and min(outputs, inputs) >= WIDE and outputs * inputs * height * width >= WORK


class Span(NamedTuple):
    """Neighbouring tiles in one direction: these outputs come from these inputs; matrices are (places x tiles, pixels)."""

    outputs: slice
    inputs: slice
    turn: Tensor
    back: Tensor


class Plan(NamedTuple):
    """The matrices for maps of one size: rows of tiles one by one, in each of them some columns at a time; and for the taps."""

    rows: list[Span]
    columns: list[Span]
    taps: Tensor


@cache
def plan(side: int, beside: int, dtype: torch.dtype) -> Plan:
    """Matrices from inputs to places, from outputs to places (to be used the other way round), and from 9 taps to 36 places."""
    output, window, taps = filtering()

    def span(first: int, tiles: int) -> Span:
        start, stop = first * TILE, (first + tiles) * TILE
        low, high = max(0, start - 1), min(side, stop + 1)  # what lies beyond the map is zero
        turn, back = window.new_zeros(PLACES, tiles, stop - start + 2), window.new_zeros(PLACES, tiles, stop - start)
        for tile in range(tiles):
            turn[:, tile, tile * TILE : tile * TILE + PLACES] = window
            back[:, tile, tile * TILE : (tile + 1) * TILE] = output
        turn = turn[:, :, low - start + 1 : high - start + 1]
        return Span(slice(start, stop), slice(low, high), *(m.flatten(0, 1).to(dtype).contiguous() for m in (turn, back)))

    tiles = side // TILE
    columns = [span(first, min(beside, tiles - first)) for first in range(0, tiles, beside)]
    return Plan([span(first, 1) for first in range(tiles)], columns, torch.kron(taps, taps).to(dtype))


def filtering() -> tuple[Tensor, Tensor, Tensor]:
    """For each place in one direction its factors for four outputs, six inputs and three taps, of equal size."""
    output, taps, both = (_values(n) for n in (TILE, TAPS, PLACES))
    parts = [output, torch.linalg.inv(both).T, taps]
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
        y, matrices = x.new_empty(side, side, n, outputs), _plan(x)
        for part in _parts(outputs * inputs):
            taps = torch.mm(_of(matrices.taps, part), w).view(-1, outputs, inputs).transpose(1, 2)
            for rows, columns in product(matrices.rows, matrices.columns):
                values = _turn(x[rows.inputs, columns.inputs], rows.turn[part], columns.turn).view(len(taps), -1, inputs)
                found = torch.bmm(values, taps)
                _turn_back(found, rows.back[part], columns.back, y[rows.outputs, columns.outputs], add=part.start > 0)
        ctx.save_for_backward(x, w)
        return _images(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        outputs, inputs = gradient.shape[1], x.shape[3]
        g, matrices = _pixels(gradient), _plan(x)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.empty_like(w) if ctx.needs_input_grad[1] else None
        for part in _parts(outputs * inputs):
            turn = _of(matrices.taps, part)
            taps = torch.mm(turn, w).view(-1, outputs, inputs)
            sums = torch.empty_like(taps) if dw is not None else None
            for rows, columns in product(matrices.rows, matrices.columns):
                errors = _turn(g[rows.outputs, columns.outputs], rows.back[part], columns.back).view(len(taps), -1, outputs)
                if dx is not None:
                    into = dx[rows.inputs, columns.inputs]  # neighbours share some of it
                    _turn_back(torch.bmm(errors, taps), rows.turn[part], columns.turn, into, add=True)
                if sums is not None:
                    values = _turn(x[rows.inputs, columns.inputs], rows.turn[part], columns.turn).view(len(taps), -1, inputs)
                    first = rows.outputs.start == columns.outputs.start == 0
                    sums.baddbmm_(errors.transpose(1, 2), values, beta=int(not first))
            if dw is not None and sums is not None:
                dw.addmm_(turn.t(), sums.view(len(turn), -1), beta=int(part.start > 0))
        return None if dx is None else _images(dx), None if dw is None else _images(dw.view(TAPS, TAPS, outputs, inputs))


def _plan(pixels: Tensor) -> Plan:
    side, _, images, channels = pixels.shape
    beside = torch.get_num_threads() * max(ROWS, channels // 2) // images
    return plan(side, max(1, min(side // TILE, beside)), pixels.dtype)


def _parts(size: int) -> list[slice]:
    """The places down a map in parts, so that the turned taps of a part fit."""
    many = max(1, min(PLACES, AT_ONCE // (PLACES * size)))
    return [slice(first, min(PLACES, first + many)) for first in range(0, PLACES, many)]


def _of(taps: Tensor, part: slice) -> Tensor:
    return taps[part.start * PLACES : part.stop * PLACES]


def _turn(pixels: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Pixels as values: (places down, places across x tiles, images x channels)."""
    half = torch.bmm(down.expand(pixels.shape[1], -1, -1), pixels.flatten(2).transpose(0, 1)).transpose(0, 1)
    return torch.bmm(across.expand(len(down), -1, -1), half)


def _turn_back(values: Tensor, down: Tensor, across: Tensor, pixels: Tensor, add: bool) -> None:
    """Values as pixels, written over those or added to them."""
    half = torch.bmm(across.t().expand(len(down), -1, -1), values.view(len(down), len(across), -1))
    pixels.view(len(pixels), -1).addmm_(down.t(), half.view(len(down), -1), beta=int(add))


def _pixels(images: Tensor) -> Tensor:
    return images.permute(2, 3, 0, 1).contiguous()


def _images(pixels: Tensor) -> Tensor:
    return pixels.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
