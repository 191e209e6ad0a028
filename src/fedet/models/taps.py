"""Convolutions on maps of a few pixels, where most taps of a padded kernel only ever see the padding.

A 3x3 kernel on a map of one pixel multiplies eight zeros for every number, on 2x2 five for every four. Here only the live
taps are multiplied. Weights, their names and the result are a convolution's, to rounding; dead taps get the gradient zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Way = Literal["plain", "linear", "table", "blocks"]

MAP = 16
"""Pixels of the largest map that is not left to torch: on 8x8 nearly all taps are live."""
TABLE = 1 << 15
"""Numbers in the largest matrix that is spelt out; beyond, copying costs more than the calls it saves (see docs/adr/0006)."""
BLOCKS = 4
"""Pixels of the largest output made block by block: each takes up to three calls."""


class LiveConv2d(nn.Conv2d):
    """A convolution (zeros around, no groups, no dilation) that is as large as its live taps."""

    def forward(self, x: Tensor) -> Tensor:
        """As a convolution's."""
        stride, padding = self.stride[0], int(self.padding[0])
        how = way(tuple(x.shape[2:]), tuple(self.weight.shape), stride, padding) if x.is_cpu else "plain"
        if how == "plain":
            return super().forward(x)
        if how == "linear":
            return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        if how == "table":
            return _by_table(x, self.weight, self.bias, stride, padding)
        return _Blocks.apply(x, self.weight, self.bias, stride, padding)  # type: ignore[no-any-return, no-untyped-call]


@cache
def way(side: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> Way:
    """How a convolution with a weight of this shape is computed on maps of this size."""
    (height, width), (outputs, inputs, *kernel) = side, weight
    if kernel == [1, 1] and stride == 1 and padding == 0:
        return "linear"
    here = height * width
    there = _length(height, kernel[0], stride, padding) * _length(width, kernel[1], stride, padding)
    if there < 1 or here > MAP or padding >= min(kernel):
        return "plain"
    if outputs * inputs * here * there <= TABLE:
        return "table"
    return "blocks" if there <= BLOCKS else "plain"


class Block(NamedTuple):
    """One product: these columns of the output get the input's times the weight's, all three as matrices, channels last."""

    output: int
    input: int
    weight: int
    length: int
    first: bool


@cache
def blocks(side: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> list[Block]:
    """For each output pixel and each row of the kernel that reaches into the map, the live taps of that row."""
    (height, width), (outputs, inputs, rows, columns) = side, weight
    found = []
    for y in range(_length(height, rows, stride, padding)):
        for x in range(wide := _length(width, columns, stride, padding)):
            left, right = _live(x, width, columns, stride, padding)
            low, high = _live(y, height, rows, stride, padding)
            for row in range(low, high):
                source = (y * stride - padding + row) * width + x * stride - padding + left
                found.append(
                    Block(
                        output=(y * wide + x) * outputs,
                        input=source * inputs,
                        weight=(row * columns + left) * inputs,
                        length=(right - left) * inputs,
                        first=row == low,
                    )
                )
    return found


class _Blocks(torch.autograd.Function):
    """The products of `blocks`, on the tensors' own memory; autograd would make a full gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        n, _, height, width = x.shape
        outputs, _, rows, columns = weight.shape
        ctx.shape = (height, width), tuple(weight.shape), stride, padding
        tall, wide = _length(height, rows, stride, padding), _length(width, columns, stride, padding)
        x, w = _matrix(x), _matrix(weight)
        y = x.new_empty(n, tall * wide * outputs)
        for b in blocks(*ctx.shape):
            into, left, right = y.narrow(1, b.output, outputs), x.narrow(1, b.input, b.length), w.narrow(1, b.weight, b.length)
            if not b.first:
                into.addmm_(left, right.t())
            elif bias is None:
                torch.mm(left, right.t(), out=into)
            else:
                torch.addmm(bias, left, right.t(), out=into)
        ctx.save_for_backward(x, w)
        return _maps(y, tall, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        (height, width), (outputs, _, rows, columns), *_ = ctx.shape
        g = _matrix(gradient)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w)
        for b in blocks(*ctx.shape):
            part = g.narrow(1, b.output, outputs)
            dw.narrow(1, b.weight, b.length).addmm_(part.t(), x.narrow(1, b.input, b.length))
            if dx is not None:
                dx.narrow(1, b.input, b.length).addmm_(part, w.narrow(1, b.weight, b.length))
        db = g.view(-1, outputs).sum(0) if ctx.needs_input_grad[2] else None
        return None if dx is None else _maps(dx, height, width), _maps(dw, rows, columns), db, None, None


def _by_table(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """One product with the matrix from all input to all output numbers: few calls, which is what small layers are made of."""
    (_, _, height, width), (outputs, inputs, rows, columns) = x.shape, weight.shape
    tall, wide = _length(height, rows, stride, padding), _length(width, columns, stride, padding)
    taps, any_dead = table((height, width), (rows, columns), stride, padding)
    w = weight.permute(0, 2, 3, 1).reshape(outputs, rows * columns, inputs)
    if any_dead:
        w = F.pad(w, (0, 0, 0, 1))
    matrix = w.index_select(1, taps).view(outputs * tall * wide, height * width * inputs)
    each = None if bias is None else bias.repeat_interleave(tall * wide)
    y = F.linear(_matrix(x), matrix, each).view(-1, outputs, tall, wide)
    return y.contiguous(memory_format=torch.channels_last)


@cache
def table(side: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int) -> tuple[Tensor, bool]:
    """The tap between each output and each input pixel, one beyond the last where there is none, and if that occurs."""
    (height, width), (rows, columns) = side, kernel
    dead = rows * columns

    def tap(y: int, x: int, i: int, j: int) -> int:
        row, column = i - y * stride + padding, j - x * stride + padding
        return row * columns + column if 0 <= row < rows and 0 <= column < columns else dead

    there = [
        (y, x) for y in range(_length(height, rows, stride, padding)) for x in range(_length(width, columns, stride, padding))
    ]
    taps = [tap(y, x, i, j) for y, x in there for i in range(height) for j in range(width)]
    return torch.tensor(taps), dead in taps


def _length(side: int, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


def _live(place: int, side: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """The taps, from and to, that lie on the map when the kernel is at this place."""
    start = place * stride - padding
    return max(0, -start), min(kernel, side - start)


def _matrix(maps: Tensor) -> Tensor:
    """One row per image or kernel, channels last; a view where the tensor is laid out so."""
    return maps.permute(0, 2, 3, 1).reshape(len(maps), -1)


def _maps(matrix: Tensor, height: int, width: int) -> Tensor:
    return matrix.view(len(matrix), height, width, -1).permute(0, 3, 1, 2)
