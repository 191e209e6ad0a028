"""Convolutions on maps of a few pixels, where most of a padded kernel never overlaps the map.

On a map of one pixel a 3x3 kernel multiplies eight zeros of the padding for every pixel, on 2x2 five for every four. Here
only the part of the kernel that overlaps the map is multiplied. Weights, their names and the results are those of
`nn.Conv2d`, to rounding; weights that never overlap the map get a gradient of zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedet.models.kernels import switch
from fedet.models.kernels.constants import cached_constants
from fedet.models.kernels.winograd import WinogradConv2d

Algorithm = Literal["default", "linear", "dense", "blocks"]

MAX_PIXELS = 16
"""Pixels of the largest map treated here: on 8x8 nearly all of the kernel overlaps the map."""
MAX_DENSE = 1 << 15
"""Numbers in the largest dense matrix; beyond that, copying costs more than the calls it saves (see docs/adr/0006)."""
MAX_BLOCK_PIXELS = 4
"""Pixels of the largest output computed block by block: each pixel takes up to three calls."""


class SmallMapConv2d(WinogradConv2d):
    """A convolution (zero padding, no groups, no dilation) that skips the padding on small maps."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the convolution."""
        if not (switch.enabled() and x.is_cpu):
            return super().forward(x)
        stride, padding = self.stride[0], int(self.padding[0])
        chosen = algorithm(tuple(x.shape[2:]), tuple(self.weight.shape), stride, padding)
        if chosen == "linear":
            return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        if chosen == "dense":
            return _dense(x, self.weight, self.bias, stride, padding)
        if chosen == "blocks":
            return _Blocks.apply(x, self.weight, self.bias, stride, padding)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)


@cache
def algorithm(side: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> Algorithm:
    """The fastest way to apply a weight of this shape to maps of this size."""
    (height, width), (outputs, inputs, *kernel) = side, weight
    if kernel == [1, 1] and stride == 1 and padding == 0:
        return "linear"
    pixels = height * width
    output_pixels = _length(height, kernel[0], stride, padding) * _length(width, kernel[1], stride, padding)
    if output_pixels < 1 or pixels > MAX_PIXELS or padding >= min(kernel):
        return "default"
    if outputs * inputs * pixels * output_pixels <= MAX_DENSE:
        return "dense"
    return "blocks" if output_pixels <= MAX_BLOCK_PIXELS else "default"


class Block(NamedTuple):
    """One matrix product: columns of the output += columns of the input x columns of the weight, each (rows, channels last)."""

    output: int
    input: int
    weight: int
    length: int
    first: bool
    """Whether this is the first product for its output, which is then overwritten."""


@cache
def blocks(side: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> list[Block]:
    """For each output pixel and each row of the kernel that overlaps the map: the overlapping part of that row."""
    (height, width), (outputs, inputs, rows, columns) = side, weight
    found = []
    for y in range(_length(height, rows, stride, padding)):
        for x in range(output_width := _length(width, columns, stride, padding)):
            left, right = _overlap(x, width, columns, stride, padding)
            low, high = _overlap(y, height, rows, stride, padding)
            for row in range(low, high):
                source = (y * stride - padding + row) * width + x * stride - padding + left
                found.append(
                    Block(
                        output=(y * output_width + x) * outputs,
                        input=source * inputs,
                        weight=(row * columns + left) * inputs,
                        length=(right - left) * inputs,
                        first=row == low,
                    )
                )
    return found


class _Blocks(torch.autograd.Function):
    """The products listed by `blocks`, in place; autograd would allocate a full gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        n, _, height, width = x.shape
        outputs, _, rows, columns = weight.shape
        ctx.layer = (height, width), tuple(weight.shape), stride, padding
        output_height, output_width = _length(height, rows, stride, padding), _length(width, columns, stride, padding)
        x, w = _matrix(x), _matrix(weight)
        y = x.new_empty(n, output_height * output_width * outputs)
        for b in blocks(*ctx.layer):
            into, left, right = y.narrow(1, b.output, outputs), x.narrow(1, b.input, b.length), w.narrow(1, b.weight, b.length)
            if not b.first:
                into.addmm_(left, right.t())
            elif bias is None:
                torch.mm(left, right.t(), out=into)
            else:
                torch.addmm(bias, left, right.t(), out=into)
        ctx.save_for_backward(x, w)
        return _maps(y, output_height, output_width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        (height, width), (outputs, _, rows, columns), _, _ = ctx.layer
        g = _matrix(gradient)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w) if ctx.needs_input_grad[1] else None
        for b in blocks(*ctx.layer):
            part = g.narrow(1, b.output, outputs)
            if dw is not None:
                dw.narrow(1, b.weight, b.length).addmm_(part.t(), x.narrow(1, b.input, b.length))
            if dx is not None:
                dx.narrow(1, b.input, b.length).addmm_(part, w.narrow(1, b.weight, b.length))
        db = g.view(-1, outputs).sum(0) if ctx.needs_input_grad[2] else None
        return (
            None if dx is None else _maps(dx, height, width),
            None if dw is None else _maps(dw, rows, columns),
            db,
            None,
            None,
        )


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """One product with the dense matrix from all inputs to all outputs: small layers spend their time on calls."""
    (_, _, height, width), (outputs, inputs, rows, columns) = x.shape, weight.shape
    output_height, output_width = _length(height, rows, stride, padding), _length(width, columns, stride, padding)
    indices, any_outside = kernel_indices((height, width), (rows, columns), stride, padding)
    w = weight.permute(0, 2, 3, 1).reshape(outputs, rows * columns, inputs)
    if any_outside:
        w = F.pad(w, (0, 0, 0, 1))
    matrix = w.index_select(1, indices).view(outputs * output_height * output_width, height * width * inputs)
    repeated = None if bias is None else bias.repeat_interleave(output_height * output_width)
    y = F.linear(_matrix(x), matrix, repeated).view(-1, outputs, output_height, output_width)
    return y.contiguous(memory_format=torch.channels_last)


@cached_constants
def kernel_indices(side: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int) -> tuple[Tensor, bool]:
    """Which kernel position connects each output pixel with each input pixel; and whether some pairs are not connected.

    Those have the index after the last position.
    """
    (height, width), (rows, columns) = side, kernel
    outside = rows * columns

    def position(y: int, x: int, i: int, j: int) -> int:
        row, column = i - y * stride + padding, j - x * stride + padding
        return row * columns + column if 0 <= row < rows and 0 <= column < columns else outside

    output_rows, output_columns = range(_length(height, rows, stride, padding)), range(_length(width, columns, stride, padding))
    indices = [position(y, x, i, j) for y in output_rows for x in output_columns for i in range(height) for j in range(width)]
    return torch.tensor(indices), outside in indices


def _length(side: int, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


def _overlap(output: int, side: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """The range of kernel positions that overlap the map for this output, in one dimension."""
    start = output * stride - padding
    return max(0, -start), min(kernel, side - start)


def _matrix(maps: Tensor) -> Tensor:
    """One row per image or kernel, channels last; a view where the tensor already has that layout."""
    return maps.permute(0, 2, 3, 1).reshape(len(maps), -1)


def _maps(matrix: Tensor, height: int, width: int) -> Tensor:
    return matrix.view(len(matrix), height, width, -1).permute(0, 3, 1, 2)
