"""A node's side: describes its clients, and does their work when asked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedet.config.plugins import UntrustedCode
from fedet.core import ClientInfo, Payload
from fedet.errors import ConfigError, DataError, FedetError, tracebacks
from fedet.flower import bundle, codec
from fedet.flower.bundle import Node
from fedet.flower.codec import ClientDescription, ClientReply, ClientRequest, NodeInfo, NodeQuery, Reply, Request
from fedet.flower.versioned_store import VersionedStore

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.data import FederatedData
    from fedet.experiment import Experiment

log = logging.getLogger("flwr")


class PublicError(FedetError):
    """An error whose text holds nothing private, so that the server may read it."""


class StateLost(PublicError):
    """The state to start from is no longer on the client's disk."""


class NodeFailed(FedetError):
    """What the server may know of an error."""


def client_app(file: str) -> ClientApp:
    """The client app of the folder that holds this file."""
    app, folder = ClientApp(), Path(file).resolve().parent

    @app.query()
    def query(message: Message, context: Context) -> Message:
        with _reported(context):
            return Message(describe(message.content, context, folder), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with _reported(context):
            return Message(work(message.content, context, folder), reply_to=message)

    return app


def describe(content: RecordDict, context: Context, folder: Path) -> RecordDict:
    """Which clients this node has, of what architecture, with how many examples; nothing else about their data."""
    node = Node.of(context.node_config)
    with node.code(folder):
        config = _config(node, codec.read_head(NodeQuery, content).run, context, folder)
        shared = None if node.data else _experiment(config, node)
        clients = {}
        for k in node.clients:
            experiment = shared or _experiment(config, node, k)
            if k >= len(experiment.clients):
                count = len(experiment.clients)
                raise ConfigError(f"node config: there is no client {k}, the run has {count} (0 to {count - 1})")
            info = experiment.clients[k]
            clients[k] = ClientDescription(arch=info.arch, examples=info.num_examples)
    return codec.head_only(NodeInfo(clients=clients))


def work(content: RecordDict, context: Context, folder: Path) -> RecordDict:
    """Do each client's work; one that fails reports it and does not keep the others from answering."""
    from fedet import runtime

    node, request = Node.of(context.node_config), codec.read_head(Request, content)
    packer, parts = codec.Packer(), {}
    with node.code(folder), runtime.limit_threads(1):  # one thread as in the simulator, for the same bits
        config = _config(node, request.run, context, folder)
        shared = None if node.data else _experiment(config, node)
        for k in sorted(request.clients.keys() & set(node.clients)):
            try:
                experiment = shared or _experiment(config, node, k, request)
                reply, kept = _run_client(experiment, node, k, request, content)
                parts[k] = ClientReply(groups=packer.groups(reply), scalars=dict(reply.scalars), kept=kept)
            except Exception as error:  # a user's code may raise anything
                log.exception("client %s failed in round %s", k, request.version[0])
                parts[k] = ClientReply(error=_summary(error, node.send_errors), lost=isinstance(error, StateLost))
    return packer.content(Reply(version=request.version, clients=parts))


@contextlib.contextmanager
def _reported(context: Context) -> Iterator[None]:
    """Let Flower send only what the server may know of an error; all of it goes to this node's log."""
    try:
        yield
    except Exception as error:
        log.exception("this node could not answer")
        send_text = context.node_config.get("send-errors") is True
        raise NodeFailed(_summary(error, send_text)) from None


def _summary(error: Exception, send_text: bool) -> str:
    """An error as the server gets it: texts of exceptions can quote private data, so only the type and the place."""
    kind = type(error).__name__
    if isinstance(error, PublicError | UntrustedCode):
        return str(error)[: codec.MAX_ERROR]
    if send_text:
        return f"{kind}: {error}"[: codec.MAX_ERROR]
    return f"{kind} at {tracebacks.place(error)}; the text is in the node's log (send-errors=true in the node config sends it)"


def _config(node: Node, run: str, context: Context, folder: Path) -> Config:
    config = bundle.load(folder, context.run_config)
    mine = bundle.identity(config, folder)
    if mine != run:
        raise PublicError(f"this node calls the run '{mine}' and the server '{run}': install the same version of fedet on both")
    return node.config(config)


def _experiment(config: Config, node: Node, client: int = 0, request: Request | None = None) -> Experiment:
    """The run as this node sees it: its part of the configured data set, or its own data; its own architecture."""
    from fedet import config as configuration
    from fedet import experiment

    cache = node.folder / "cache"
    if node.data is None:
        built = experiment.build(config, cache)
    else:
        method = configuration.build_method(config.method)
        built = experiment.assemble(config, method, _own_data(config, method, node, client, cache, request))
    if node.arch is None:
        return built
    if node.arch not in built.env.archs:
        raise ConfigError(f"node config: arch = '{node.arch}' is not one of {', '.join(built.env.archs)}")
    return replace(built, clients=[ClientInfo(c.id, node.arch, c.num_examples) for c in built.clients])


def _own_data(config: Config, method: Any, node: Node, client: int, cache: Path, request: Request | None) -> FederatedData:
    """What this client's own function returns, as the part of one client among others that have nothing here."""
    import numpy as np
    import torch

    from fedet import data
    from fedet.data import partition

    clients = config.data.clients
    if clients == "all":
        raise ConfigError(
            "data.clients = 'all' counts the users of one data set: give a number if clients bring their own data"
        )
    if config.data.standardise:
        raise ConfigError("data.standardise needs the examples of all clients: standardise in your own function instead")
    if not 0 <= client < clients:
        raise ConfigError(f"node config: there is no client {client}, the run has {clients} (data.clients)")
    dataset = _own_dataset(config, node, client, cache)
    if request is not None:
        _check_fits(dataset, request, str(node.data))
        dataset = replace(dataset, num_classes=request.classes)
    rows = np.arange(len(dataset), dtype=np.int64)
    offsets = np.where(np.arange(clients + 1) > client, len(rows), 0)
    public = data.load_public(config.data, dataset, config.run.seed, cache) if method.traits.clients_read_public else None
    if method.traits.clients_read_public and public is None:
        raise ConfigError(
            f"clients of '{method.name}' read the public data: if they bring their own data, data.public must name something "
            "that every client can load, such as 'module:function' with data.public_size"
        )
    nothing = data.Examples(dataset, torch.empty(0, dtype=torch.int64))
    return data.FederatedData(dataset, partition.Parts(rows, offsets), nothing, public=public)


def _own_dataset(config: Config, node: Node, client: int, cache: Path) -> Any:
    """The data that the node's own settings name: its operator chose that code, so it may be from anywhere."""
    from fedet import data
    from fedet.config import plugins
    from fedet.data import source

    reference = str(node.data)
    options: Mapping[str, Any] = {}
    with plugins.only_from(None):
        if ":" in reference:
            options = source.accepted(plugins.resolve(reference, "data set"), {"client": client})
        return data.load_dataset(reference, config.data.dir, cache, options)


def _check_fits(dataset: Any, request: Request, reference: str) -> None:
    if dataset.input_shape != request.shape:
        raise DataError(f"{reference} has inputs of shape {dataset.input_shape}, the run's models take {request.shape}")
    if len(dataset) and int(dataset.labels.max()) >= request.classes:
        raise DataError(f"{reference} has the label {int(dataset.labels.max())}, the run has {request.classes} classes")


def _run_client(experiment: Experiment, node: Node, k: int, request: Request, content: RecordDict) -> tuple[Payload, bool]:
    """One client's reply, and whether its disk now holds a state for the next time."""
    part: ClientRequest = request.clients[k]
    store = VersionedStore(node.folder / "state" / request.run / str(k))
    store.prune(part.version, request.last_checkpoint)
    state = store.load(part.version)
    if state is None:
        raise StateLost(f"its state of round {part.version[0]} is no longer on its disk; the next time it starts without one")
    client = experiment.client(k, request.version[0], state)
    reply = experiment.local(codec.decode(part, content), client)
    return reply, store.save(request.version, client.state, part.version)
