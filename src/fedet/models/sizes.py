"""Refuse a model that is too large before memory is allocated for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from fedet.errors import ConfigError

USUAL = {"width": 1.0, "feature_width": 512, "representation_width": 128, "num_classes": 1000}
"""Sizes up to these are never the reason that a model is too large."""
USUAL_INPUT = 3 * 224 * 224


def unusual(sizes: Mapping[str, Any], input_shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that can be the reason that a model is too large, by the names of their settings."""
    found = {key: value for key, value in sizes.items() if key in USUAL and value > USUAL[key]}
    if math.prod(input_shape) > USUAL_INPUT:
        found["input_shape"] = input_shape
    return found | {f"options.{key}": value for key, value in options.items() if isinstance(value, int | float)}


def ensure_it_fits(name: str, sizes: Mapping[str, Any], make: Callable[[], nn.Module]) -> None:
    """Make the module on the meta device, which takes no memory, and compare its weights with this machine's memory."""
    try:
        with torch.device("meta"):
            params = sum(parameter.numel() for parameter in make().parameters())
    except (RuntimeError, TypeError, OverflowError) as error:  # torch's words for sizes beyond 64 bits
        if not sizes:
            raise
        raise _too_large(name, sizes, "one tensor of weights alone would have more bytes than 64 bits can count") from error
    needed, installed = 4 * params, psutil.virtual_memory().total
    if needed > installed:
        memory = f"{needed / 2**30:,.0f} GiB and this machine has {installed / 2**30:,.0f} GiB of memory"
        raise _too_large(name, sizes, f"its {params:,} parameters need {memory}")


@contextmanager
def allocating(name: str, sizes: Mapping[str, Any]) -> Iterator[None]:
    """Report memory that can't be had while a model is built as an error in the configuration."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise _too_large(name, sizes, "not enough free memory for its weights") from error


def _too_large(name: str, sizes: Mapping[str, Any], why: str) -> ConfigError:
    given = ", ".join(f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in sizes.items())
    model = f"the model '{name}' with {given}" if sizes else f"the model '{name}'"
    advice = f"lower {' or '.join(sizes)}" if sizes else "choose a smaller model"
    return ConfigError(f"{model} is too large: {why}; {advice}")
