"""Convolutions on maps of a few pixels, where most taps of a padded kernel only ever see the padding.

A 3x3 kernel on a map of one pixel multiplies eight zeros for every number, on 2x2 five for every four. Here only the live
taps are multiplied. Weights, their names and the result are a convolution's, to rounding; dead taps get the gradient zero.
Where a training step would only add these zeros, it can leave them alone (`lent`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedet.models.kernels.winograd import TiledConv2d

Way = Literal["plain", "linear", "table", "blocks"]

MAP = 16
"""Pixels of the largest map that is not left to torch: on 8x8 nearly all taps are live."""
TABLE = 1 << 15
"""Numbers in the largest matrix that is spelt out; beyond, copying costs more than the calls it saves (see docs/adr/0006)."""
BLOCKS = 4
"""Pixels of the largest output made block by block: each takes up to three calls."""


class LiveConv2d(TiledConv2d):
    """A convolution (zeros around, no groups, no dilation) that is as large as its live taps."""

    lender: Lender | None = None

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
        taps = self._borrowed(x, stride, padding)
        return _Blocks.apply(x, self.weight, taps, self.bias, stride, padding)  # type: ignore[no-any-return, no-untyped-call]

    def _borrowed(self, x: Tensor, stride: int, padding: int) -> Tensor | None:
        """The live taps as a tensor of their own, if they are to be trained in place of the weight."""
        if self.lender is None or not self.weight.requires_grad:
            return None
        first, last = union(tuple(x.shape[2:]), tuple(self.weight.shape), stride, padding)
        return None if last - first == self.weight.shape[2] else self.lender.taps(self.weight, first, last)


class Lender:
    """Tensors with a gradient of their own on the memory of live taps, which are added to those that are trained."""

    def __init__(self, trained: list[Tensor]) -> None:
        self._trained = trained
        self._lent: dict[Tensor, tuple[slice, Tensor]] = {}

    def taps(self, weight: Tensor, first: int, last: int) -> Tensor | None:
        """Taps `first` to `last` of a weight in both directions, channels last."""
        part = slice(first, last)
        if weight not in self._lent:
            taps = weight.detach().permute(0, 2, 3, 1)[:, part, part].requires_grad_()
            self._lent[weight] = part, taps
            self._trained.append(taps)
        known, taps = self._lent[weight]
        return taps if known == part else None  # on maps of another size the weight gets a gradient as usual

    def settle(self) -> None:
        """Where a weight has a gradient, too, because the loss speaks of it, let that one hold all."""
        for weight, (part, taps) in self._lent.items():
            if weight.grad is not None and taps.grad is not None:
                weight.grad.permute(0, 2, 3, 1)[:, part, part].add_(taps.grad)
                taps.grad = None


@contextlib.contextmanager
def lent(model: nn.Module, trained: list[Tensor]) -> Iterator[Lender]:
    """Train live taps in place of weights whose other taps are dead, for an optimiser that moves nothing without a gradient.

    They join `trained` with the first forward pass. Of the 11M weights of a ResNet18 with the ImageNet stem 4M live on CIFAR.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LiveConv2d)]
    lender = Lender(trained)
    for layer in layers:
        layer.lender = lender
    try:
        yield lender
    finally:
        for layer in layers:
            layer.lender = None


@cache
def union(side: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int) -> tuple[int, int]:
    """The taps, from and to, that any output needs, of a square kernel on a square map; elsewhere all."""
    (height, width), (_, _, rows, columns) = side, weight
    if height != width or rows != columns:
        return 0, rows
    reached = [_live(place, height, rows, stride, padding) for place in range(_length(height, rows, stride, padding))]
    return min(low for low, _ in reached), max(high for _, high in reached)


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
    """The products of `blocks`, on the tensors' own memory; autograd would make a full gradient for each of them.

    The gradient is that of `taps` where they are given, else the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, taps: Tensor | None, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        n, _, height, width = x.shape
        outputs, _, rows, columns = weight.shape
        ctx.shape = (height, width), tuple(weight.shape), stride, padding
        ctx.taps = None if taps is None else taps.shape[1]
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
        (height, width), (outputs, inputs, rows, columns), stride, padding = ctx.shape
        g = _matrix(gradient)
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        places = [b.weight for b in blocks(*ctx.shape)]
        if ctx.taps:
            shape, cut = (outputs, inputs, ctx.taps, ctx.taps), union(*ctx.shape)[0]
            rows = columns = ctx.taps
            places = [b.weight for b in blocks((height, width), shape, stride, padding - cut)]
        dw = w.new_zeros(outputs, rows * columns * inputs)
        for b, place in zip(blocks(*ctx.shape), places, strict=True):
            part = g.narrow(1, b.output, outputs)
            dw.narrow(1, place, b.length).addmm_(part.t(), x.narrow(1, b.input, b.length))
            if dx is not None:
                dx.narrow(1, b.input, b.length).addmm_(part, w.narrow(1, b.weight, b.length))
        db = g.view(-1, outputs).sum(0) if ctx.needs_input_grad[3] else None
        dx = None if dx is None else _maps(dx, height, width)
        if ctx.taps:
            return dx, None, dw.view(outputs, rows, columns, inputs), db, None, None
        return dx, _maps(dw, rows, columns), None, db, None, None


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
