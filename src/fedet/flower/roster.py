"""Who takes part: every client of the run, as it declared itself, and the node where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedet.config import FlowerConfig
from fedet.core import ClientInfo
from fedet.flower.codec import Card


class Roster:
    """The clients of a run by their own numbers; Flower's node numbers change when a machine starts again."""

    def __init__(self, clients: Sequence[ClientInfo], archs: Sequence[str], how: FlowerConfig) -> None:
        self.archs, self.how = archs, how
        self.sizes = [c.num_examples for c in clients]
        """Of the parts that the configuration deals out; clients with data of their own say theirs."""
        self.known = list(clients)
        self.homes: dict[int, int] = {}

    @property
    def expected(self) -> int:
        """How many clients to wait for before the first round."""
        return self.how.clients or (1 if self.how.own_data else sum(n > 0 for n in self.sizes))

    def at(self, *nodes: int) -> list[int]:
        """The clients at these nodes that have something to train on."""
        return [k for k, node in sorted(self.homes.items()) if node in nodes and self.known[k].num_examples]

    def only(self, there: Iterable[int]) -> list[ClientInfo]:
        """Every client as selection sees it: one who is not there has no examples, and so is never chosen."""
        free = set(there)
        return [c if c.id in free else ClientInfo(c.id, c.arch, 0) for c in self.known]

    def register(self, node: int, card: Card, there: set[int]) -> dict[int, str]:
        """Take a node's word for who its clients are, within bounds; returns who was refused, and why."""
        refused: dict[int, str] = {}
        self.homes = {k: home for k, home in self.homes.items() if home != node}
        for k, said in sorted(card.clients.items()):
            why = self._refusal(k, said.arch, said.examples, node, there)
            if why:
                refused[k] = why
            else:
                self.homes[k], self.known[k] = node, ClientInfo(k, said.arch, said.examples)
        return refused

    def _refusal(self, k: int, arch: str, examples: int, node: int, there: set[int]) -> str | None:
        if not 0 <= k < len(self.known):
            return f"the run has clients 0 to {len(self.known) - 1}"
        home = self.homes.get(k)
        if home is not None and home != node and home in there:
            return f"node {home} is that client already"
        if arch not in self.archs:
            return f"its architecture '{arch[:60]}' is not among {', '.join(self.archs)}"
        if self.how.own_data and examples > self.how.max_examples:
            return f"it says to have {examples} examples, more than flower.max_examples = {self.how.max_examples}"
        if not self.how.own_data and examples != self.sizes[k]:
            return f"it says to have {examples} examples, its part has {self.sizes[k]}: for own data set flower.own_data = true"
        return None
