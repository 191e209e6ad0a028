"""FedGEMS: train a larger server model with clients' logits on labelled public data, requested only where it needs them.

Cheng et al., "FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge Fusion", 2021. There is no official
code; the formulas are those on which two independent descriptions agree.

Symbols: W = `State.large`; bank = `State.bank`, one stored logit vector per public sample, and `State.known`, which of them
exist; epsilon = `eps`; w_k = `client.state["model"]`, which never leaves the client. It is the only method that reads the
labels of the public data, at the server and at the clients.
Deviations: which samples W classifies correctly, and which it must request, is decided once at the start of a round, so that
there is one request; clients first distil the server's logits, once it has been trained, and then train on their own data;
the temperature is 1; training is counted in steps, not epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, ClientInfo, ClientStates, Env, Method, Payload, Round, Traits, Weights, seed_of, weights_of
from fedet.models import Model
from fedet.train import Loss, Training


@dataclass(frozen=True)
class State:
    """The large model, and its logits for the samples that it has classified correctly."""

    large: Weights
    bank: Tensor
    known: Tensor
    trained: bool = True


@dataclass(frozen=True)
class FedGEMS(Method[State]):
    """The server learns from its own correct predictions, and from reliable clients where it has none."""

    name: ClassVar[str] = "fedgems"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, public_data="labelled", clients_read_public=True, larger_server=True)

    client: Training = Training(lr=0.1, batch=64, steps=30)
    public: Training = Training(lr=0.1, batch=64, steps=30)
    server: Training = Training(lr=0.005, batch=64, steps=128)
    eps: Annotated[float, Field(ge=0, le=1)] = 0.75

    def init(self, env: Env) -> State:
        """W and an empty bank."""
        assert env.public is not None
        n = len(env.public)
        return State(env.initial(env.large), torch.zeros(n, env.num_classes), torch.zeros(n, dtype=torch.bool), False)

    def round(self, state: State, r: Round, env: Env) -> State:
        """Update the bank, request logits for the samples that are not in it, and train W."""
        assert env.public is not None
        view, labels = env.public.view(r.number), _labels(env.public)
        logits = train.predict(env.build(env.large, state.large), view)
        right = logits.argmax(dim=-1) == labels
        bank = logits.where(right.unsqueeze(-1), state.bank)  # W is right: store its logits
        known = state.known | right
        requested = (~known).nonzero().squeeze(-1)  # W is wrong and always was
        server_logits = {"server": logits} if state.trained else {}  # an untrained W has nothing to teach
        down = Payload({"logits": server_logits, "request": {"samples": requested}})
        ups = r.exchange({c.id: down for c in r.cohort})
        answers = torch.stack([up.tensors["logits"]["client"] for up in ups.values()])
        weights, fused = maths.reliable_fusion(answers, labels[requested])
        target = bank.index_copy(0, requested, fused)
        reliable = weights.sum(dim=0) > 0  # where no client is, only the label is used
        has_teacher = (known & ~right).index_copy(0, requested, reliable)
        model = env.build(env.large, state.large)
        loss = self._loss(labels, target, has_teacher)
        seed = train.distillation_seed(r)
        train.fit(model, view, self.server, seed=seed, loss=loss, progress=lambda i, n: env.progress("distil", i, n))
        r.notes.update({"right": int(right.sum()), "asked": len(requested), "known": int(known.sum())})
        return State(weights_of(model), bank, known, True)

    def local(self, down: Payload, client: Client) -> Payload:
        """Distil the server's logits on public data, train on private data, predict the requested samples."""
        assert client.public is not None
        view, labels = client.public.view(client.round), _labels(client.public)
        model = client.build(client.arch, client.state.get("model") or client.initial(client.arch))
        server = down.tensors["logits"].get("server")
        if server is not None:
            loss = self._loss(labels, server, torch.ones(len(view), dtype=torch.bool))
            train.fit(model, view, self.public, seed=seed_of(client.seed, "public"), loss=loss)
        train.fit(model, client.data, self.client, seed=client.seed)
        client.state["model"] = weights_of(model)
        requested = down.tensors["request"]["samples"]
        answer = train.predict(model, view, requested if len(requested) else torch.arange(1))[: len(requested)]
        return Payload({"logits": {"client": answer}})

    def models(self, state: State, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """W."""
        return {"server": (env.large, state.large)}

    def client_models(self, state: State, env: Env, client_states: ClientStates) -> Mapping[str, list[tuple[str, Weights]]]:
        """The participants' own models."""
        return {"clients": [(client.arch, own["model"]) for client, own in client_states]}

    def expected_reply(self, down: Payload, client: ClientInfo, env: Env) -> Payload:
        """Logits for each requested sample."""
        shape = (len(down.tensors["request"]["samples"]), env.num_classes)
        return Payload({"logits": {"client": torch.empty(shape, device="meta")}})

    def _loss(self, labels: Tensor, teacher: Tensor, has_teacher: Tensor) -> Loss:
        """Cross-entropy, or for samples with a teacher eps * cross-entropy + (1 - eps) * KL(teacher || student)."""
        target = torch.softmax(teacher, dim=-1)

        def loss(model: Model, data: Any, index: Tensor) -> Tensor:
            logits = train.forward(model, data, index)
            t, use = target[index].to(model.device), has_teacher[index].to(model.device)
            hard = F.cross_entropy(logits, labels[index].to(model.device), reduction="none")
            if self.eps == 1:
                return hard.mean()
            soft = (torch.xlogy(t, t) - t * F.log_softmax(logits, dim=-1)).sum(dim=-1)
            return torch.where(use, self.eps * hard + (1 - self.eps) * soft, hard).mean()

        return loss


def _labels(public: Any) -> Tensor:
    if public.labels is None:
        raise ValueError("FedGEMS needs labelled public data")
    labels: Tensor = public.labels
    return labels
