"""Prefetch teachers' predictions in the workers that trained the teachers."""

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
    """The public rows to predict with the models of a round's replies, and the logits.

    Logits are returned only for the same tensor objects that the client sent, unmodified, and for the same rows. If a method
    changes a reply or predicts other rows, the logits are computed as they are without workers.
    """

    def __init__(self, number: int, rows: Tensor, inputs: Callable[[Allocator], Tensor]) -> None:
        self.number, self.rows, self.inputs = number, rows, inputs
        self.sent = False
        """Whether its exchange has started."""
        self._logits: list[tuple[str, Weights, list[int], Tensor]] = []

    def put(self, arch: str, reply: Payload, logits: Tensor | None) -> None:
        """Store the logits of a reply's model, if they are complete."""
        weights = reply.tensors.get("model")
        if weights and logits is not None:
            self._logits.append((arch, weights, _versions(weights), logits))

    def take(self, number: int, rows: Tensor, arch: str, weights: Weights) -> Tensor | None:
        """Return and remove the logits of this model on these rows, or return None."""
        if number != self.number or not torch.equal(rows, self.rows):
            return None
        for index, (known_arch, known, versions, logits) in enumerate(self._logits):
            if arch == known_arch and _identical(known, weights) and _versions(weights) == versions:
                del self._logits[index]
                return logits
        return None


def _identical(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _versions(weights: Weights) -> list[int]:
    """The version counter of each tensor, which in-index changes increase."""
    return [tensor._version for tensor in weights.values()]


class PredictionTask:
    """The prediction of the public inputs with one client's model, chunk by chunk, by its own worker and by idle ones."""

    def __init__(self, client: int, arch: str, public: Future[Header], offer: Callable[[PredictionTask, int], None]) -> None:
        self.client, self.arch, self._public, self._offer = client, arch, public, offer
        self._weights: Weights | None = None
        self._chunks: collections.deque[range] = collections.deque()
        self._logits: dict[int, Tensor] = {}

    def start(self, reply: Payload) -> None:
        """Start with a trained model; if a new worker had to train it again, it continues with the remaining chunks."""
        rows = self._public.result()["view"]["all"][1][0]
        if self._weights is None:
            self._chunks.extend(range(start, min(start + train.CHUNK, rows)) for start in range(0, rows, train.CHUNK))
            self._weights = reply.tensors["model"]
            self._offer(self, len(self._chunks) - 1)

    def next_chunk(self, predict: Callable[[Header, range], Tensor]) -> bool:
        """Predict the next chunk; returns False if none is left."""
        try:
            rows = self._chunks.popleft()
        except IndexError:
            return False
        try:
            self._logits[rows.start] = predict(self._public.result(), rows)
        except BaseException:
            self._chunks.appendleft(rows)  # another worker retries it
            raise
        return True

    def assist(self, worker: Worker) -> None:
        """Predict a chunk in an idle worker."""
        assert self._weights is not None
        weights = self._weights
        self.next_chunk(lambda public, rows: worker.predict_public(self.arch, weights, public, rows))

    def result(self) -> Tensor | None:
        """All logits in order, or None if they are not complete."""
        complete = self._weights is not None and not self._chunks
        return torch.cat([self._logits[start] for start in sorted(self._logits)]) if complete else None
