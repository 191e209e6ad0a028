"""MOON: FedAvg with a contrastive loss between the representations of models.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

Symbols: x = `state`, w_prev = `client.state["previous"]` (the client's last trained model), z = the 128-wide representation
before the classifier, mu = `mu`, temperature = `temperature`. loss = cross-entropy + mu * l_con(z, z_global, z_previous).
The server is FedAvg's (`fedavg.py`).
Deviations: at a client's first participation there is no previous model, so no contrastive term; the representation is the
head's l2 output, the same for every method here (the original's projection head is 256 wide). No public data is used: the
Fed-ET paper's Table 1 is wrong here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Payload, Traits, Weights, weights_of
from fedet.methods.fedavg import Averaging, Weighting
from fedet.models import Model
from fedet.train import InputSource, Loss, NonNegative, Training


@dataclass(frozen=True)
class Moon(Averaging):
    """FedAvg with a loss that pulls representations towards the global model's and away from the previous local model's."""

    name: ClassVar[str] = "moon"
    traits: ClassVar[Traits] = Traits(tasks="images")

    client: Training = Training(lr=0.1, batch=64, steps=30)
    mu: NonNegative = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.5
    weights: Weighting = "uniform"

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps on the contrastive loss; bit-identical to FedAvg's with mu = 0 and at the first participation."""
        received, previous = down.tensors["model"], client.state.get("previous")
        model = client.build(client.large, received)
        loss = self._contrastive(client, received, previous) if self.mu and previous else None
        train.fit(model, client.data, self.client, seed=client.seed, loss=loss)
        trained = weights_of(model)
        client.state["previous"] = {name: w.clone() for name, w in trained.items()}
        return Payload({"model": trained})

    def _contrastive(self, client: Client, received: Weights, previous: Weights) -> Loss:
        """Lines 15-22: the global and the previous model are fixed, so their representations are computed only once."""
        rows, place = train.rows_of(client.data, self.client, client.seed)
        models = (client.build(client.large, w, "fixed") for w in (received, previous))
        fixed = torch.stack([train.predict(model, client.data, rows, output=represent) for model in models])

        def loss(model: Model, data: Any, index: Tensor) -> Tensor:
            inputs, labels = data.batch(index)
            z = model.representation(train.to_device(inputs, model.device))
            z_global, z_previous = train.to_device(fixed[:, place[index]], model.device)
            supervised = F.cross_entropy(model.head.l3(z), train.to_device(labels, model.device))
            return supervised + self.mu * maths.contrastive(z, z_global, z_previous, self.temperature)

        return loss


def represent(model: Model, data: InputSource, index: Tensor) -> Tensor:
    """The input of the head's classifier for these rows."""
    return model.representation(train.to_device(data.inputs(index), model.device))
