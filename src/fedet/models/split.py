"""A model in two parts: a stem whose features are sent over the network, and the architecture that takes them as input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedet.models.vision import he_normal

if TYPE_CHECKING:
    from fedet.models import Model

SPLIT = "split/"
"""`split/NAME` is the architecture NAME on the features of a stem."""
CHANNELS = 16
"""Channels of the stem's features."""


class Extractor(nn.Module):
    """One 3x3 convolution to 16 channels: the same feature shape for every client."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, CHANNELS, 3, padding=1)
        he_normal(self)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.conv.weight.device

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of images."""
        return torch.relu(self.conv(x))


class Split(nn.Module):
    """A stem and the model that takes its features as input."""

    spec: dict[str, Any]

    def __init__(self, stem: Extractor, inner: Model) -> None:
        super().__init__()
        self.spec = {}
        self.stem, self.inner = stem, inner

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.stem.device

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.inner(self.stem(x))
        return logits

    def num_params(self) -> int:
        """The number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters())
