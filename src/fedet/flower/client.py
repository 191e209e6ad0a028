"""A node's half: says who its clients are, and does their work when asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedet.core import ClientInfo
from fedet.errors import ConfigError, DataError, FedetError
from fedet.flower import bundle, codec
from fedet.flower.bundle import Node
from fedet.flower.codec import Card, Declared, Hello, Part, Reply, Request
from fedet.flower.versioned_store import VersionedStore

if TYPE_CHECKING:
    from fedet.config import Config
    from fedet.data import FederatedData
    from fedet.experiment import Experiment

log = logging.getLogger("flwr")


class Lost(FedetError):
    """What a client kept is gone."""


def client_app(file: str) -> ClientApp:
    """The client app of the folder in which this file lies."""
    app, folder = ClientApp(), Path(file).resolve().parent

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(introduce(message.content, context, folder), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(work(message.content, context, folder), reply_to=message)

    return app


def introduce(content: RecordDict, context: Context, folder: Path) -> RecordDict:
    """Which clients are at this node, of what architecture, with how many examples; nothing else about their data."""
    node, config = _settings(codec.read(Hello, content).run, context, folder)
    ready = None if node.data else _experiment(config, node)
    cards = {}
    for k in node.clients:
        if ready is None:
            ours = _experiment(config, node, k)
            cards[k] = Declared(arch=ours.clients[k].arch, examples=ours.clients[k].num_examples)
        elif k < len(ready.clients):
            cards[k] = Declared(arch=ready.clients[k].arch, examples=ready.clients[k].num_examples)
        else:
            raise ConfigError(f"node config: no client {k}, the run has {len(ready.clients)} (0 to {len(ready.clients) - 1})")
    return codec.written(Card(clients=cards))


def work(content: RecordDict, context: Context, folder: Path) -> RecordDict:
    """Do each client's work; one that fails says why and does not keep the others from answering."""
    from fedet import runtime

    request = codec.read(Request, content)
    node, config = _settings(request.run, context, folder)
    shared = None if node.data else _experiment(config, node)
    packer, parts = codec.Packer(), {}
    sent = []  # the packer tells groups apart by where they lie: none may be freed before the message is made
    with runtime.limit_threads(1):  # as in the simulator, for the same bits
        for k, part in sorted(codec.only(request.clients, node.clients).items()):
            try:
                ready = shared or _experiment(config, node, k, request)
                up, kept = _play(ready, node, k, part, request, content)
                sent.append(up)
                parts[k] = packer.part(up, (request.round, request.step), kept)
            except Lost as error:
                parts[k] = Part(error=str(error), lost=True)
            except Exception as error:  # a user's code may raise anything; the server names it
                log.exception("client %s failed in round %s", k, request.round)
                parts[k] = Part(error=f"{type(error).__name__}: {error}"[:2000])
    return packer.content(Reply(clients=parts))


def _settings(run: str, context: Context, folder: Path) -> tuple[Node, Config]:
    node = Node.of(context.node_config)
    config = bundle.load(folder, context.run_config)
    mine = bundle.identity(config, folder)
    if mine != run:
        raise ConfigError(f"this node reads the run as '{mine}', the server as '{run}': do both have the same fedet?")
    return node, node.config(config)


def _experiment(config: Config, node: Node, client: int = 0, request: Request | None = None) -> Experiment:
    """The run as this node sees it: its part of a data set that is dealt out, or data of its own; its own architecture."""
    from fedet import config as configuration
    from fedet import experiment

    cache = node.folder / "cache"
    if node.data is None:
        ready = experiment.build(config, cache)
    else:
        method = configuration.build_method(config.method)
        ready = experiment.assemble(config, method, _own_data(config, method, node, client, cache, request))
    if node.arch is None:
        return ready
    if node.arch not in ready.env.archs:
        raise ConfigError(f"node config: arch = '{node.arch}', choose from {', '.join(ready.env.archs)}")
    return replace(ready, clients=[ClientInfo(c.id, node.arch, c.num_examples) for c in ready.clients])


def _own_data(config: Config, method: Any, node: Node, client: int, cache: Path, request: Request | None) -> FederatedData:
    """What this client's own function returns, as the part of one client among others who hold nothing here."""
    import numpy as np
    import torch

    from fedet import data
    from fedet.config import plugins
    from fedet.data import partition, source

    clients = config.data.clients
    if clients == "all":
        raise ConfigError("data.clients = 'all' counts the users of one data set: where clients bring their own, give a number")
    if not 0 <= client < clients:
        raise ConfigError(f"node config: no client {client}, the run has {clients} (data.clients)")
    reference = str(node.data)
    options: Mapping[str, Any] = {}
    if ":" in reference:
        options = source.accepted(plugins.resolve(reference, "data set"), {"client": client})
    dataset = data.load_dataset(reference, config.data.dir, cache, options)
    if request is not None:
        _fits(dataset, request, reference)
        dataset = replace(dataset, num_classes=request.classes)
    rows = np.arange(len(dataset), dtype=np.int64)
    offsets = np.where(np.arange(clients + 1) > client, len(rows), 0)
    public = data.load_public(config.data, dataset, config.run.seed, cache) if method.traits.clients_read_public else None
    if method.traits.clients_read_public and public is None:
        raise ConfigError(
            f"clients of '{method.name}' read the public data: with data of their own, data.public must name something that "
            "every client can load, such as 'module:function' with data.public_size"
        )
    nothing = data.Examples(dataset, torch.empty(0, dtype=torch.int64))
    return data.FederatedData(dataset, partition.Parts(rows, offsets), nothing, public=public)


def _fits(dataset: Any, request: Request, reference: str) -> None:
    if dataset.input_shape != request.shape:
        raise DataError(f"{reference} has inputs of shape {dataset.input_shape}, the run's models take {request.shape}")
    if len(dataset) and int(dataset.labels.max()) >= request.classes:
        raise DataError(f"{reference} has the label {int(dataset.labels.max())}, the run has {request.classes} classes")


def _play(ready: Experiment, node: Node, k: int, part: Part, request: Request, content: RecordDict) -> tuple[Any, bool]:
    """One client's reply, and whether its disk now holds something for the next time."""
    shelf = VersionedStore(node.folder / "state" / request.run / str(k))
    state = shelf.take(part.version, request.keep)
    if state is None:
        raise Lost(f"what it kept of round {part.version[0]} is no longer on its disk; the next time it starts from nothing")
    client = ready.client(k, request.round, state)
    up = ready.method.local(codec.payload(part, content), client)
    return up, shelf.put((request.round, request.step), client.state, part.version)
