"""Tensors between processes of one machine: a memory-mapped file, written on one side and read on the other; no pickle."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedet.core import Weights
from fedet.runtime import keep_freed_memory

Header = dict[str, dict[str, list[Any]]]
"""For each group and name: type, shape and place in the file."""
ALIGN = 64


class SharedBuffer:
    """One direction of one worker's mail. A message stays until the next one is written."""

    def __init__(self, path: Path) -> None:
        keep_freed_memory()  # copies of models come and go with every message
        self.path = path
        path.touch()
        self._map: mmap.mmap | None = None

    def write(self, groups: Mapping[str, Weights]) -> Header:
        """Put these tensors into the file and return where they are."""
        header: Header = {}
        place = 0
        for group, tensors in groups.items():
            header[group] = {}
            for name, tensor in tensors.items():
                header[group][name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place]
                place += -(-tensor.nbytes // ALIGN) * ALIGN
        self._reach(place)
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                if tensor.numel() and (into := self._view(*header[group][name])).data_ptr() != tensor.data_ptr():
                    into.copy_(tensor)
        return header

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Where floats of this shape can be made that are then written alone: they are in their place already."""
        self._reach(4 * torch.Size(shape).numel())
        return self._view("float32", list(shape), 0)

    def read(self, header: Header, copy: bool = True) -> dict[str, Weights]:
        """The tensors that the other side wrote: copies, or the message itself, which is good until the next one."""
        self._reach(0)
        views = {group: {name: self._view(*entry) for name, entry in tensors.items()} for group, tensors in header.items()}
        if not copy:
            return views
        return {group: {name: view.clone() for name, view in tensors.items()} for group, tensors in views.items()}

    def close(self) -> None:
        """Let go of the file; the system takes it back when the last tensor that looks into it is gone."""
        self._map = None

    def _view(self, kind: str, shape: list[int], place: int) -> Tensor:
        dtype, count = getattr(torch, kind), torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place).reshape(shape)

    def _reach(self, size: int) -> None:
        """Map the whole file, made longer first if it is too short."""
        length = self.path.stat().st_size
        if length < size:
            length = max(size, 2 * length, 1 << 16)
            with self.path.open("r+b") as file:
                file.truncate(length)
        if length and (self._map is None or len(self._map) != length):
            self.close()
            with self.path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), length)
