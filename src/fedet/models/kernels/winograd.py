"""Wide 3x3 convolutions with Winograd's minimal filtering: 36 multiplications instead of 144 per tile of 4x4 outputs.

The algorithm is F(4x4, 3x3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016. In one
dimension, four outputs depend on six inputs and a filter of three weights. Both are coefficients of polynomials, and the
product of two polynomials can be computed from their values: inputs and filter are transformed into values at six
points, multiplied point by point, and the products are transformed back into outputs. In two dimensions there are 6x6
points. At each of them a matrix of input values (tiles x input channels) is multiplied by a matrix of filter values.

The transforms are matrix products, too, so small-integer points have no advantage and the points are chosen for accuracy
alone: the error is within a factor of two of torch's own channels-last convolution (see docs/adr/0006).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedet.models.kernels import switch
from fedet.models.kernels.constants import cached_constants

FINITE_POINTS = (0.0, 0.625, -0.625, 1.6, -1.6)
"""The interpolation points; the sixth is infinity."""
TILE, FILTER, POINTS = 4, 3, 6
"""Outputs per tile, filter weights and points, all in one dimension."""
MIN_CHANNELS, MIN_WORK = 64, 1 << 18
"""The fewest channels, and the smallest product of input channels, output channels and pixels, for which this is faster."""
CHUNK = 1 << 21
"""Numbers in the images, and in the transformed filters, that are processed at a time: more would not fit in the cache."""
ROWS_PER_THREAD = 64
"""Rows of a matrix of values per thread, more for many channels; small batches reach it with several tiles at a time."""


class WinogradConv2d(nn.Conv2d):
    """A convolution (zero padding, no groups, no dilation) that uses Winograd's algorithm where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the convolution."""
        accurate = x.dtype in (torch.float32, torch.float64)  # with fewer bits the rounding would be noticeable
        usable = switch.enabled() and accurate and x.is_cpu and len(x)
        if not (usable and applies(tuple(x.shape[2:]), tuple(self.weight.shape), self.stride, self.padding)):
            return super().forward(x)
        images = max(ROWS_PER_THREAD, CHUNK // x.shape[1:].numel())
        chunks = [_Winograd.apply(chunk, self.weight) for chunk in x.split(images)]  # type: ignore[no-untyped-call]
        y = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return y if self.bias is None else y.add_(self.bias.view(-1, 1, 1))


@cache
def applies(side: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: Any) -> bool:
    """Whether a layer is 3x3 and wide enough, and its maps consist of whole tiles."""
    (height, width), (outputs, inputs, *kernel) = side, weight
    fits = kernel == [FILTER, FILTER] and stride == padding == (1, 1) and height == width and height % TILE == 0
    return fits and min(outputs, inputs) >= MIN_CHANNELS and outputs * inputs * height * width >= MIN_WORK


class TileRange(NamedTuple):
    """Adjacent tiles in one dimension: the outputs they produce, the inputs they read, and their transforms.

    Both transforms are matrices (points x tiles, pixels): of the inputs, and of the outputs' gradient. The transpose of
    the latter transforms products back into outputs.
    """

    outputs: slice
    inputs: slice
    input_transform: Tensor
    output_transform: Tensor


class Plan(NamedTuple):
    """The transforms for maps of one size: one row of tiles at a time, several columns of tiles at a time; and the filter's."""

    rows: list[TileRange]
    columns: list[TileRange]
    filter_transform: Tensor


@cached_constants
def plan(side: int, tiles_at_once: int, dtype: torch.dtype) -> Plan:
    """Make the transforms for square maps of this size; the filter's takes 3x3 weights to 6x6 points."""
    output, window, kernel = transforms()

    def tile_range(first: int, tiles: int) -> TileRange:
        start, stop = first * TILE, (first + tiles) * TILE
        low, high = max(0, start - 1), min(side, stop + 1)  # outside of the map everything is zero
        inputs, outputs = window.new_zeros(POINTS, tiles, stop - start + 2), window.new_zeros(POINTS, tiles, stop - start)
        for tile in range(tiles):
            inputs[:, tile, tile * TILE : tile * TILE + POINTS] = window
            outputs[:, tile, tile * TILE : (tile + 1) * TILE] = output
        inputs = inputs[:, :, low - start + 1 : high - start + 1]
        matrices = (matrix.flatten(0, 1).to(dtype).contiguous() for matrix in (inputs, outputs))
        return TileRange(slice(start, stop), slice(low, high), *matrices)

    tiles = side // TILE
    columns = [tile_range(first, min(tiles_at_once, tiles - first)) for first in range(0, tiles, tiles_at_once)]
    return Plan([tile_range(first, 1) for first in range(tiles)], columns, torch.kron(kernel, kernel).to(dtype))


def transforms() -> tuple[Tensor, Tensor, Tensor]:
    """The one-dimensional transforms of four outputs, six inputs and three filter weights, scaled to equal norms per point."""
    output, kernel, both = (_values(n) for n in (TILE, FILTER, POINTS))
    parts = [output, torch.linalg.inv(both).T, kernel]
    norms = [part.norm(dim=1, keepdim=True) for part in parts]
    size = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
    output, window, kernel = (part / norm * size for part, norm in zip(parts, norms, strict=True))
    return output, window, kernel


def _values(coefficients: int) -> Tensor:
    """The matrix from a polynomial's coefficients to its values at all points; at infinity that is the last coefficient."""
    powers = torch.arange(coefficients, dtype=torch.float64)
    finite = torch.tensor(FINITE_POINTS, dtype=torch.float64)[:, None] ** powers
    return torch.cat([finite, torch.eye(coefficients, dtype=torch.float64)[-1:]])


class _Winograd(torch.autograd.Function):
    """Maps are laid out as (rows, columns, images, channels) here, so that a transform is a single matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        outputs, inputs = weight.shape[:2]
        n, side = len(x), x.shape[2]
        x, w = _pixels(x), _pixels(weight).view(FILTER * FILTER, -1)
        y, matrices = x.new_empty(side, side, n, outputs), _plan(x)
        for points in _point_slices(outputs * inputs):
            filters = torch.mm(_rows_of(matrices.filter_transform, points), w).view(-1, outputs, inputs).transpose(1, 2)
            for rows, columns in product(matrices.rows, matrices.columns):
                down, across = rows.input_transform[points], columns.input_transform
                values = _transform(x[rows.inputs, columns.inputs], down, across).view(len(filters), -1, inputs)
                down, across = rows.output_transform[points], columns.output_transform
                into = y[rows.outputs, columns.outputs]
                _inverse_transform(torch.bmm(values, filters), down, across, into, add=points.start > 0)
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
        for points in _point_slices(outputs * inputs):
            filter_transform = _rows_of(matrices.filter_transform, points)
            filters = torch.mm(filter_transform, w).view(-1, outputs, inputs)
            sums = torch.empty_like(filters) if dw is not None else None
            for rows, columns in product(matrices.rows, matrices.columns):
                down, across = rows.output_transform[points], columns.output_transform
                errors = _transform(g[rows.outputs, columns.outputs], down, across).view(len(filters), -1, outputs)
                down, across = rows.input_transform[points], columns.input_transform
                if dx is not None:
                    into = dx[rows.inputs, columns.inputs]  # adjacent tiles share some inputs
                    _inverse_transform(torch.bmm(errors, filters), down, across, into, add=True)
                if sums is not None:
                    values = _transform(x[rows.inputs, columns.inputs], down, across).view(len(filters), -1, inputs)
                    first = rows.outputs.start == columns.outputs.start == 0
                    sums.baddbmm_(errors.transpose(1, 2), values, beta=int(not first))
            if dw is not None and sums is not None:
                dw.addmm_(filter_transform.t(), sums.view(len(filters), -1), beta=int(points.start > 0))
        return None if dx is None else _images(dx), None if dw is None else _images(dw.view(FILTER, FILTER, outputs, inputs))


def _plan(pixels: Tensor) -> Plan:
    side, _, images, channels = pixels.shape
    tiles_at_once = torch.get_num_threads() * max(ROWS_PER_THREAD, channels // 2) // images
    return plan(side, max(1, min(side // TILE, tiles_at_once)), pixels.dtype)


def _point_slices(size: int) -> list[slice]:
    """The vertical points in slices, so that the transformed filters of a slice fit in the cache."""
    step = max(1, min(POINTS, CHUNK // (POINTS * size)))
    return [slice(first, min(POINTS, first + step)) for first in range(0, POINTS, step)]


def _rows_of(filter_transform: Tensor, points: slice) -> Tensor:
    return filter_transform[points.start * POINTS : points.stop * POINTS]


def _transform(pixels: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """From pixels to values: (points down, points across x tiles, images x channels)."""
    half = torch.bmm(down.expand(pixels.shape[1], -1, -1), pixels.flatten(2).transpose(0, 1)).transpose(0, 1)
    return torch.bmm(across.expand(len(down), -1, -1), half)


def _inverse_transform(values: Tensor, down: Tensor, across: Tensor, pixels: Tensor, add: bool) -> None:
    """From values to pixels, which are overwritten or added to."""
    half = torch.bmm(across.t().expand(len(down), -1, -1), values.view(len(down), len(across), -1))
    pixels.view(len(pixels), -1).addmm_(down.t(), half.view(len(down), -1), beta=int(add))


def _pixels(images: Tensor) -> Tensor:
    return images.permute(2, 3, 0, 1).contiguous()


def _images(pixels: Tensor) -> Tensor:
    return pixels.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
