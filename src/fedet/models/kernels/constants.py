"""Constant tensors that are computed once and reused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def cached_constants(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function that makes tensors, and make them on the CPU and outside of inference mode.

    The first caller may be a prediction. Tensors made in its inference mode could never take part in training.
    """

    @cache
    def make(*arguments: object) -> R:
        with torch.inference_mode(False), torch.device("cpu"):
            return function(*arguments)  # type: ignore[call-arg, arg-type]

    return make  # type: ignore[return-value]
