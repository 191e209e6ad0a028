"""DS-FL: clients exchange soft labels on public data, never parameters.

Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative Training with
Non-IID Private Data", IEEE TMC 2021 (DS-FL with entropy reduction aggregation).

Symbols: w_k = `client.state["model"]`, which never leaves the client; o_t = the round's public samples, `samples` of them;
T = `temperature`; g = the aggregated soft labels; the server's own model = `state`.
Deviations: only the round's participants upload and receive, and they distil at the end of the same round; work is counted in
steps (`distil.steps`: five passes over 1,000 samples); the server's model is of the largest small architecture.
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
    """Clients keep models of their own and agree on soft labels for public samples."""

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
        """Ask for soft labels, sharpen their mean, send it back, and learn from it too."""
        assert env.public is not None
        view = env.public.view(r.number)
        order = torch.randperm(len(view), generator=generator(r.seed, "samples"))
        asked = order[: self.samples].sort().values  # step 1
        ups = r.exchange({c.id: Payload({"request": {"samples": asked}}) for c in r.cohort})  # steps 2-3
        probs = torch.stack([up.tensors["labels"]["probs"] for up in ups.values()])
        agreed = maths.era(probs, self.temperature)  # step 4
        r.exchange({k: Payload({"labels": {"probs": agreed}}) for k in ups})  # step 5
        model = env.build(env.largest, state)
        self._learn(model, Inputs(view.inputs(asked)), agreed, seed_of(r.seed, "distil"))  # step 6
        return weights_of(model)

    def local(self, down: Payload, client: Client) -> Payload:
        """First half: train on private data and label the samples asked for. Second half: learn what was agreed."""
        assert client.public is not None
        view = client.public.view(client.round)
        model = client.build(client.arch, client.state.get("model") or client.initial(client.arch))
        if "request" in down.tensors:
            asked = down.tensors["request"]["samples"]
            train.fit(model, client.data, self.client, seed=client.seed)
            client.state.update({"model": weights_of(model), "request": {"samples": asked.clone()}})
            return Payload({"labels": {"probs": torch.softmax(train.predict(model, view, asked), dim=-1)}})
        asked = client.state.pop("request")["samples"]
        self._learn(model, Inputs(view.inputs(asked)), down.tensors["labels"]["probs"], seed_of(client.seed, "distil"))
        client.state["model"] = weights_of(model)
        return Payload()

    def models(self, state: Weights, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The server's own model."""
        return {env.largest: (env.largest, state)}

    def client_models(self, state: Weights, env: Env, client_states: ClientStates) -> Mapping[str, list[tuple[str, Weights]]]:
        """The participants' own models."""
        return {"clients": [(client.arch, own["model"]) for client, own in client_states]}

    def expected_reply(self, down: Payload, client: ClientInfo, env: Env) -> Payload:
        """Probabilities for each sample asked for; nothing to the soft labels."""
        if "request" not in down.tensors:
            return Payload()
        shape = (len(down.tensors["request"]["samples"]), env.num_classes)
        return Payload({"labels": {"probs": torch.empty(shape, device="meta")}})

    def validate_reply(self, reply: Payload, env: Env) -> str | None:
        """Soft labels that are no probabilities: ERA would let one client's outweigh all others'."""
        for probs in reply.tensors.get("labels", {}).values():
            if bool((probs < 0).any()) or bool(((probs.sum(dim=-1) - 1).abs() > 1e-3).any()):
                return "sent soft labels that are no probabilities"
        return None

    def _learn(self, model: Model, samples: Inputs, agreed: Tensor, seed: int) -> None:
        def loss(model: Model, data: Inputs, index: Tensor) -> Tensor:
            return maths.divergence(train.forward(model, data, index), agreed[index].to(model.device))

        train.fit(model, samples, self.distil, seed=seed, loss=loss)
