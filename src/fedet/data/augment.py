"""The transform of the public images as batched tensor code: crop, flip, colour jitter, grayscale, normalise.

Images are floats in [0, 1] of shape (n, channels, height, width); each has its own random numbers. Unlike code on
8-bit images, nothing is rounded between two operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

if TYPE_CHECKING:
    from fedet.config import AugmentConfig

_LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601
_CHANNELS = torch.tensor([5 / 6, 3 / 6, 1 / 6])[:, None, None]
_MINUS_ONE, _MINUS_THIRD, _TWO = torch.tensor(-1.0), torch.tensor(-1 / 3), torch.tensor(2.0)
_TINY = torch.tensor(1e-30)  # keeps 0 / 0 from being NaN, and changes no other quotient


class Draws(NamedTuple):
    """Each image's random numbers: where it is cropped, and whether and how it is changed."""

    corner: Tensor
    flip: Tensor
    jitter: Tensor
    factors: Tensor
    order: Tensor
    gray: Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[Draws]) -> Draws:
        """Join the random numbers of several groups of images."""
        return cls(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def select(self, rows: Tensor) -> Draws:
        """The random numbers of some images."""
        return Draws(*(values[rows] for values in self))


def draw(n: int, cfg: AugmentConfig, generator: Generator) -> Draws:
    """Random numbers for n images; nothing is drawn for operations that are turned off."""
    never = torch.zeros(n, dtype=torch.bool)
    corner = torch.randint(0, 2 * cfg.crop + 1, (n, 2), generator=generator) if cfg.crop else torch.zeros((n, 2))
    flip = _chosen(n, 0.5, generator) if cfg.flip else never
    jitter, factors, order = never, torch.zeros((n, 4)), torch.zeros((n, 4))
    if cfg.color and cfg.color_prob:
        jitter = _chosen(n, cfg.color_prob, generator)
        low, high = max(0.0, 1 - 0.8 * cfg.color), 1 + 0.8 * cfg.color
        factors = torch.rand((n, 4), generator=generator) * (high - low) + low
        factors[:, 3] = (torch.rand(n, generator=generator) * 2 - 1) * 0.2 * cfg.color
        order = torch.rand((n, 4), generator=generator).argsort(dim=1)
    gray = _chosen(n, cfg.gray, generator) if cfg.gray else never
    return Draws(corner, flip, jitter, factors, order, gray)


def transform(images: Tensor, cfg: AugmentConfig, draws: Draws, out: Tensor | None = None) -> Tensor:
    """Augment uint8 images with these random numbers and normalise them; no image affects another."""
    images = crop(images, cfg.crop, draws.corner[:, 0], draws.corner[:, 1]) if cfg.crop else images
    x = torch.empty(images.shape) if out is None else out
    x.copy_(mirror(images, draws.flip)).div_(255)
    return torch.add(_MINUS_ONE, grayscale(color_jitter(x, draws), draws.gray), alpha=2, out=x)  # the same bits as `normalise`


def normalise(x: Tensor) -> Tensor:
    """Mean 0.5 and standard deviation 0.5: [0, 1] becomes [-1, 1]."""
    return (x - 0.5) / 0.5


def crop(x: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """The windows that start at these rows and columns of the padded images."""
    padded = F.pad(x, (padding,) * 4).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, x.shape[2:], axis=(2, 3))
    # NumPy copies a window row by row, torch element by element.
    return torch.from_numpy(windows[np.arange(len(x)), :, top.long().numpy(), left.long().numpy()])


def mirror(x: Tensor, chosen: Tensor) -> Tensor:
    """Flip the chosen images horizontally."""
    rows = chosen.nonzero().flatten()
    out = x.clone()
    out.numpy()[rows.numpy()] = x.index_select(0, rows).flip(3).numpy()
    return out


def color_jitter(x: Tensor, draws: Draws) -> Tensor:
    """Change brightness, contrast, saturation and hue of the chosen images in place, in each image's own order."""
    operations = (brightness, contrast, saturation, hue) if x.shape[1] == 3 else (brightness, contrast)
    chosen = draws.jitter.nonzero().flatten()
    for order, rows in _by_order(draws.order[chosen], chosen):
        y = x.index_select(0, rows)
        for number in (n for n in order if n < len(operations)):
            y = operations[number](y, draws.factors[rows, number])
        x.index_copy_(0, rows, y)
    return x


def _by_order(orders: Tensor, rows: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Each order of operations with the rows that have it."""
    code = (orders.long() * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    for value in code.unique().tolist():  # type: ignore[no-untyped-call]
        same = (code == value).nonzero().flatten()
        yield orders[same[0]].tolist(), rows[same]


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with black, by each image's factor."""
    return (x * _per_image(factor)).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean gray, which is the gray of its mean colour."""
    return _blend(_luma(x.mean(dim=(2, 3), keepdim=True)), x, factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grayscale image."""
    return _blend(_luma(x), x, factor)


def _blend(base: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    return (x * _per_image(factor)).add_(base * _per_image(1 - factor)).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Rotate each image's hue by this fraction of a full turn."""
    angle, spread, value = _hue_spread_value(x)
    angle.add_(shift[:, None, None, None] + 1)  # positive, so that its fractional part is the new angle
    place = (angle + _CHANNELS).frac_().sub_(1 / 3).abs_()
    less = torch.add(_TWO, place, alpha=-6, out=place).clamp_(0, 1)  # how far each channel is below the largest one
    return torch.addcmul(value, spread, less, value=-1)


def _hue_spread_value(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in turns (0 to 1, gray at 0), the difference between the largest and smallest channel, and the largest."""
    red, green, blue = (channel.unsqueeze(1) for channel in x.unbind(dim=1))
    high, low = torch.maximum(green, blue), torch.minimum(green, blue)
    value, middle = torch.maximum(red, high), torch.minimum(red, high)
    # Choices are computed as ones and zeros: `where` is many times slower.
    is_blue = torch.lt(green, blue, out=torch.empty_like(high))
    not_red = torch.lt(red, high, out=high)
    spread = value - torch.minimum(middle, low)
    # Red is at 0 (at -1 from blue's side), green at -1/3, blue at 2/3; negative values count backwards until `abs_`.
    sector = torch.add(_MINUS_THIRD, is_blue, alpha=2).mul_(not_red).sub_(is_blue)
    ahead = middle.sub_(low).div_(torch.add(_TINY, spread, alpha=6))
    return sector.add_(ahead).abs_(), spread, value


def grayscale(x: Tensor, chosen: Tensor) -> Tensor:
    """Make the chosen colour images gray, in place."""
    if x.shape[1] == 3:
        rows = chosen.nonzero().flatten()
        x.index_copy_(0, rows, _luma(x.index_select(0, rows)).expand(-1, 3, -1, -1))
    return x


def _luma(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    red, green, blue = (channel.unsqueeze(1) for channel in x.unbind(dim=1))
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def _per_image(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]


def _chosen(n: int, prob: float, generator: Generator) -> Tensor:
    return torch.rand(n, generator=generator) < prob
