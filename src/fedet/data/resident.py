"""A client's examples, normalised and laid out once for as long as it trains on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedet.data import Examples

LIMIT = 1 << 28
"""The most bytes that one client's training may keep in memory this way: 21,845 images of CIFAR."""


@dataclass(frozen=True)
class Resident:
    """Model-ready inputs and labels in memory; with `last`, images are stored channels last and returned in that layout."""

    data: Tensor
    labels: Tensor
    last: bool

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, index: Tensor) -> Tensor:
        """Inputs at these positions."""
        rows = self.data.index_select(0, index)
        return rows.permute(0, 3, 1, 2) if self.last else rows

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions."""
        return self.inputs(index), self.labels.index_select(0, index)


def resident(data: Any, visits: int, last: bool) -> Any:
    """The same examples, normalised once if each will be visited at least twice; otherwise the data unchanged."""
    if type(data) is not Examples or visits < 2 * len(data) or data.dataset.inputs.dtype != torch.uint8:
        return data
    shape = data.dataset.input_shape
    if 4 * len(data) * torch.Size(shape).numel() > LIMIT:
        return data
    inputs = data.inputs(torch.arange(len(data)))
    last = last and len(shape) == 3 and shape[0] > 1  # with one channel both layouts are the same
    return Resident(inputs.permute(0, 2, 3, 1).contiguous() if last else inputs, data.labels, last)
