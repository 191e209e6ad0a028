"""The interfaces and data types shared by the package: Method, Payload, Client, Env, Round, Exchange, Transport.

A method is a frozen dataclass whose fields are its hyper-parameters. State goes in and comes out as plain data, so the
same file runs in the simulator, in a process pool and over a network. A complete method, federated averaging of
one small architecture:

>>> @dataclass(frozen=True)
... class Toy(Method[Weights]):
...     '''Average what the clients send.'''
...     name: ClassVar[str] = "toy"
...     client: Training = Training(lr=0.1, batch=16, steps=5)
...
...     def init(self, env):
...         return env.initial(env.large)
...
...     def round(self, state, r, env):
...         ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
...         return r.average([up.tensors["model"] for up in ups.values()], r.weights(ups))
...
...     def local(self, down, client):
...         model = client.build(client.large, down.tensors["model"])
...         train.fit(model, client.data, self.client, seed=client.seed)
...         return Payload({"model": weights_of(model)})
...
...     def models(self, state, env):
...         return {"server": (env.large, state)}
"""

from __future__ import annotations

import difflib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedet import maths

if TYPE_CHECKING:
    from fedet.data import Examples, Public
    from fedet.models import Model, ModelCache

Weights = dict[str, Tensor]
"""A model's state_dict, detached."""
ClientState = dict[str, Weights]
"""The state a client keeps between rounds: groups of named tensors."""
REMOTE_STATE = "elsewhere"
"""The only group that the server stores for a client whose state is on its own disk: the current version of that state."""
Allocator = Callable[[tuple[int, ...]], Tensor]
"""Returns an uninitialised float tensor of the given shape."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Payload:
    """One message: groups of named tensors, and scalars."""

    tensors: Mapping[str, Weights] = field(default_factory=dict)
    scalars: Mapping[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """Everything the server may know about a client."""

    id: int
    arch: str
    num_examples: int


def malformed(message: Any, in_memory: bool = True) -> str | None:
    """What makes something no message at all, so that not even its size can be told; None if it is one.

    The tensors of an expected reply have shapes and types only (`in_memory` is false).
    """
    if not isinstance(message, Payload):
        return f"is {described(message)}: it must be a Payload, such as Payload({{'model': weights}})"
    if not isinstance(message.tensors, Mapping):
        return f"holds {described(message.tensors)}: it must hold groups of named tensors, such as {{'model': weights}}"
    if not isinstance(message.scalars, Mapping):
        return f"has {described(message.scalars)} as its scalars: they are a dict, such as {{'examples': 10}}"
    odd = next((name for name in (*message.tensors, *message.scalars) if not isinstance(name, str)), None)
    if odd is not None:
        return f"has {described(odd)} as a name: names are strings"
    return next(filter(None, (not_named_tensors(group, part, in_memory) for group, part in message.tensors.items())), None)


def not_named_tensors(group: str, part: Any, in_memory: bool = True) -> str | None:
    """What is wrong with something that should be a group of named tensors, or None."""
    if not isinstance(part, Mapping):
        return f"has {described(part)} as its group '{group}': a group is a dict of named tensors, such as {{'weight': tensor}}"
    for name, value in part.items():
        if not isinstance(name, str):
            return f"has {described(name)} as a name in its group '{group}': names are strings"
        if not isinstance(value, Tensor):
            return f"has {described(value)} as '{group}.{name[:60]}': it must be a tensor"
        if in_memory and (value.layout is not torch.strided or value.is_nested or value.is_meta):
            return f"has a tensor without a plain block of memory as '{group}.{name[:60]}': it must be dense"
    return None


def described(value: Any) -> str:
    """An object in words, by its type."""
    return "nothing (None)" if value is None else f"an object of type {type(value).__name__}"


ClientStates = Sequence[tuple[ClientInfo, ClientState]]
"""Clients with their states, as evaluation in a simulation sees them."""

Exchange = Callable[[Mapping[int, Payload]], Mapping[int, Payload]]
"""Send each client its request and return the usable replies by ascending client id; clients that drop out are missing."""


class Average(Protocol):
    """What `Round.average` is."""

    def __call__(self, models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Weights:
        """As `maths.average`."""
        ...


class ConsensusOf(Protocol):
    """What `Round.consensus` is."""

    def __call__(self, probs: Tensor, trust: Tensor | None = None, cap: float = 0.0) -> maths.Consensus:
        """As `maths.consensus`."""
        ...


FailureKind = Literal[
    "dropped", "bad reply", "diverged", "absent", "busy", "late", "raised", "crashed", "unavailable", "suspect", "set aside"
]


@dataclass(frozen=True, slots=True)
class Failure:
    """A client that did not contribute to a round, and why."""

    client: int
    kind: FailureKind
    why: str

    def as_dict(self) -> dict[str, Any]:
        """The entry in the metrics."""
        return {"client": self.client, "kind": self.kind, "why": self.why}


@dataclass(frozen=True, slots=True)
class ClientTask:
    """One client's task: the request, the state it starts from, and the layout of a valid reply."""

    request: Payload
    state: ClientState
    expected: Payload
    """Groups, names, shapes and types of a valid reply; its tensors may be on the device "meta"."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The results of a transport's tasks, not yet validated."""

    replies: Mapping[int, Payload]
    states: Mapping[int, ClientState] = field(default_factory=dict)
    """The new state of each client that replied; it is stored only if the reply is accepted."""
    failures: Sequence[Failure] = ()
    lost_states: Sequence[int] = ()
    """Clients whose stored state no longer exists; next time they start with an empty one."""


