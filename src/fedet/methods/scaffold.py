"""SCAFFOLD: FedAvg with control variates that correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1.

Symbols: x, c = `State.model, .control`, y = the local model, c_k = `client.state["control"]`, eta_l, tau = `client.lr, .steps`,
eta_g = `server_lr`, K = all clients (not the participants). All controls start at zero.
With plain SGD, option II makes c_k the mean of the raw gradients of the client's steps exactly; momentum, weight decay and
clipping break that identity. Deviation: clients are selected in proportion to their size, as for every method here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Env, Method, Payload, Round, Traits, Weights, weights_of
from fedet.models import Model
from fedet.train import NonNegative, Training


@dataclass(frozen=True)
class State:
    """The global model and the server's control variate."""

    model: Weights
    control: Weights


@dataclass(frozen=True)
class Scaffold(Method[State]):
    """FedAvg with every local step corrected by the difference between the server's and the client's control."""

    name: ClassVar[str] = "scaffold"
    traits: ClassVar[Traits] = Traits()
    sends_updates: ClassVar[bool] = True

    client: Training = Training(lr=0.1, batch=64, steps=30)
    server_lr: NonNegative = 1.0
    option: Literal["I", "II"] = "II"

    def init(self, env: Env) -> State:  # line 1
        """x_0, and c = 0."""
        start = env.initial(env.large)
        return State(start, {name: torch.zeros_like(w) for name, w in start.items()})

    def round(self, state: State, r: Round, env: Env) -> State:
        """Add the mean update to x, and to c the participants' share of the mean over all clients."""
        down = Payload({"model": state.model, "control": state.control})
        ups = r.exchange({c.id: down for c in r.cohort})  # lines 4-13
        dx = r.average([up.tensors["model"] for up in ups.values()], r.weights(ups))  # line 16
        dc = r.average([up.tensors["control"] for up in ups.values()])
        share = len(ups) / env.num_clients
        return State(_add_scaled(state.model, dx, self.server_lr), _add_scaled(state.control, dc, share))  # line 17

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau corrected steps from x, then the new control."""
        x, c = down.tensors["model"], down.tensors["control"]
        own = client.state.get("control") or {name: torch.zeros_like(w) for name, w in c.items()}
        model = client.build(client.large, x)
        at_x = train.gradient(model, client.data) if self.option == "I" else {}  # line 12, option I
        correction = {name: (c[name] - own[name]).to(model.device) for name in c}

        def loss(model: Model, data: Any, index: Tensor) -> Tensor:  # line 10: y - eta (g + c - c_k)
            return train.cross_entropy(model, data, index) + maths.linear(dict(model.named_parameters()), correction)

        train.fit(model, client.data, self.client, seed=client.seed, loss=loss)
        delta = {name: y - x[name] for name, y in weights_of(model).items()}
        new = dict(own)
        for name, _ in model.named_parameters():  # buffers have no control
            mean = -delta[name] / (self.client.steps * self.client.lr) if self.client.steps else torch.zeros_like(c[name])
            new[name] = at_x[name] if self.option == "I" else own[name] - c[name] + mean  # line 12, option II
        client.state["control"] = new
        return Payload({"model": delta, "control": {name: new[name] - own[name] for name in new}})  # line 13

    def models(self, state: State, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The global model."""
        return {"server": (env.large, state.model)}

    def privacy_gap(self) -> str | None:
        """Option I sends the gradient over all of the client's examples; option II only what follows from the update."""
        return (
            "option I sends the gradient of all examples without noise: set method.option = 'II'"
            if self.option == "I"
            else None
        )


def _add_scaled(start: Weights, delta: Weights, rate: float) -> Weights:
    """Start + rate * delta, computed in float64 and rounded once; integer buffers are rounded to the nearest integer."""
    sums = {name: w.double() + rate * delta[name].double() for name, w in start.items()}
    return {name: (s if start[name].is_floating_point() else s.round()).to(start[name].dtype) for name, s in sums.items()}
