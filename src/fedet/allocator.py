"""What a training step frees stays with the process: the next step wants the same again."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

TRIM, MAP = -1, -3
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""


@cache
def keep_memory(idle: int = 512 << 20, whole: int = 32 << 20) -> bool:
    """Let glibc keep up to `idle` freed bytes, and take blocks of up to `whole` bytes from its heap; false elsewhere.

    Otherwise it hands activations and gradients back to the system after a step and gets them again, page by page, in the
    next: hundreds of page faults, up to a seventh of the time of a small model's step. It changes no number.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux, or another C library
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(TRIM, idle)) and bool(mallopt(MAP, whole))
    return False
