"""The transform of the public images as batched tensor code: crop, flip, colour jitter, grayscale, normalise.

Images are floats in [0, 1] of shape (n, channels, height, width); each has its own random numbers. Unlike code on
8-bit images, nothing is rounded between two operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

if TYPE_CHECKING:
    from fedet.config import AugmentConfig

_LUMA = (0.2989, 0.587, 0.114)  # ITU-R 601


def transform(images: Tensor, cfg: AugmentConfig, generator: Generator) -> Tensor:
    """Augment uint8 images and normalise them; the result depends on all of the batch's size but on each image alone."""
    x = images.to(torch.float32) / 255
    if cfg.crop:
        x = random_crop(x, cfg.crop, generator)
    if cfg.flip:
        x = random_flip(x, generator)
    if cfg.color and cfg.color_prob:
        x = color_jitter(x, cfg.color, cfg.color_prob, generator)
    if cfg.gray:
        x = random_grayscale(x, cfg.gray, generator)
    return normalise(x)


def normalise(x: Tensor) -> Tensor:
    """Mean 0.5 and standard deviation 0.5: [0, 1] becomes [-1, 1]."""
    return (x - 0.5) / 0.5


def random_crop(x: Tensor, padding: int, generator: Generator) -> Tensor:
    """Cut a window of the image's own size out of the image with a black border."""
    shift = torch.randint(0, 2 * padding + 1, (len(x), 2), generator=generator)
    return crop(x, padding, shift[:, 0], shift[:, 1])


def crop(x: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """The windows that begin at these rows and columns of the padded images."""
    n, channels, height, width = x.shape
    padded = F.pad(x, (padding,) * 4)
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    flat = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).reshape(n, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, flat).reshape(x.shape)


def random_flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror half of the images left to right."""
    return torch.where(_chosen(len(x), 0.5, generator)[:, None, None, None], x.flip(3), x)


def color_jitter(x: Tensor, strength: float, prob: float, generator: Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue, in an order of each image's own, with this probability."""
    n = len(x)
    applied = _chosen(n, prob, generator)
    low, high = max(0.0, 1 - 0.8 * strength), 1 + 0.8 * strength
    factors = torch.rand((n, 4), generator=generator) * (high - low) + low
    factors[:, 3] = (torch.rand(n, generator=generator) * 2 - 1) * 0.2 * strength
    order = torch.rand((n, 4), generator=generator).argsort(dim=1)
    operations = (brightness, contrast, saturation, hue) if x.shape[1] == 3 else (brightness, contrast)
    x = x.clone()
    for step in range(4):
        for number, operation in enumerate(operations):
            rows = torch.nonzero(applied & (order[:, step] == number)).flatten()
            if len(rows):
                x[rows] = operation(x[rows], factors[rows, number])
    return x


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with black; a factor for each image."""
    return (x * _each(factor)).clamp(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean gray."""
    mean = _luma(x).mean(dim=(1, 2, 3), keepdim=True)
    return (mean + _each(factor) * (x - mean)).clamp(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the gray version."""
    gray = _luma(x)
    return (gray + _each(factor) * (x - gray)).clamp(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the colour circle by this part of a full turn."""
    hsv = rgb_to_hsv(x)
    hsv[:, 0] = _turn(hsv[:, 0] + shift[:, None, None])
    return hsv_to_rgb(hsv)


def random_grayscale(x: Tensor, prob: float, generator: Generator) -> Tensor:
    """Turn colour images gray with this probability; other images stay."""
    chosen = _chosen(len(x), prob, generator)[:, None, None, None]
    return torch.where(chosen, _luma(x).expand_as(x), x) if x.shape[1] == 3 else x


def rgb_to_hsv(x: Tensor) -> Tensor:
    """Hue, saturation and value, all in [0, 1]; gray has hue 0."""
    red, green, blue = x.unbind(dim=1)
    value = x.amax(dim=1)
    spread = value - x.amin(dim=1)
    safe = torch.where(spread > 0, spread, 1)
    sextant = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sextant = torch.where(value == red, (green - blue) / safe, sextant)
    return torch.stack([_turn(sextant / 6), spread / torch.where(value > 0, value, 1), value], dim=1)


def hsv_to_rgb(hsv: Tensor) -> Tensor:
    """The inverse of `rgb_to_hsv`."""
    angle, sat, value = hsv.unbind(dim=1)
    chroma = value * sat
    channels = []
    for offset in (5, 3, 1):
        k = 6 * _turn(angle + offset / 6)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _turn(angle: Tensor) -> Tensor:
    return angle - angle.floor()  # far faster than the % operator


def _luma(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * torch.tensor(_LUMA, dtype=x.dtype)[:, None, None]).sum(dim=1, keepdim=True)


def _each(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]


def _chosen(n: int, prob: float, generator: Generator) -> Tensor:
    return torch.rand(n, generator=generator) < prob
