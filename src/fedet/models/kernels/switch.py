"""The switch between fedet's convolutions and torch's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal, get_args

from fedet.errors import ConfigError

VARIABLE = "FEDET_KERNELS"
Kernels = Literal["fedet", "torch"]

_chosen: Kernels | None = None
_planes = False


def use(kernels: Kernels) -> None:
    """Compute all convolutions of this process with fedet's kernels where they are faster, or with torch's alone."""
    global _chosen
    if kernels not in get_args(Kernels):
        raise ConfigError(f"kernels '{kernels}' are not available: use {' or '.join(get_args(Kernels))}")
    _chosen = kernels


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Compute with torch's convolutions on planes alone, which is all that `torch.func.vmap` can do."""
    global _chosen, _planes
    enabled()  # read the environment variable first
    before = _chosen, _planes
    _chosen, _planes = "torch", True
    try:
        yield
    finally:
        _chosen, _planes = before


def planes() -> bool:
    """Whether images must stay in torch's default layout."""
    return _planes


def enabled() -> bool:
    """Whether fedet's kernels may be used; unless `use` was called, the environment variable decides."""
    if _chosen is None:
        name = os.environ.get(VARIABLE) or "fedet"
        if name not in get_args(Kernels):
            raise ConfigError(f"{VARIABLE}={name} is not available: set it to {' or '.join(get_args(Kernels))}, or unset it")
        use("torch" if name == "torch" else "fedet")
    return _chosen == "fedet"
