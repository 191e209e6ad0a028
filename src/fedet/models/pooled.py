"""A convolution and the 2x2 max pool behind it in one, for layers with few channels.

Processors multiply eight or sixteen channels at a time, so a convolution to six wastes most of that, and torch's pool reads
six numbers at a time. Here one convolution makes the four outputs of a pool's window as channels, a kernel for each of its
corners, and the pool is the larger of whole planes. The result is a convolution's with a pool behind it, to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEW = 8
"""The most channels for which it pays."""
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


class PooledConv(nn.Sequential):
    """A convolution (stride 1, zeros around, no groups, no dilation), what normalises it if anything, and a 2x2 max pool."""

    def forward(self, x: Tensor) -> Tensor:
        """Half as high and wide as the convolution's, rounded up."""
        conv, norm = self
        assert isinstance(conv, nn.Conv2d)
        padding = int(conv.padding[0])
        alone = isinstance(norm, nn.Identity) and conv.bias is not None and not conv._forward_hooks  # those want its output
        if alone and x.is_cpu and by_corners(tuple(x.shape[2:]), tuple(conv.weight.shape), padding):
            pooled: Tensor = _ByCorners.apply(x, conv.weight, conv.bias, padding)  # type: ignore[no-untyped-call]
            return pooled
        return F.max_pool2d(norm(conv(x)), 2, ceil_mode=True)


def by_corners(side: tuple[int, ...], weight: tuple[int, ...], padding: int) -> bool:
    """Whether a layer is computed so: to few channels, on a map with even sides that is large enough to matter."""
    lengths = [n + 2 * padding - kernel + 1 for n, kernel in zip(side, weight[2:], strict=True)]
    return weight[0] <= FEW and all(n >= 16 and n % 2 == 0 for n in lengths)


class _ByCorners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
        x = x.contiguous()  # plane after plane, so that the larger of two is one call on long rows
        kernels = _kernels(weight)
        maps = torch.conv2d(x, kernels, bias.repeat(4), stride=2, padding=padding)
        a, b, c, d = maps.chunk(4, dim=1)
        upper, lower = torch.maximum(a, b), torch.maximum(c, d)
        ctx.padding = padding
        ctx.save_for_backward(x, kernels, maps, upper, lower)
        return torch.maximum(upper, lower).contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernels, maps, upper, lower = ctx.saved_tensors
        given = torch.empty_like(maps)
        (a, b, c, d), (to_a, to_b, to_c, to_d) = maps.chunk(4, dim=1), given.chunk(4, dim=1)
        to_upper, to_lower = _shared(gradient.contiguous(), upper, lower, torch.empty_like(upper), torch.empty_like(lower))
        _shared(to_upper, a, b, to_a, to_b)
        _shared(to_lower, c, d, to_c, to_d)
        wanted = [ctx.needs_input_grad[0], True, True]
        dx, dw, db = torch.ops.aten.convolution_backward(
            given, x, kernels, [len(kernels)], [2, 2], [ctx.padding] * 2, [1, 1], False, [0, 0], 1, wanted
        )
        return dx, _folded(dw), db.view(4, -1).sum(0), None


def _shared(gradient: Tensor, one: Tensor, other: Tensor, to_one: Tensor, to_other: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the larger of two: to the larger, of equals to the first, as in torch's pool."""
    torch.ge(one, other, out=to_one).mul_(gradient)  # as ones and zeros: `where` is ten times slower
    return to_one, torch.sub(gradient, to_one, out=to_other)


def _kernels(weight: Tensor) -> Tensor:
    """One kernel per corner of the pool's window, each the weight moved by a pixel or none, in a frame of zeros."""
    outputs, inputs, rows, columns = weight.shape
    out = weight.new_zeros(4 * outputs, inputs, rows + 1, columns + 1)
    for corner, (y, x) in zip(out.chunk(4), CORNERS, strict=True):
        corner[:, :, y : y + rows, x : x + columns] = weight
    return out


def _folded(kernels: Tensor) -> Tensor:
    """The sum of what the corners' kernels hold of the weight: the gradient of `_kernels`."""
    rows, columns = (n - 1 for n in kernels.shape[2:])
    parts = [corner[:, :, y : y + rows, x : x + columns] for corner, (y, x) in zip(kernels.chunk(4), CORNERS, strict=True)]
    return torch.stack(parts).sum(0)
