"""The pool's side of a worker process: sends jobs, receives answers, and passes tensors through shared buffers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedet.core import ClientState, Payload, Weights
from fedet.errors import tracebacks
from fedet.experiment import Experiment
from fedet.workers.buffers import Header, SharedBuffer, remove_folder
from fedet.workers.prefetch import PredictionTask
from fedet.workers.process import ChildProcess, Process

Answer = tuple[Payload, ClientState]
"""A client's reply and its new state."""


class Worker(ChildProcess):
    """A worker process and its buffers."""

    def __init__(self, process: Process, experiment: Experiment, cache: Path, scratch: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=scratch))
        self.inbox, self.outbox = SharedBuffer(self.folder / "in"), SharedBuffer(self.folder / "out")
        super().__init__(process)
        self.send({"config": experiment.config.model_dump(mode="json"), "cache": str(cache), "folder": str(self.folder)})
        self._ready = False
        self._model: Weights | None = None

    def run_client(
        self, client: int, number: int, down: Payload, state: ClientState, prediction: PredictionTask | None = None
    ) -> Answer:
        """Run one client, then predict with its model if required; raises an error if its code did."""
        groups = {f"down/{name}": group for name, group in down.tensors.items()}
        groups |= {f"state/{name}": group for name, group in state.items()}
        job = {"client": client, "round": number, "down": list(down.tensors), "state": list(state)}
        answer = self._request(job | {"scalars": dict(down.scalars), "predict_after": prediction is not None}, groups)
        if "error" in answer:
            raise tracebacks.from_message(answer["error"], f"client {client}, round {number}")
        tensors = self.outbox.read(answer["tensors"])
        up = Payload({name: tensors[f"up/{name}"] for name in answer["up"]}, answer["scalars"])
        if prediction:
            try:
                if "model" in up.tensors:
                    prediction.start(up)
                    while prediction.next_chunk(self._predict_trained):
                        pass
            finally:
                self.send({"public": None})  # ends the worker's loop over rows
        return up, {name: tensors[f"state/{name}"] for name in answer["state"]}

    def _predict_trained(self, public: Header, rows: range) -> Tensor:
        """The logits on some rows of the public inputs, of the model that this worker just trained."""
        self.send({"public": public, "rows": [rows.start, rows.stop]})
        return self._logits(self.receive())

    def predict_public(self, arch: str, weights: Weights, public: Header, rows: range) -> Tensor:
        """The logits on some rows of the public inputs, of a model that another worker trained."""
        return self._request_logits({"predict": arch, "public": public, "rows": [rows.start, rows.stop]}, weights)

    def predict(self, arch: str, weights: Weights, part: str, rows: range) -> Tensor:
        """A model's logits on some rows of a part of the data."""
        return self._request_logits({"predict": arch, "part": part, "rows": [rows.start, rows.stop]}, weights)

    def _request_logits(self, job: Mapping[str, Any], weights: Weights) -> Tensor:
        """Request a prediction; the model is sent unless the last request was for the same one."""
        if weights is self._model:
            self.send(job)
            return self._logits(self.receive())
        answer = self._request(job, {"model": weights})
        self._model = weights
        return self._logits(answer)

    def _logits(self, answer: Mapping[str, Any]) -> Tensor:
        if "error" in answer:
            raise tracebacks.from_message(answer["error"])
        return self.outbox.read(answer["tensors"])["logits"]["all"]

    def _request(self, job: Mapping[str, Any], groups: Mapping[str, Weights]) -> dict[str, Any]:
        if not self._ready:
            if "error" in (answer := self.receive()):
                raise tracebacks.from_message(answer["error"], "a worker process can't build the experiment")
            self._ready = True
        self._model = None
        self.send({**job, "tensors": self.inbox.write(groups)})
        return self.receive()

    def stop(self) -> None:
        """Stop the process and remove its buffers."""
        super().stop()
        self.inbox.close()
        self.outbox.close()
        remove_folder(self.folder)
