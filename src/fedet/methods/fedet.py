"""Fed-ET: train a large server model from small, heterogeneous client models.

Cho et al., "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning", IJCAI 2022, Alg. 1.

Symbols: W = `State.large`, M[i] = `State.small[arch]`, h = the head (all weights named `head.*`), w_k = `models[k]`,
eta, b, tau = `client.lr, .batch, .steps`, eta_s, b_s, tau_s = `server.lr, .batch, .steps`, lambda = `lam`.
Where the paper is ambiguous: "logits" are probabilities; the diversity target keeps its mass (`diversity = "raw"`);
labels, dissenters and weights are fixed within a round because they depend on the w_k alone; all heads start equal; batches
of the public data repeat no sample within a pass. `target = "soft"`, which is not in the paper, trains towards the consensus
probabilities instead of the consensus label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Env, Method, Payload, Round, Traits, Weights, head_of, weights_of
from fedet.models import Model
from fedet.train import DistillationInputs, InputSource, NonNegative, Training


@dataclass(frozen=True)
class State:
    """The server's state between rounds."""

    large: Weights
    small: dict[str, Weights]


@dataclass(frozen=True)
class FedET(Method[State]):
    """Clients train small models; the server distils their weighted consensus into the large one."""

    name: ClassVar[str] = "fedet"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, public_data="unlabelled", larger_server=True)
    replies_with_model: ClassVar[bool] = True

    client: Training = Training(lr=0.1, batch=64, steps=30)
    server: Training = Training(lr=0.005, batch=64, steps=128)
    lam: NonNegative = 0.05
    diversity: Literal["raw", "normalised"] = "raw"
    target: Literal["hard", "soft"] = "hard"

    def init(self, env: Env) -> State:  # line 1
        """The large model and one small model per architecture, all with the same head."""
        return State(env.initial(env.large), {arch: env.initial(arch) for arch in env.archs})

    def round(self, state: State, r: Round, env: Env) -> State:
        """One communication round."""
        arch = {c.id: c.arch for c in r.cohort}
        public = train.distillation_inputs(env, r, self.server)
        ups = r.exchange({c.id: Payload({"model": state.small[c.arch]}) for c in r.cohort})  # lines 4-6
        models = {k: up.tensors["model"] for k, up in ups.items()}  # line 8
        r.teachers.update({k: (arch[k], w) for k, w in models.items()})
        head = r.average([head_of(w) for w in models.values()], r.weights(models))  # line 9
        large = self._distil(state.large | head, public, r, env)  # line 10, eq. 11
        small = {a: self._average(a, state.small[a], models, r) for a in env.archs}  # line 10, eq. 12
        return State(large, {a: w | head_of(large) for a, w in small.items()})  # line 11

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps of SGD on the small model (eq. 1)."""
        model = client.build(client.arch, down.tensors["model"])
        train.fit(model, client.data, self.client, seed=client.seed)
        return Payload({"model": weights_of(model)})

    def models(self, state: State, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """W, then every small model."""
        return {"server": (env.large, state.large)} | {a: (a, w) for a, w in state.small.items()}

    def _average(self, arch: str, old: Weights, models: Mapping[int, Weights], r: Round) -> Weights:
        """The mean of the participants with this architecture, or the old weights if there are none."""
        members = [c.id for c in r.cohort if c.arch == arch and c.id in models]
        return r.average([models[k] for k in members], r.weights(members)) if members else old

    def _distil(self, large: Weights, public: DistillationInputs, r: Round, env: Env) -> Weights:
        """Ask the teachers and train W on what they agree on."""
        if self.server.steps == 0:
            return large
        teacher_logits = train.ensemble_logits(env, r.teachers.values(), public)
        c = r.consensus(torch.softmax(teacher_logits, dim=-1))  # eqs. 2-4 and 6-8
        r.notes.update(describe(c, list(r.teachers), env.num_classes))
        return self._train_server(large, c, public, r, env)

    def _train_server(self, large: Weights, c: maths.Consensus, public: DistillationInputs, r: Round, env: Env) -> Weights:
        """Train W on the ensemble loss (eq. 10) for tau_s steps."""
        model = env.build(env.large, large)
        on_device = c.to(model.device)

        def loss(model: Model, data: InputSource, index: Tensor) -> Tensor:
            logits = train.forward(model, data, index)
            return maths.ensemble_loss(logits, on_device[public.place[index]], self.lam, self.diversity, self.target)

        seed = train.distillation_seed(r)
        train.fit(model, public.view, self.server, seed=seed, loss=loss, progress=lambda i, n: env.progress("distil", i, n))
        return weights_of(model)


def describe(c: maths.Consensus, clients: list[int], classes: int) -> dict[str, object]:
    """The clients' mean confidence weights per consensus label, for the log."""
    counts = torch.bincount(c.label, minlength=classes)
    means = torch.zeros(len(clients), classes).index_add_(1, c.label, c.alpha) / counts.clamp(min=1)
    return {
        "mass": float(c.mass.mean()),
        "agreement": float((c.mass == 0).double().mean()),
        "confidence": {
            "clients": clients,
            "labels": counts.tolist(),
            "alpha": [[round(v, 4) for v in row] for row in means.tolist()],
        },
    }