class Transport(Protocol):
    """How tasks reach clients: in this process, in a pool of workers, or over a network."""

    def start_round(self, number: int) -> Sequence[ClientInfo]:
        """Prepare a round; returns all clients by id, with zero examples for those that are unavailable."""
        ...

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """Run these tasks of a round and wait for the results."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """A method's row in the paper's Table 1."""

    heterogeneous: bool = False
    public_data: Literal["none", "unlabelled", "labelled"] = "none"
    clients_read_public: bool = False
    larger_server: bool = False
    tasks: Literal["any", "images"] = "any"


@dataclass(frozen=True, slots=True)
class Round:
    """One communication round, from the server's side."""

    number: int
    cohort: Sequence[ClientInfo]
    exchange: Exchange
    seed: int
    draws: Mapping[int, int] = field(default_factory=dict)
    """How often each client was drawn; empty means once each (selection without replacement)."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Values that the method adds to the round's record: plain numbers and lists."""
    teachers: dict[int, tuple[str, Weights]] = field(default_factory=dict)
    """The round's ensemble, client id to (architecture, weights), to evaluate its consensus."""
    average: Average = maths.average
    """The average of the clients' state dicts: `maths.average`, or the robust one that `run.robust` names."""
    consensus: ConsensusOf = maths.consensus
    """The consensus of the clients' probabilities: `maths.consensus`, or the one that `run.robust` names."""
    mean: Callable[[Tensor], Tensor] = maths.mean_over_clients
    """The mean over the clients of what they say, (clients, batch, classes); or the one that `run.robust` names."""

    def weights(self, ids: Iterable[int], by: Literal["uniform", "examples"] = "uniform") -> list[float]:
        """Averaging weights of these clients: 1 each (or the number of draws), times their examples if `by="examples"`."""
        size = {c.id: c.num_examples for c in self.cohort} if by == "examples" else {}
        return [float(self.draws.get(i, 1) * size.get(i, 1)) for i in ids]


class Predictor(Protocol):
    """Worker processes that compute models' predictions, bit-identical to this process's."""

    def prefetch(self, number: int, rows: Tensor, inputs: Callable[[Allocator], Tensor]) -> None:
        """Announce that the models in this round's next replies will predict these rows of the public inputs.

        `inputs` computes them, preferably in memory from the allocator it is given, which is valid until the next exchange.
        """
        ...

    def prefetched(self, number: int, rows: Tensor, arch: str, weights: Weights) -> Tensor | None:
        """A model's logits on these rows if they were computed in this round for exactly these weights, or None."""
        ...

    def predict(self, arch: str, weights: Weights, part: Literal["test", "val"]) -> Callable[[], Tensor]:
        """Start computing a model's logits on a part of the data; the function returned waits for them."""
        ...


@dataclass(frozen=True)
class Env:
    """The server's side: its architectures, their initial weights, and the public data."""

    model_cache: ModelCache
    archs: tuple[str, ...]
    large: str
    num_classes: int
    seed: int
    num_clients: int = 0
    public: Public | None = None
    val: Examples | None = None
    """Labelled validation examples, if the configuration has a validation split."""
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    predictor: Predictor | None = None
    pooled: Examples | None = None
    """All clients' examples together; only for references."""

    @property
    def largest(self) -> str:
        """The small architecture with the most parameters."""
        return max(self.archs, key=self.model_cache.num_params)

    def initial(self, arch: str) -> Weights:
        """The run's initial weights for this architecture, the same for every method and client."""
        return self.model_cache.initial(arch)

    def build(self, arch: str, weights: Weights, slot: str = "") -> Model:
        """A module of this architecture with a copy of these weights; the next call with the same slot reuses it."""
        return self.model_cache.load(arch, weights, slot)


