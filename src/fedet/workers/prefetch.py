"""Teachers' predictions computed where the teachers were trained, before anyone asks for them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedet import train
from fedet.core import Allocator, Payload, Weights
from fedet.workers.buffers import Header

if TYPE_CHECKING:
    from fedet.workers.remote import Worker


class Prefetch:
    """The public rows that the models of a round's replies are asked about, and what they said.

    An answer counts only for the very tensors that the client sent, unchanged since, on the very same rows: a method that
    changes a reply, or asks about something else, gets its answer computed as it would without workers.
    """

    def __init__(self, number: int, rows: Tensor, inputs: Callable[[Allocator], Tensor]) -> None:
        self.number, self.rows, self.inputs = number, rows, inputs
        self.sent = False
        """Whether the exchange that it is for has begun."""
        self._found: list[tuple[str, Weights, list[int], Tensor]] = []

    def put(self, arch: str, reply: Payload, logits: Tensor | None) -> None:
        """Keep what a reply's model said, if all of it is there."""
        weights = reply.tensors.get("model")
        if weights and logits is not None:
            self._found.append((arch, weights, _versions(weights), logits))

    def take(self, number: int, rows: Tensor, arch: str, weights: Weights) -> Tensor | None:
        """The answer for this question, if there is one; it is given once, so that nothing is held for longer."""
        if number != self.number or not torch.equal(rows, self.rows):
            return None
        for place, (known_arch, known, versions, logits) in enumerate(self._found):
            if arch == known_arch and _same(known, weights) and _versions(weights) == versions:
                del self._found[place]
                return logits
        return None


def _same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _versions(weights: Weights) -> list[int]:
    """How often each tensor was changed in place."""
    return [tensor._version for tensor in weights.values()]


class PredictionTask:
    """The public inputs about which one client's model is asked, chunk by chunk, by its own worker and by idle ones."""

    def __init__(self, client: int, arch: str, public: Future[Header], offer: Callable[[PredictionTask, int], None]) -> None:
        self.client, self.arch, self._public, self._offer = client, arch, public, offer
        self._weights: Weights | None = None
        self._chunks: collections.deque[range] = collections.deque()
        self._found: dict[int, Tensor] = {}

    def start(self, reply: Payload) -> None:
        """The model is there; a worker that had to train it anew brings the same and finds the chunks that are left."""
        rows = self._public.result()["view"]["all"][1][0]
        if self._weights is None:
            self._chunks.extend(range(start, min(start + train.CHUNK, rows)) for start in range(0, rows, train.CHUNK))
            self._weights = reply.tensors["model"]
            self._offer(self, len(self._chunks) - 1)

    def next_chunk(self, predict: Callable[[Header, range], Tensor]) -> bool:
        """Have a chunk answered, if one is left."""
        try:
            rows = self._chunks.popleft()
        except IndexError:
            return False
        try:
            self._found[rows.start] = predict(self._public.result(), rows)
        except BaseException:
            self._chunks.appendleft(rows)  # for whoever comes next
            raise
        return True

    def assist(self, worker: Worker) -> None:
        """Answer a chunk in a worker that has nothing else to do."""
        assert self._weights is not None
        weights = self._weights
        self.next_chunk(lambda public, rows: worker.predict_public(self.arch, weights, public, rows))

    def result(self) -> Tensor | None:
        """All logits in order, if all are there."""
        complete = self._weights is not None and not self._chunks
        return torch.cat([self._found[start] for start in sorted(self._found)]) if complete else None
