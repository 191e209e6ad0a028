"""Payloads as Flower's records and back: the raw bytes of each tensor and one JSON head; nothing is unpickled.

A reply is checked against what is expected of it before anything is decoded, so that a client can make the server neither
allocate more than a good reply needs nor build a tensor of a shape that the client chose.
"""

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
"""How an array is serialized: its numbers as they are in memory, little-endian."""
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTS)}
MAX_HEAD = 1 << 22
"""Characters of a server's request; a head names clients, groups and scalars and holds no data."""
HEAD_PER_CLIENT = 1 << 13
HEAD_PER_ENTRY = 1 << 11
"""Characters of a node's answer, for each client and for each of its groups and scalars."""
MAX_ERROR = 2000
MAX_TEXT = 1000
"""Characters of an error message, and of a scalar that is a string."""
Version = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
"""Of a client's state: the round and the step within it that wrote it; (0, 0) is no state yet."""


class BadMessage(FedetError):
    """A message that is not what it should be; the caller names the sender."""


class Head(BaseModel):
    """The JSON head of a message, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class ClientPart(Head):
    """One client's part of a message: which record holds which group, and its scalars."""

    groups: dict[str, str] = Field(default_factory=dict)
    scalars: dict[str, bool | int | float | str] = Field(default_factory=dict)


class ClientRequest(ClientPart):
    """One client's part of a request."""

    version: Version
    """Of the state to start from."""


class ClientReply(ClientPart):
    """One client's part of a reply."""

    kept: bool = False
    """Whether the client now has a state on its disk, under the reply's version."""
    error: Annotated[str, Field(max_length=MAX_ERROR)] | None = None
    lost: bool = False
    """The state to start from is no longer on the client's disk: the next time it starts without one."""


class NodeQuery(Head):
    """Asks a new node which clients it has in this run."""

    run: str


class ClientDescription(Head):
    """What a node says about one of its clients."""

    arch: Annotated[str, Field(max_length=200)]
    examples: Annotated[int, Field(ge=0, lt=1 << 63)]


class NodeInfo(Head):
    """A node's answer: its clients."""

    clients: dict[int, ClientDescription]


class Request(Head):
    """Work for the clients of one node."""

    run: str
    version: Version
    """Round and step of this work, and of the states that it leaves."""
    last_checkpoint: int
    """The round of the older of the two checkpoints that are kept: the server never returns to an earlier one."""
    classes: int
    shape: tuple[int, ...]
    clients: dict[int, ClientRequest]


class Reply(Head):
    """What came of it."""

    version: Version
    clients: dict[int, ClientReply]


AnyHead = TypeVar("AnyHead", bound=Head)


class Packer:
    """Records for the groups of payloads; a group that several clients get becomes one record."""

    def __init__(self) -> None:
        self.records: dict[str, ArrayRecord] = {}
        self._names: dict[int, str] = {}
        self._packed: list[Payload] = []  # groups are told apart by their address, so none may be freed

    def groups(self, payload: Payload) -> dict[str, str]:
        """The record of each of a payload's groups."""
        self._packed.append(payload)
        return {group: self._name(tensors) for group, tensors in payload.tensors.items()}

    def content(self, head: Request | Reply) -> RecordDict:
        """A message's content: its head and the records that it refers to."""
        used = {name for part in head.clients.values() for name in part.groups.values()}
        return RecordDict({**head_only(head), **{name: self.records[name] for name in sorted(used)}})

    def _name(self, tensors: Weights) -> str:
        if id(tensors) not in self._names:
            self._names[id(tensors)] = name = str(len(self.records))
            self.records[name] = ArrayRecord({key: array_of(tensor) for key, tensor in tensors.items()})
        return self._names[id(tensors)]


def head_only(head: Head) -> RecordDict:
    """A message's content that is only a head."""
    return RecordDict({"head": ConfigRecord({"json": head.model_dump_json()})})


