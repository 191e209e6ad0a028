"""A multilayer perceptron for tables, or for any other input, which it flattens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from fedet.config.sources import nearest
from fedet.errors import ConfigError
from fedet.models.vision import he_normal

NAME = "mlp"
DEFAULTS = {"hidden": 64, "depth": 2}
"""The options and their defaults: units per hidden layer (times the model's `width`) and number of hidden layers."""


class MLP(nn.Module):
    """Linear layers, each followed by a ReLU; `width` is the size of the last one."""

    def __init__(self, input_shape: tuple[int, ...], hidden: int, depth: int) -> None:
        super().__init__()
        sizes = [math.prod(input_shape), *[hidden] * depth]
        self.layers = nn.ModuleList([nn.Linear(before, after) for before, after in pairwise(sizes)])
        self.width = hidden
        he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last hidden layer."""
        x = x.flatten(1).float()  # tables of whole numbers, too
        for layer in self.layers:
            x = layer(x).relu()
        return x


def make(variant: Mapping[str, Any], options: Mapping[str, Any], input_shape: tuple[int, ...]) -> MLP:
    """The body that these settings describe."""
    for key, value in options.items():
        if key not in DEFAULTS:
            raise ConfigError(f"'{NAME}' has no option '{key}'{nearest(key, DEFAULTS)}; known: {', '.join(DEFAULTS)}")
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise ConfigError(f"options.{key} = {value!r} of '{NAME}' must be a whole number from 1 to 65536")
    if any(variant[key] != other for key, other in (("stem", "cifar"), ("norm", "none"), ("conv_bias", True))):
        raise ConfigError(f"stem, norm and conv_bias have no effect on '{NAME}': set width, options.hidden and options.depth")
    chosen = {**DEFAULTS, **options}
    return MLP(input_shape, max(1, round(chosen["hidden"] * variant["width"])), chosen["depth"])
