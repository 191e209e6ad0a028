"""How many threads torch's operators use: part of the bits, as sums split in another way round in another way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def limited(number: int | None) -> Iterator[None]:
    """Use this many threads inside torch's operators, or as many as it likes."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