def read_head(kind: type[AnyHead], content: RecordDict, longest: int = MAX_HEAD) -> AnyHead:
    """The head of a message, or `BadMessage`."""
    try:
        text = content.config_records["head"]["json"]
        if not isinstance(text, str) or len(text) > longest:
            raise BadMessage(f"its head is not text of at most {longest} characters")
        return kind.model_validate_json(text)
    except KeyError as error:
        raise BadMessage(f"it has no {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200] or "the top level"
        raise BadMessage(f"its head is invalid at {place}: {first['msg'][:200]}") from None


def longest_reply(expected: Iterable[Payload]) -> int:
    """Characters that the head of a reply of these clients may have."""
    payloads = list(expected)
    names = [name for payload in payloads for name in (*payload.tensors, *payload.scalars)]
    return HEAD_PER_CLIENT * (len(payloads) + 1) + HEAD_PER_ENTRY * len(names) + 6 * sum(map(len, names))


def size_of(content: RecordDict) -> int:
    """Bytes of all arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def expected_size(expected: Iterable[Payload]) -> int:
    """Bytes of all arrays in a good reply of these clients."""
    groups = (group for payload in expected for group in payload.tensors.values())
    return sum(_stored_size(tensor) for group in groups for tensor in group.values())


def check(part: ClientPart, content: RecordDict, expected: Payload) -> None:
    """Compare groups, names, types, shapes and sizes with what is expected; nothing is decoded. Raises `BadMessage`."""
    _check_scalars(part.scalars, expected.scalars)
    if part.groups.keys() != expected.tensors.keys():
        odd = sorted(part.groups.keys() ^ expected.tensors.keys())[0]
        raise BadMessage(
            f"it has {len(part.groups)} groups instead of {len(expected.tensors)}: '{odd[:60]}' is missing or extra"
        )
    records = content.array_records
    for group, name in part.groups.items():
        if name not in records:
            raise BadMessage(f"it refers to a record '{name[:60]}' that it does not have")
        _check_record(group, records[name], expected.tensors[group])


def _check_scalars(scalars: Mapping[str, object], expected: Mapping[str, object]) -> None:
    if scalars.keys() != expected.keys():
        odd = sorted(scalars.keys() ^ expected.keys())[0]
        raise BadMessage(f"it has {len(scalars)} scalars instead of {len(expected)}: '{odd[:60]}' is missing or extra")
    for name, value in scalars.items():
        if type(value) is not type(expected[name]):
            raise BadMessage(f"its scalar '{name}' is of type {type(value).__name__}, not {type(expected[name]).__name__}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise BadMessage(f"its scalar '{name}' does not fit in 64 bits")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise BadMessage(f"its scalar '{name}' has {len(value)} characters, more than {MAX_TEXT}")


def _check_record(group: str, record: ArrayRecord, expected: Weights) -> None:
    if record.keys() != expected.keys():
        odd = sorted(record.keys() ^ expected.keys())[0]
        raise BadMessage(f"'{group}' has {len(record)} tensors instead of {len(expected)}: '{odd[:60]}' is missing or extra")
    for name, tensor in expected.items():
        _check_array(f"{group}.{name}", record[name], tensor)


def _check_array(name: str, array: Array, expected: Tensor) -> None:
    dtype, shape = str(expected.dtype).removeprefix("torch."), tuple(expected.shape)
    if array.stype != RAW or array.dtype != dtype:
        raise BadMessage(f"'{name}' is '{array.dtype[:60]}' as '{array.stype[:60]}', expected '{dtype}' as '{RAW}'")
    if tuple(array.shape) != shape:
        raise BadMessage(f"'{name}' has the shape {str(array.shape)[:200]}, expected {shape}")
    if len(array.data) != _stored_size(expected):
        raise BadMessage(f"'{name}' has {len(array.data)} bytes instead of {_stored_size(expected)}")


def decode(part: ClientPart, content: RecordDict) -> Payload:
    """One client's payload; whatever comes from a client goes through `check` first."""
    records = content.array_records
    tensors = {group: {key: tensor_of(a) for key, a in records[name].items()} for group, name in part.groups.items()}
    return Payload(tensors, part.scalars)


def array_of(tensor: Tensor) -> Array:
    """A tensor as Flower carries it; an empty one still gets one byte, because Flower refuses arrays without any."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise FedetError(f"a payload can't hold tensors of type {dtype}; use one of {', '.join(DTYPES)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Array(dtype, tuple(tensor.shape), RAW, flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"\0")


def tensor_of(array: Array) -> Tensor:
    """The tensor in an array that `array_of` made."""
    dtype, shape = DTYPES[array.dtype], tuple(array.shape)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(array.data), dtype=torch.uint8 if dtype is torch.bool else dtype)
    return (flat != 0 if dtype is torch.bool else flat).reshape(shape)


def _stored_size(tensor: Tensor) -> int:
    return max(1, tensor.numel() * tensor.element_size())