@dataclass(frozen=True)
class Client:
    """A client's side: its private data, its seed for this round, and the state it keeps between rounds."""

    id: int
    arch: str
    large: str
    data: Examples
    seed: int
    round: int
    model_cache: ModelCache
    state: dict[str, Weights] = field(default_factory=dict)
    """Groups of tensors that stay with this client; changes persist until its next participation."""
    public: Public | None = None
    """The public inputs, only for methods with the trait `clients_read_public`."""

    def initial(self, arch: str) -> Weights:
        """As `Env.initial`."""
        return self.model_cache.initial(arch)

    def build(self, arch: str, weights: Weights, slot: str = "") -> Model:
        """As `Env.build`."""
        return self.model_cache.load(arch, weights, slot)


class Method(ABC, Generic[S]):
    """A federated algorithm: subclass it with a frozen dataclass. The module's docstring has a complete example.

    `init`, `round`, `local` and `models` are required; the other hooks have defaults. Public functions with other names are
    rejected, so that a misspelt hook is an error; start the names of helper functions with an underscore.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    needs_images: ClassVar[bool] = False
    """Whether data other than images is rejected; `traits.tasks` only repeats the paper's table."""
    ensemble_name: ClassVar[str] = "consensus"
    """The name of the round's ensemble in metrics and reports."""
    reference: ClassVar[bool] = False
    """Whether it is not federated: it shows what was possible, and is never ranked."""
    sends_updates: ClassVar[bool] = False
    """Whether clients reply with differences from what they were sent, in groups of the same name, and not with new values."""
    models_at_clients: ClassVar[bool] = False
    """Whether all its models are kept at clients: those of every client that took part are evaluated after the last round."""

    revision: ClassVar[int] = 0
    """Raised with every change after which the same settings give other results: older records then no longer count."""
    replies_with_model: ClassVar[bool] = False
    """Whether the whole reply is the model of the request, trained: then its update can be clipped and given noise."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        hooks = [name for name in vars(Method) if not name.startswith("_")]
        for name, value in vars(cls).items():
            if callable(value) and not isinstance(value, type) and not name.startswith("_") and name not in hooks:
                close = difflib.get_close_matches(name, hooks, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"the hooks are {', '.join(sorted(hooks))};"
                raise TypeError(f"{cls.__name__}.{name} is not a hook of Method: {hint} start helper names with an underscore")

    @abstractmethod
    def init(self, env: Env) -> S:
        """The server's state before the first round ("Initialize")."""

    @abstractmethod
    def round(self, state: S, r: Round, env: Env) -> S:
        """The server's side of a round ("Server do"); it may exchange more than once and must not change `state` in place."""

    @abstractmethod
    def local(self, down: Payload, client: Client) -> Payload:
        """A client's side ("Clients do"): a pure function of the request and the client's data, state and seed."""

    @abstractmethod
    def models(self, state: S, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The models to evaluate, name to (architecture, weights); the first is the method's output."""

    def check(self, env: Env) -> None:
        """Raise a `ConfigError` if the method can't run with these data and models; called before a run has a folder."""
        return

    def client_models(self, state: S, env: Env, client_states: ClientStates) -> Mapping[str, Sequence[tuple[str, Weights]]]:
        """Models that are kept at these clients, by name; the mean accuracy per name is reported."""
        return {}

    def expected_reply(self, down: Payload, client: ClientInfo, env: Env) -> Payload:
        """The layout of a valid reply to this request, scalars included; tensors may be on the device "meta"."""
        return down

    def validate_reply(self, reply: Payload, env: Env) -> str | None:
        """What is wrong with a reply whose groups, names, shapes and types match `expected_reply`, or None."""
        return None

    def privacy_gap(self) -> str | None:
        """What a reply reveals of the client's examples except through `train.fit` on them, or None: then DP-SGD protects them.

        A method of one's own that does not define it is refused with `privacy.clip`.
        """
        return None

    def ensemble_probs(self, logits: Tensor) -> Tensor:
        """The ensemble's probabilities (batch, classes) from its models' logits (models, batch, classes)."""
        return maths.consensus(torch.softmax(logits, dim=-1)).probs


def seed_of(root: int, *path: int | str) -> int:
    """A 63-bit seed derived from the root and a path, so that components' random numbers are independent of each other."""
    text = "/".join(str(part) for part in (root, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, *path: int | str) -> torch.Generator:
    """A fresh torch generator seeded with `seed_of`."""
    return torch.Generator().manual_seed(seed_of(root, *path))


def weights_of(model: nn.Module) -> Weights:
    """A copy of the module's weights in CPU memory, unaffected by later training."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def head_of(weights: Weights) -> Weights:
    """The representation layer's part of a model's weights."""
    return {name: tensor for name, tensor in weights.items() if name.startswith("head.")}
