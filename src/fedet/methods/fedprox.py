"""FedProx: FedAvg with a penalty on the distance to the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (cited by the Fed-ET paper as Sahu et al. 2019).

Symbols: x = `state`, w = the local model, mu = `mu`. The client minimises f_k(w) + mu/2 ||w - x||^2, with x as received;
the server is FedAvg's (`fedavg.py`).
Deviations: no stragglers with fewer steps (gamma-inexactness in the paper); uniform averages, as in FedAvg.
The original recommends no value of mu; the usual grid is 0.001, 0.01, 0.1, 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Payload, Traits, Weights, weights_of
from fedet.methods.fedavg import Averaging, Weighting
from fedet.models import Model
from fedet.train import Loss, NonNegative, Training


@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with a proximal term that keeps local models close to the global one."""

    name: ClassVar[str] = "fedprox"
    traits: ClassVar[Traits] = Traits()

    client: Training = Training(lr=0.1, batch=64, steps=30)
    mu: NonNegative = 0.01
    weights: Weighting = "uniform"

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps on the penalised loss; with mu = 0 bit-identical to FedAvg's."""
        model = client.build(client.large, down.tensors["model"])
        fit_near(model, down.tensors["model"], self.mu, client, self.client)
        return Payload({"model": weights_of(model)})


def fit_near(model: Model, received: Weights, mu: float, client: Client, settings: Training, loss: Loss | None = None) -> None:
    """Train on the client's examples with the penalty mu/2 * ||w - received||^2 added to the loss."""
    fixed = {name: w.to(model.device) for name, w in received.items()}

    def penalised(model: Model, data: Any, index: Tensor) -> Tensor:
        return (loss or train.cross_entropy)(model, data, index) + maths.proximal(dict(model.named_parameters()), fixed, mu)

    train.fit(model, client.data, settings, seed=client.seed, loss=penalised if mu else loss)
