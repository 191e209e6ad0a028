"""Convolutions with few channels, without the waste that torch's have there.

A CPU multiplies eight or sixteen channels at a time, so a convolution to six channels wastes up to ten lanes. Here adjacent
output pixels are computed together: their kernels, each shifted by a pixel, are stacked as channels. A 2x2 max pool behind
the convolution is then the maximum of whole planes, which torch's own pool reads six numbers at a time. The results are
those of a convolution, with or without pool and ReLU, to rounding.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedet.models.kernels import switch

LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Numbers that this CPU multiplies at a time."""
MAX_CHANNELS = 8
"""The most channels for which this is faster."""


class Window(NamedTuple):
    """The output pixels that are computed together."""

    rows: int
    columns: int


@cache
def window(channels: int, kernel: tuple[int, int], lanes: int) -> Window:
    """The window with the lowest cost per pixel: a larger one needs larger kernels but wastes fewer lanes."""

    def cost(w: Window) -> float:
        pixels = w.rows * w.columns
        size = (kernel[0] + w.rows - 1) * (kernel[1] + w.columns - 1)
        return size * math.ceil(pixels * channels / lanes) * lanes / pixels

    return min((Window(1, 2), Window(2, 2)), key=cost)


class PooledConv(nn.Sequential):
    """A convolution (stride 1, zero padding, no groups, no dilation), its normalisation or identity, 2x2 max pool and ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps half as high and wide as the convolution's, rounded up."""
        conv, norm = self
        assert isinstance(conv, nn.Conv2d)
        padding = int(conv.padding[0])
        alone = isinstance(norm, nn.Identity) and conv.bias is not None and not conv._forward_hooks  # hooks need its output
        usable = switch.enabled() and alone and x.is_cpu
        if usable and applies(tuple(x.shape[2:]), tuple(conv.weight.shape), padding):
            pooled: Tensor = _Pooled.apply(x, conv.weight, conv.bias, padding)  # type: ignore[no-untyped-call]
            return pooled
        return F.relu(F.max_pool2d(norm(conv(x)), 2, ceil_mode=True))


def applies(side: tuple[int, ...], weight: tuple[int, ...], padding: int) -> bool:
    """Whether a layer has few output channels, and output maps with even sides that are large enough to matter."""
    lengths = [n + 2 * padding - kernel + 1 for n, kernel in zip(side, weight[2:], strict=True)]
    return weight[0] <= MAX_CHANNELS and all(n >= 16 and n % 2 == 0 for n in lengths)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        x = x.contiguous()  # planes, so that each maximum is one call on long rows
        ctx.window = w = window(len(weight), tuple(weight.shape[2:]), LANES)
        ctx.padding = padding
        kernels = _shifted_kernels(weight, w)
        maps = torch.conv2d(x, kernels, bias.repeat(math.prod(w)), stride=w, padding=padding)
        rows = torch.maximum(*_columns(maps, w))
        pooled = torch.maximum(*_rows(rows, w)).relu_()
        ctx.save_for_backward(x, kernels, maps, rows, pooled)
        return pooled.contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernels, maps, rows, pooled = ctx.saved_tensors
        maps_gradient, rows_gradient = torch.empty_like(maps), torch.empty_like(rows)
        gradient = torch.ops.aten.threshold_backward(gradient.contiguous(), pooled, 0)
        _maximum_backward(gradient, _rows(rows, ctx.window), _rows(rows_gradient, ctx.window))
        _maximum_backward(rows_gradient, _columns(maps, ctx.window), _columns(maps_gradient, ctx.window))
        wanted = [ctx.needs_input_grad[0], True, True]
        dx, dw, db = torch.ops.aten.convolution_backward(
            maps_gradient, x, kernels, [len(kernels)], list(ctx.window), [ctx.padding] * 2, [1, 1], False, [0, 0], 1, wanted
        )
        return dx, _sum_shifted(dw, ctx.window), db.view(math.prod(ctx.window), -1).sum(0), None


def _columns(maps: Tensor, w: Window) -> tuple[Tensor, ...]:
    """Left and right columns of all windows: (images, rows or 1, channels, height, width) each."""
    n, channels, height, width = maps.shape
    return maps.view(n, w.rows, 2, channels // math.prod(w), height, width).unbind(2)


def _rows(columns: Tensor, w: Window) -> tuple[Tensor, ...]:
    """Upper and lower pixels of the pool's windows, (images, channels, height, width) each."""
    if w.rows == 2:
        return columns.unbind(1)
    return columns[:, 0, :, ::2], columns[:, 0, :, 1::2]


def _maximum_backward(gradient: Tensor, pair: tuple[Tensor, ...], into: tuple[Tensor, ...]) -> None:
    """Write the gradient to the larger of two; of two equals to the first, as torch's pool does."""
    torch.ge(*pair, out=into[0]).mul_(gradient)  # a product with ones and zeros: `where` is ten times slower
    torch.sub(gradient, into[0], out=into[1])


def _shifted_kernels(weight: Tensor, w: Window) -> Tensor:
    """One kernel per pixel of a window: the weight shifted to that pixel, padded with zeros."""
    moved = [F.pad(weight, (x, w.columns - 1 - x, y, w.rows - 1 - y)) for y, x in _offsets(w)]
    return torch.cat(moved).contiguous()


def _sum_shifted(kernels: Tensor, w: Window) -> Tensor:
    """The gradient of `_shifted_kernels`: the sum over a window of the parts that hold the weight."""
    height, width = kernels.shape[2] - w.rows + 1, kernels.shape[3] - w.columns + 1
    parts = zip(kernels.chunk(math.prod(w)), _offsets(w), strict=True)
    return torch.stack([part[:, :, y : y + height, x : x + width] for part, (y, x) in parts]).sum(0)


def _offsets(w: Window) -> list[tuple[int, int]]:
    return [(y, x) for y in range(w.rows) for x in range(w.columns)]


class NarrowConv2d(nn.Conv2d):
    """A convolution (stride 1, no padding, no groups, no dilation) with a faster gradient for inputs of few channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the convolution."""
        usable = switch.enabled() and x.is_cpu and x.requires_grad
        if not usable or self.in_channels > MAX_CHANNELS or self.padding != (0, 0):
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
    """In planes, which is faster for few channels and the layout that `_Pooled` needs."""
    if LANES < 16 or width % 2:
        return torch.conv_transpose2d(gradient, weight.contiguous())
    # A convolution of the output's gradient with the flipped kernels, two columns at a time.
    kernels = _shifted_kernels(weight.flip(2, 3).transpose(0, 1), Window(1, 2))
    padding = weight.shape[2] - 1, weight.shape[3] - 1
    pairs = torch.conv2d(gradient, kernels, stride=(1, 2), padding=padding)
    n, _, height, half = pairs.shape
    return pairs.view(n, 2, -1, height, half).permute(0, 2, 3, 4, 1).reshape(n, -1, height, width)
