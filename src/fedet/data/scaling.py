"""Standardised inputs: each feature with mean 0 and standard deviation 1 over all clients' training examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedet.data.source import Dataset
from fedet.errors import ConfigError


@dataclass(frozen=True)
class Scaling:
    """The mean and the standard deviation of every feature."""

    mean: Tensor
    std: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """The standardised inputs."""
        return ((inputs.double() - self.mean) / self.std).float()


def fit(dataset: Dataset, rows: Tensor) -> Scaling:
    """The scaling that these rows, all clients' training examples, determine; a constant feature is only centred."""
    if dataset.inputs.dtype == torch.uint8 or dataset.vocab_size is not None:
        what = "images are normalised anyway" if dataset.vocab_size is None else "texts are not numbers"
        raise ConfigError(f"data.standardise is for tables of numbers, and {dataset.name} is none ({what}): set it to false")
    values = dataset.inputs[rows].double()
    std = values.std(dim=0, correction=0)
    return Scaling(values.mean(dim=0), torch.where(std > 0, std, torch.ones_like(std)))
