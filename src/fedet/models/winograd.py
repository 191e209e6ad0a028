"""The gradient of a wide 3x3 convolution's weight on small maps, with 4 products in place of 9.

Winograd's minimal filtering (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016), F(2x2, 3x3), in
its transposed form: input windows of 4x4 and output tiles of 2x2 each become 16 numbers, which are multiplied place by place
and summed over all tiles; the 16 sums then become the 9 taps. Sums and halves only, so the rounding is a convolution's.

Output and input gradient are left to torch: of those, only this one is slow there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WIDE = 1 << 15
"""Inputs times outputs of the narrowest layer for which it pays."""
SIDE = 8
"""The largest side of a map for which it pays."""
PIECE = 64
"""Images at a time: 17 MB of windows for 256 channels on 8x8."""


class TiledConv2d(nn.Conv2d):
    """A convolution (zeros around, no groups, no dilation) that learns by tiles where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """As a convolution's."""
        tiles = pays(tuple(x.shape[2:]), tuple(self.weight.shape), self.stride, self.padding)
        if not (tiles and x.is_cpu and torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        return _Tiled.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


@cache
def pays(side: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: Any) -> bool:
    """Whether a layer is wide, its map small and even, and its kernel the one that this is for."""
    small = all(n % 2 == 0 and n <= SIDE for n in side) and min(side) > 2
    return small and weight[0] * weight[1] >= WIDE and weight[2:] == (3, 3) and stride == (1, 1) and padding == (1, 1)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
            )[0]
        g = gradient.permute(0, 2, 3, 1).contiguous()
        db = g.flatten(0, 2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, weight_gradient(x.permute(0, 2, 3, 1).contiguous(), g), db


def weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    """From inputs and output gradients, both (images, height, width, channels) with even sides; as (outputs, inputs, 3, 3)."""
    inputs, outputs = x.shape[3], g.shape[3]
    sums = x.new_zeros(16, outputs, inputs)
    for these, those in zip(torch.split(x, PIECE), torch.split(g, PIECE), strict=True):
        sums.baddbmm_(_tiles(those).view(16, -1, outputs).transpose(1, 2), _windows(these).view(16, -1, inputs))
    taps = torch.mm(_to_taps(), sums.view(16, -1)).view(9, outputs, inputs).transpose(0, 1).contiguous()
    return taps.view(outputs, 3, 3, inputs).permute(0, 3, 1, 2)


def _windows(x: Tensor) -> Tensor:
    """All 4x4 windows of the padded maps, two pixels apart: (4, 4, images, height / 2, width / 2, channels)."""
    n, height, width, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    rows = x.new_empty(4, n, height // 2, width + 2, channels)
    _window(padded[:, :-2:2], padded[:, 1:-1:2], padded[:, 2::2], padded[:, 3::2], rows)
    out = x.new_empty(4, 4, n, height // 2, width // 2, channels)
    _window(rows[..., :-2:2, :], rows[..., 1:-1:2, :], rows[..., 2::2, :], rows[..., 3::2, :], out.transpose(0, 1))
    return out


def _window(a: Tensor, b: Tensor, c: Tensor, d: Tensor, out: Tensor) -> None:
    torch.sub(a, c, out=out[0])
    torch.add(b, c, out=out[1])
    torch.sub(c, b, out=out[2])
    torch.sub(b, d, out=out[3])


def _tiles(g: Tensor) -> Tensor:
    """All 2x2 tiles of the output's gradient: (4, 4, images, height / 2, width / 2, channels)."""
    n, height, width, channels = g.shape
    pairs = g.view(n, height // 2, 2, width // 2, 2, channels)
    rows = g.new_empty(4, n, height // 2, width // 2, 2, channels)
    _tile(pairs[:, :, 0], pairs[:, :, 1], rows)
    out = g.new_empty(4, 4, n, height // 2, width // 2, channels)
    _tile(rows[..., 0, :], rows[..., 1, :], out.transpose(0, 1))
    return out


def _tile(a: Tensor, b: Tensor, out: Tensor) -> None:
    out[0] = a
    torch.add(a, b, out=out[1])
    torch.sub(a, b, out=out[2])
    torch.neg(b, out=out[3])


@cache
def _to_taps() -> Tensor:
    """The matrix from 16 sums to 9 taps."""
    one = torch.tensor([[1.0, 0.5, 0.5, 0.0], [0.0, 0.5, -0.5, 0.0], [0.0, 0.5, 0.5, 1.0]])
    return torch.kron(one, one)
