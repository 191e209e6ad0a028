"""Large imports without the garbage collector: it would look through all that torch holds again and again, in vain."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """What is imported here is never garbage: it is not looked through now, nor later, nor at the program's end.

    It takes a tenth of a second from the imports and nearly half a second from the end. Where torch is there already, a
    program of the user's is under way, and its objects are left to the collector.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
