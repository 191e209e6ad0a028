"""Payloads as Flower's records and back: the raw bytes of each tensor and one JSON head; nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedet.core import Payload, Weights
from fedet.errors import FedetError

RAW = "fedet.raw"
"""How an array is written: its numbers as they lie in memory, little end first."""
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TYPES = {str(kind).removeprefix("torch."): kind for kind in (*_FLOATS, *_INTS)}
LONGEST_HEAD = 1 << 22
"""Characters; a head names clients, groups and scalars and holds no data."""
Version = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
"""Of what a client keeps: the round and the exchange within it after which it was written; (0, 0) is nothing yet."""


class Malformed(FedetError):
    """A message that is not what it should be; whoever sent it is named by who reads it."""


class Plain(BaseModel):
    """Part of a head."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Part(Plain):
    """One client's part of a message: which record holds which group, its scalars, and about its state."""

    groups: dict[str, str] = Field(default_factory=dict)
    scalars: dict[str, bool | int | float | str] = Field(default_factory=dict)
    version: Version = (0, 0)
    """In a request, the state to start from; in a reply, where it is `kept`, the state that the work left."""
    kept: bool = False
    error: Annotated[str, Field(max_length=4000)] | None = None
    lost: bool = False
    """The state to start from is no longer on the client's disk: the next time it starts from nothing."""


class Hello(Plain):
    """What a new node is asked: who it is, for this run."""

    run: str


class Declared(Plain):
    """What a client says of itself."""

    arch: Annotated[str, Field(max_length=200)]
    examples: Annotated[int, Field(ge=0)]


class Card(Plain):
    """A node's answer: its clients."""

    clients: Annotated[dict[int, Declared], Field(max_length=100_000)]


class Request(Plain):
    """Work for the clients of one node."""

    run: str
    round: int
    step: int
    keep: int
    """No checkpoint goes back before this round."""
    classes: int
    shape: tuple[int, ...]
    clients: dict[int, Part]


class Reply(Plain):
    """What came of it."""

    clients: dict[int, Part]


Head = TypeVar("Head", bound=Plain)


class Packer:
    """Records for the groups of payloads; a group that many clients get becomes one record."""

    def __init__(self) -> None:
        self.records: dict[str, ArrayRecord] = {}
        self._names: dict[int, str] = {}

    def part(self, payload: Payload, version: Version = (0, 0), kept: bool = False) -> Part:
        """One client's part; the payload must live as long as this packer."""
        groups = {group: self._name(tensors) for group, tensors in payload.tensors.items()}
        return Part(groups=groups, scalars=dict(payload.scalars), version=version, kept=kept)

    def content(self, head: Request | Reply) -> RecordDict:
        """A message's content: its head and the records that it refers to."""
        used = {name for part in head.clients.values() for name in part.groups.values()}
        return RecordDict({**written(head), **{name: self.records[name] for name in sorted(used)}})

    def _name(self, tensors: Weights) -> str:
        if id(tensors) not in self._names:
            self._names[id(tensors)] = name = str(len(self.records))
            self.records[name] = ArrayRecord({key: array_of(tensor) for key, tensor in tensors.items()})
        return self._names[id(tensors)]


def written(head: Plain) -> RecordDict:
    """A content that is only a head."""
    return RecordDict({"head": ConfigRecord({"json": head.model_dump_json()})})


def read(kind: type[Head], content: RecordDict) -> Head:
    """The head of a message, or `Malformed`."""
    try:
        text = content.config_records["head"]["json"]
        if not isinstance(text, str) or len(text) > LONGEST_HEAD:
            raise Malformed("its head is no text, or too long")
        return kind.model_validate_json(text)
    except KeyError as error:
        raise Malformed(f"it has no {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise Malformed(f"its head is wrong at {'.'.join(map(str, first['loc'])) or 'the top'}: {first['msg']}") from None


def payload(part: Part, content: RecordDict) -> Payload:
    """One client's payload out of a message, or `Malformed`."""
    records = content.array_records
    missing = next((name for name in part.groups.values() if name not in records), None)
    if missing is not None:
        raise Malformed(f"it refers to a record '{missing}' that it does not have")
    tensors = {group: {key: tensor_of(a) for key, a in records[name].items()} for group, name in part.groups.items()}
    return Payload(tensors, part.scalars)


def size_of(content: RecordDict) -> int:
    """Bytes of all arrays, before anything is made of them."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def array_of(tensor: Tensor) -> Array:
    """A tensor as Flower carries it; an array of no numbers still has one byte, as Flower takes none without."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in TYPES:
        raise FedetError(f"a payload may hold {', '.join(TYPES)}; {kind} can't be sent")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Array(kind, tuple(tensor.shape), RAW, flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"\0")


def tensor_of(array: Array) -> Tensor:
    """The tensor in an array that anyone may have written, or `Malformed`."""
    kind, shape = TYPES.get(array.dtype), _shape(array.shape)
    if array.stype != RAW or kind is None:
        raise Malformed(f"an array is '{array.stype}' of '{array.dtype}', not '{RAW}' of {', '.join(TYPES)}")
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    if len(array.data) != count * kind.itemsize:
        raise Malformed(f"an array of shape {shape} has {len(array.data)} bytes instead of {count * kind.itemsize}")
    flat = torch.frombuffer(bytearray(array.data), dtype=torch.uint8 if kind is torch.bool else kind)
    return (flat != 0 if kind is torch.bool else flat).reshape(shape)


def _shape(shape: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if len(sizes) > 16 or not all(isinstance(n, int) and 0 <= n < 1 << 40 for n in sizes):
        raise Malformed("an array has a shape that no tensor has")
    return sizes


def only(parts: Mapping[int, Part], asked: Iterable[int]) -> dict[int, Part]:
    """The parts of those who were asked."""
    wanted = set(asked)
    return {client: part for client, part in parts.items() if client in wanted}
