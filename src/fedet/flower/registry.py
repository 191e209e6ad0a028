"""Which clients take part: every client of the run, as its node described it, and the node that hosts it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedet.config import FlowerConfig
from fedet.core import ClientInfo
from fedet.flower.codec import ClientDescription, NodeInfo


class ClientRegistry:
    """The clients of a run by their own ids; Flower's node ids change when a machine restarts."""

    def __init__(self, clients: Sequence[ClientInfo], archs: Sequence[str], settings: FlowerConfig) -> None:
        self.archs, self.settings = archs, settings
        self.sizes = [c.num_examples for c in clients]
        """Of the configured partition; clients with data of their own declare theirs."""
        self.clients = list(clients)
        self.nodes: dict[int, int] = {}
        """Client id to the id of its node."""

    @property
    def expected(self) -> int:
        """How many clients to wait for before the first round."""
        return self.settings.clients or (1 if self.settings.own_data else sum(n > 0 for n in self.sizes))

    def at(self, nodes: Collection[int]) -> list[int]:
        """The clients at these nodes that have examples."""
        return [k for k, node in sorted(self.nodes.items()) if node in nodes and self.clients[k].num_examples]

    def with_available(self, available: Collection[int]) -> list[ClientInfo]:
        """Every client, those that are not available with no examples, so that they can't be chosen."""
        return [c if c.id in available else ClientInfo(c.id, c.arch, 0) for c in self.clients]

    def register(self, node: int, info: NodeInfo, connected: Collection[int]) -> dict[int, str]:
        """Accept a node's clients as far as they are plausible; returns those that were refused, and why."""
        refused: dict[int, str] = {}
        self.nodes = {k: other for k, other in self.nodes.items() if other != node}
        for k, client in sorted(info.clients.items()):
            why = self._refusal(k, client, node, connected)
            if why:
                refused[k] = why
            else:
                self.nodes[k], self.clients[k] = node, ClientInfo(k, client.arch, client.examples)
        return refused

    def _refusal(self, k: int, client: ClientDescription, node: int, connected: Collection[int]) -> str | None:
        if not 0 <= k < len(self.clients):
            return f"the run has clients 0 to {len(self.clients) - 1}"
        other = self.nodes.get(k)
        if other is not None and other != node and other in connected:
            return f"node {other} already hosts that client"
        if client.arch not in self.archs:
            return f"its architecture {client.arch[:60]!r} is not one of {', '.join(self.archs)}"
        limit = self.settings.max_examples
        if self.settings.own_data and client.examples > limit:
            return f"it declares {client.examples} examples, more than flower.max_examples = {limit}"
        if not self.settings.own_data and client.examples != self.sizes[k]:
            return (
                f"it declares {client.examples} examples and its part of the data set has {self.sizes[k]}: "
                "set flower.own_data = true if clients bring their own data"
            )
        return None
