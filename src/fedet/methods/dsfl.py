"""DS-FL: clients exchange soft labels on public data, never parameters.

Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative Training with
Non-IID Private Data", IEEE TMC 2021 (DS-FL with entropy reduction aggregation).

Symbols: w_k = `client.state["model"]`, which never leaves the client; o_t = the round's public samples, `samples` of them;
T = `temperature`; g = the aggregated soft labels; the server's own model = `state`.
Deviations: only the round's participants upload and receive, and they distil at the end of the same round; training is counted
in steps (`distil.steps`: five passes over 1,000 samples); the server's model has the largest small architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import (
    Client,
    ClientInfo,
    ClientStates,
    Env,
    Method,
    Payload,
    Round,
    Traits,
    Weights,
    generator,
    seed_of,
    weights_of,
)
from fedet.data import Inputs
from fedet.models import Model
from fedet.train import Training


@dataclass(frozen=True)
class DSFL(Method[Weights]):
    """Clients keep their own models and learn from the mean of their soft labels on public samples."""

    name: ClassVar[str] = "dsfl"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, public_data="unlabelled", clients_read_public=True)

    client: Training = Training(lr=0.1, batch=64, steps=30)
    distil: Training = Training(lr=0.1, batch=100, steps=50)
    samples: Annotated[int, Field(ge=1)] = 1000
    temperature: Annotated[float, Field(gt=0)] = 0.1

    def init(self, env: Env) -> Weights:
        """The server's own model."""
        return env.initial(env.largest)

    def round(self, state: Weights, r: Round, env: Env) -> Weights:
        """Request soft labels, sharpen their mean, send it back, and distil it into the server's model."""
        assert env.public is not None
        view = env.public.view(r.number)
        order = torch.randperm(len(view), generator=generator(r.seed, "samples"))
        requested = order[: self.samples].sort().values  # step 1
        ups = r.exchange({c.id: Payload({"request": {"samples": requested}}) for c in r.cohort})  # steps 2-3
        probs = torch.stack([up.tensors["labels"]["probs"] for up in ups.values()])
        target = maths.era(probs, self.temperature, r.mean)  # step 4
        r.exchange({k: Payload({"labels": {"probs": target}}) for k in ups})  # step 5
        model = env.build(env.largest, state)
        self._learn(model, Inputs(view.inputs(requested)), target, seed_of(r.seed, "distil"))  # step 6
        return weights_of(model)

    def local(self, down: Payload, client: Client) -> Payload:
        """First exchange: train on private data and label the requested samples. Second: distil the aggregated labels."""
        assert client.public is not None
        view = client.public.view(client.round)
        model = client.build(client.arch, client.state.get("model") or client.initial(client.arch))
        if "request" in down.tensors:
            requested = down.tensors["request"]["samples"]
            train.fit(model, client.data, self.client, seed=client.seed)
            client.state.update({"model": weights_of(model), "request": {"samples": requested.clone()}})
            return Payload({"labels": {"probs": torch.softmax(train.predict(model, view, requested), dim=-1)}})
        requested = client.state.pop("request")["samples"]
        self._learn(model, Inputs(view.inputs(requested)), down.tensors["labels"]["probs"], seed_of(client.seed, "distil"))
        client.state["model"] = weights_of(model)
        return Payload()

    def models(self, state: Weights, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The server's own model."""
        return {env.largest: (env.largest, state)}

    def client_models(self, state: Weights, env: Env, client_states: ClientStates) -> Mapping[str, list[tuple[str, Weights]]]:
        """The participants' own models."""
        return {"clients": [(client.arch, own["model"]) for client, own in client_states]}

    def expected_reply(self, down: Payload, client: ClientInfo, env: Env) -> Payload:
        """Probabilities for each requested sample; an empty reply to the aggregated labels."""
        if "request" not in down.tensors:
            return Payload()
        shape = (len(down.tensors["request"]["samples"]), env.num_classes)
        return Payload({"labels": {"probs": torch.empty(shape, device="meta")}})

    def validate_reply(self, reply: Payload, env: Env) -> str | None:
        """Reject soft labels that are not probabilities: ERA would let one client outweigh all others."""
        for probs in reply.tensors.get("labels", {}).values():
            if bool((probs < 0).any()) or bool(((probs.sum(dim=-1) - 1).abs() > 1e-3).any()):
                return "sent soft labels that are not probabilities"
        return None

    def _learn(self, model: Model, samples: Inputs, target: Tensor, seed: int) -> None:
        def loss(model: Model, data: Inputs, index: Tensor) -> Tensor:
            return maths.divergence(train.forward(model, data, index), target[index].to(model.device))

        train.fit(model, samples, self.distil, seed=seed, loss=loss)
