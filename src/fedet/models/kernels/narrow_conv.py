"""Convolutions with few channels, at the cost of few channels.

Processors multiply eight or sixteen channels at a time, so a convolution to six wastes up to ten of them. Here neighbouring
pixels of the output share a calculation: their kernels, each moved by a pixel, lie side by side as channels. If a 2x2 max
pool follows, it is then the larger of whole planes, which torch's own reads six numbers at a time. The results are those of
a convolution, with or without pool and ReLU behind it, to rounding.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Numbers that this processor multiplies at a time."""
FEW = 8
"""The most channels for which it pays."""


class Window(NamedTuple):
    """Pixels of the output that are calculated together, as so many rows and columns."""

    rows: int
    columns: int


@cache
def window(channels: int, kernel: tuple[int, int], lanes: int) -> Window:
    """The one that costs least per pixel: its kernels are larger than one pixel's, but waste fewer lanes."""

    def cost(w: Window) -> float:
        pixels = w.rows * w.columns
        taps = (kernel[0] + w.rows - 1) * (kernel[1] + w.columns - 1)
        return taps * math.ceil(pixels * channels / lanes) * lanes / pixels

    return min((Window(1, 2), Window(2, 2)), key=cost)


class PooledConv(nn.Sequential):
    """A convolution (stride 1, zeros around, no groups, no dilation), what normalises it if anything, 2x2 max pool, ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """Half as high and wide as the convolution's, rounded up."""
        conv, norm = self
        assert isinstance(conv, nn.Conv2d)
        padding = int(conv.padding[0])
        alone = isinstance(norm, nn.Identity) and conv.bias is not None and not conv._forward_hooks  # those want its output
        if alone and x.is_cpu and shared(tuple(x.shape[2:]), tuple(conv.weight.shape), padding):
            pooled: Tensor = _Pooled.apply(x, conv.weight, conv.bias, padding)  # type: ignore[no-untyped-call]
            return pooled
        return F.relu(F.max_pool2d(norm(conv(x)), 2, ceil_mode=True))


def shared(side: tuple[int, ...], weight: tuple[int, ...], padding: int) -> bool:
    """Whether pixels share a calculation: to few channels, on a map with even sides that is large enough to matter."""
    lengths = [n + 2 * padding - kernel + 1 for n, kernel in zip(side, weight[2:], strict=True)]
    return weight[0] <= FEW and all(n >= 16 and n % 2 == 0 for n in lengths)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        x = x.contiguous()  # plane after plane, so that the larger of two is one call on long rows
        ctx.window = together = window(len(weight), tuple(weight.shape[2:]), LANES)
        ctx.padding = padding
        kernels = _kernels(weight, together)
        maps = torch.conv2d(x, kernels, bias.repeat(math.prod(together)), stride=together, padding=padding)
        rows = torch.maximum(*_columns(maps, together))
        pooled = torch.maximum(*_rows(rows, together)).relu_()
        ctx.save_for_backward(x, kernels, maps, rows, pooled)
        return pooled.contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernels, maps, rows, pooled = ctx.saved_tensors
        given, to_rows = torch.empty_like(maps), torch.empty_like(rows)
        gradient = torch.ops.aten.threshold_backward(gradient.contiguous(), pooled, 0)
        _to_larger(gradient, _rows(rows, ctx.window), _rows(to_rows, ctx.window))
        _to_larger(to_rows, _columns(maps, ctx.window), _columns(given, ctx.window))
        wanted = [ctx.needs_input_grad[0], True, True]
        dx, dw, db = torch.ops.aten.convolution_backward(
            given, x, kernels, [len(kernels)], list(ctx.window), [ctx.padding] * 2, [1, 1], False, [0, 0], 1, wanted
        )
        return dx, _folded(dw, ctx.window), db.view(math.prod(ctx.window), -1).sum(0), None


def _columns(maps: Tensor, w: Window) -> tuple[Tensor, ...]:
    """Left and right columns of all windows: (images, rows or 1, channels, height, width) each."""
    n, channels, height, width = maps.shape
    return maps.view(n, w.rows, 2, channels // math.prod(w), height, width).unbind(2)


def _rows(columns: Tensor, w: Window) -> tuple[Tensor, ...]:
    """Upper and lower pixels of the pool's windows, (images, channels, height, width) each."""
    if w.rows == 2:
        return columns.unbind(1)
    return columns[:, 0, :, ::2], columns[:, 0, :, 1::2]


def _to_larger(gradient: Tensor, pair: tuple[Tensor, ...], into: tuple[Tensor, ...]) -> None:
    """The gradient of the larger of two: to the larger, of equals to the first, as in torch's pool."""
    torch.ge(*pair, out=into[0]).mul_(gradient)  # as ones and zeros: `where` is ten times slower
    torch.sub(gradient, into[0], out=into[1])


def _kernels(weight: Tensor, w: Window) -> Tensor:
    """One kernel per pixel of a window, each the weight moved to it, in a frame of zeros."""
    places = [(y, x) for y in range(w.rows) for x in range(w.columns)]
    moved = [F.pad(weight, (x, w.columns - 1 - x, y, w.rows - 1 - y)) for y, x in places]
    return torch.cat(moved).contiguous()


def _folded(kernels: Tensor, w: Window) -> Tensor:
    """The sum of what a window's kernels hold of the weight: the gradient of `_kernels`."""
    height, width = kernels.shape[2] - w.rows + 1, kernels.shape[3] - w.columns + 1
    places = [(y, x) for y in range(w.rows) for x in range(w.columns)]
    parts = zip(kernels.chunk(len(places)), places, strict=True)
    return torch.stack([part[:, :, y : y + height, x : x + width] for part, (y, x) in parts]).sum(0)


class NarrowConv2d(nn.Conv2d):
    """A convolution (stride 1, no padding, no groups, no dilation) whose input has few channels, as its gradient then has."""

    def forward(self, x: Tensor) -> Tensor:
        """As a convolution's."""
        if self.in_channels > FEW or self.padding != (0, 0) or not (x.is_cpu and x.requires_grad):
            return super().forward(x)
        return _Narrow.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, dw, db = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, ctx.needs_input_grad[2]]
        )
        return _input_gradient(gradient.contiguous(), weight, x.shape[3]), dw, db


def _input_gradient(gradient: Tensor, weight: Tensor, width: int) -> Tensor:
    """Plane after plane, which is faster for few channels, and as a pool of planes behind it wants it."""
    if LANES < 16 or width % 2:
        return torch.conv_transpose2d(gradient, weight.contiguous())
    # A convolution of the output's gradient with the kernels turned around: two columns at a time.
    kernels = _kernels(weight.flip(2, 3).transpose(0, 1), Window(1, 2))
    padding = weight.shape[2] - 1, weight.shape[3] - 1
    pairs = torch.conv2d(gradient, kernels, stride=(1, 2), padding=padding)
    n, _, height, half = pairs.shape
    return pairs.view(n, 2, -1, height, half).permute(0, 2, 3, 4, 1).reshape(n, -1, height, width)
