"""References: what was possible with the same data, initial weights and cohorts. They are not federated and never ranked.

Symbols: W = `state` (the server model), m = the cohort's size, eta, b, tau = `client.lr, .batch, .steps`,
eta_s, b_s, tau_s = `server.lr, .batch, .steps`, P = the public data, w_k = `client.state["model"]`.
The share of the largest class in the test data, to which every accuracy compares, needs no method: each run records it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedet import train
from fedet.core import Client, ClientStates, Env, Method, Payload, Round, Traits, Weights, seed_of, weights_of
from fedet.models import Model
from fedet.train import InputSource, Training


class ServerOnly(Method[Weights]):
    """One model, which the server trains by itself."""

    reference: ClassVar[bool] = True

    def init(self, env: Env) -> Weights:
        """W."""
        return env.initial(env.large)

    def local(self, down: Payload, client: Client) -> Payload:
        """Nothing: no client is asked."""
        return Payload()

    def models(self, state: Weights, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """W."""
        return {"server": (env.large, state)}


@dataclass(frozen=True)
class Central(ServerOnly):
    """The server model is trained on all clients' examples pooled, with as many batches as the clients would train."""

    name: ClassVar[str] = "central"
    traits: ClassVar[Traits] = Traits()

    client: Training = Training(lr=0.1, batch=64, steps=30)

    def round(self, state: Weights, r: Round, env: Env) -> Weights:
        """M * tau steps of SGD on the pooled examples."""
        assert env.pooled is not None
        m = int(sum(r.weights(c.id for c in r.cohort)))  # a client that was drawn twice counts twice
        model = env.build(env.large, state)
        settings = replace(self.client, steps=m * self.client.steps)
        train.fit(model, env.pooled, settings, seed=seed_of(r.seed, "central"), progress=partial(env.progress, "train"))
        return weights_of(model)


@dataclass(frozen=True)
class PublicLabels(ServerOnly):
    """The server model is trained on the public data with their true labels: a consensus that is always right."""

    name: ClassVar[str] = "public-labels"
    traits: ClassVar[Traits] = Traits(public_data="labelled")

    server: Training = Training(lr=0.005, batch=64, steps=128)

    def round(self, state: Weights, r: Round, env: Env) -> Weights:
        """Tau_s steps of SGD on P, with the batches and the view that Fed-ET's distillation has in this round."""
        assert env.public is not None
        assert env.public.labels is not None
        labels, public = env.public.labels, train.distillation_inputs(env, r, self.server)

        def loss(model: Model, data: InputSource, index: Tensor) -> Tensor:
            return F.cross_entropy(train.forward(model, data, index), train.to_device(labels[index], model.device))

        model = env.build(env.large, state)
        seed, progress = train.distillation_seed(r), partial(env.progress, "train")
        train.fit(model, public.view, self.server, seed=seed, loss=loss, progress=progress)
        return weights_of(model)


@dataclass(frozen=True)
class Local(Method[Weights]):
    """Each client trains a model of its own on its own examples, whenever it is in a cohort; nothing is sent."""

    name: ClassVar[str] = "local"
    traits: ClassVar[Traits] = Traits(heterogeneous=True)
    reference: ClassVar[bool] = True
    models_at_clients: ClassVar[bool] = True

    client: Training = Training(lr=0.1, batch=64, steps=30)

    def init(self, env: Env) -> Weights:
        """How often each client has trained."""
        return {"trained": torch.zeros(env.num_clients, dtype=torch.int64)}

    def round(self, state: Weights, r: Round, env: Env) -> Weights:
        """Let the cohort train; the messages are empty."""
        ups = r.exchange({c.id: Payload() for c in r.cohort})
        return {"trained": state["trained"].index_add(0, torch.tensor(list(ups)), torch.ones(len(ups), dtype=torch.int64))}

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps of SGD on w_k; a client whose training diverges says so, which rejects its reply, and keeps its w_k."""
        model = client.build(client.arch, client.state.get("model") or client.initial(client.arch))
        train.fit(model, client.data, self.client, seed=client.seed)
        weights = weights_of(model)
        if not all(bool(torch.isfinite(w).all()) for w in weights.values()):
            return Payload({"diverged": {}})
        client.state["model"] = weights
        return Payload()

    def models(self, state: Weights, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """None: every model is at a client."""
        return {}

    def client_models(self, state: Weights, env: Env, client_states: ClientStates) -> Mapping[str, list[tuple[str, Weights]]]:
        """The clients' own models."""
        return {"clients": [(client.arch, own["model"]) for client, own in client_states]}
