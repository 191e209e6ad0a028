"""FedAvg: federated averaging of the large model.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Symbols: x = `state` (the global model), y_k = `up.tensors["model"]`, S = `r.cohort`, eta, B, tau = `client.lr, .batch, .steps`.
Deviations: local training is counted in mini-batch steps, not epochs, and the average is uniform by default because clients
are selected in proportion to their size (weighting by size would count it twice); `weights = "examples"` is the original's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedet import train
from fedet.core import Client, Env, Method, Payload, Round, Traits, Weights, weights_of
from fedet.train import Training

Weighting = Literal["uniform", "examples"]


class Averaging(Method[Weights]):
    """FedAvg but for local training, which is all that FedProx and MOON change."""

    replies_with_model: ClassVar[bool] = True

    client: Training
    weights: Weighting

    def init(self, env: Env) -> Weights:
        """x_0."""
        return env.initial(env.large)

    def round(self, state: Weights, r: Round, env: Env) -> Weights:
        """Send x and average the replies."""
        ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return r.average([up.tensors["model"] for up in ups.values()], r.weights(ups, self.weights))

    def models(self, state: Weights, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The global model."""
        return {"server": (env.large, state)}


@dataclass(frozen=True)
class FedAvg(Averaging):
    """Every client trains the large model; the server averages."""

    name: ClassVar[str] = "fedavg"
    traits: ClassVar[Traits] = Traits()

    client: Training = Training(lr=0.1, batch=64, steps=30)
    weights: Weighting = "uniform"

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps of SGD from x on the client's own data."""
        model = client.build(client.large, down.tensors["model"])
        train.fit(model, client.data, self.client, seed=client.seed)
        return Payload({"model": weights_of(model)})
