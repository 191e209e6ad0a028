"""Fed-ET+: Fed-ET with a better trained server model and better teachers, at the same traffic.

It is ours, not the paper's. Each field below adds one ingredient to Fed-ET (`fedet.py`, whose symbols it shares), and each
has a value that turns it off; with all of them off it is Fed-ET to the bit. Clients send and receive what they do in
Fed-ET, and no label of a public input is used.

- `target`, `temperature`: the consensus probabilities as targets, to the power 1/T, instead of the consensus label.
- `lam`: zero, because a soft target already contains what dissenters say; the diversity term would count them twice.
- `views`, `mix`, `beta`: the public inputs in several views a round, mixed in pairs (mixup, CutMix). Teachers and student see
  the same mixture; the target is what the teachers say about it (function matching, Beyer et al., CVPR 2022).
- `decay`: the output E is an average of W over rounds; W itself goes on training.
- `agreement`, `cap`: a client's confidence is multiplied by how often it agrees with the majority of the other clients on the
  public inputs, and no weight exceeds cap / m.
- `align`: the consensus is reweighted by class, so that a round whose clients happen to know a class well or hardly at all
  does not make it frequent or rare: the mean over the public inputs moves towards the mean over all rounds so far.
- `small_teachers`: the averaged small models M[i] teach beside the clients' models.
- `heads`: which way heads are transferred: up to W (line 9), down to M[i] (line 11), both or none. W's head, which no body of
  M[i] has been trained with, disturbs the small models, so it stays where it is.
- `calibrate`: local training adds the logarithm of a label's share among the client's own labels to its logit, with this
  strength (logit adjustment): clients then learn to tell classes apart, not which ones they happen to have.
- `local_mix`: local training mixes pairs of the client's own inputs (mixup) in shares from Beta(local_mix, local_mix): clients
  with a few dozen examples no longer learn them by heart.
- `mu`: FedProx's term against drift in local training.
- `warmup`: before round 1, W's body learns to match two views of the same public input (SimCLR).
- `server`: momentum, Adam and a schedule are part of the training settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Env, Payload, Round, Traits, Weights, head_of, seed_of, weights_of
from fedet.data import Mix, MixedViews
from fedet.errors import ConfigError
from fedet.methods.fedet import FedET, describe
from fedet.methods.fedprox import fit_near
from fedet.models import Model
from fedet.train import DistillationInputs, InputSource, NonNegative, PublicInputs, Training


@dataclass(frozen=True)
class State:
    """The server's state between rounds; `output` is E."""

    large: Weights
    small: dict[str, Weights]
    output: Weights
    marginal: Tensor
    """The mean of the consensus over inputs and rounds: how frequent each class is."""
    updates: Tensor
    """How many rounds have changed this state; a lost round doesn't."""


@dataclass(frozen=True)
class FedETPlus(FedET):
    """Fed-ET with soft targets on mixed public inputs and an averaged server model."""

    name: ClassVar[str] = "fedet-plus"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, public_data="unlabelled", larger_server=True)

    server: Training = Training(lr=0.01, batch=64, steps=128, momentum=0.9)
    lam: NonNegative = 0.0
    target: Literal["hard", "soft"] = "soft"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    views: Annotated[int, Field(ge=1)] = 1
    mix: Mix = "mixup"
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.8
    agreement: bool = False
    cap: NonNegative = 0.0
    align: Annotated[float, Field(ge=0, le=1)] = 1.0
    small_teachers: bool = False
    heads: Literal["both", "up", "down", "none"] = "up"
    calibrate: NonNegative = 1.0
    local_mix: NonNegative = 0.0
    mu: NonNegative = 0.0
    warmup: Training = Training(lr=0.001, batch=64, steps=0, optimiser="adam")

    def check(self, env: Env) -> None:
        """Texts can't be mixed, and only images have views that differ."""
        public = env.public
        self._public(env)
        if self.local_mix and public is not None and not public.is_numeric:
            raise ConfigError("texts can't be mixed: set method.local_mix = 0")
        if self.warmup.steps and public is not None and not public.is_image:
            raise ConfigError("method.warmup needs images, whose views differ: set method.warmup.steps = 0")

    def init(self, env: Env) -> Any:
        """As Fed-ET; the average starts with W."""
        large, even = env.initial(env.large), torch.full((env.num_classes,), 1 / env.num_classes)
        return State(large, {arch: env.initial(arch) for arch in env.archs}, large, even, torch.tensor(0))

    def round(self, state: Any, r: Round, env: Env) -> Any:
        """One communication round."""
        arch, number = {c.id: c.arch for c in r.cohort}, int(state.updates) + 1
        public = train.distillation_inputs(env, r, self.server, self._public(env))
        ups = r.exchange({c.id: Payload({"model": state.small[c.arch]}) for c in r.cohort})
        models = {k: up.tensors["model"] for k, up in ups.items()}
        r.teachers.update({k: (arch[k], w) for k, w in models.items()})
        if self.warmup.steps and number == 1:
            warm = self._warmed_up(env)
            state = replace(state, large=warm, output=warm)
        small = {a: self._average(a, state.small[a], models, r) for a in env.archs}
        large, marginal = state.large, state.marginal
        if self.heads in ("both", "up"):
            large = large | r.average([head_of(w) for w in models.values()], r.weights(models))
        if self.server.steps:
            target, marginal = self._target(small, marginal, number, public, r, env)
            large = self._train_server(large, target, public, r, env)
        output = maths.moving_average(state.output, large, number, self.decay) if self.decay else large
        if self.heads in ("both", "down"):
            small = {a: w | head_of(output) for a, w in small.items()}
        return State(large, small, output, marginal, torch.tensor(number))

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps of SGD on the small model, calibrated, on mixtures and near the one that was received if so set."""
        model = client.build(client.arch, down.tensors["model"])
        plain = not self.calibrate and not self.local_mix
        loss = None if plain else train.calibrated(client.data.labels, self.calibrate, self.local_mix)
        fit_near(model, down.tensors["model"], self.mu, client, self.client, loss)
        return Payload({"model": weights_of(model)})

    def models(self, state: Any, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """E, then every small model."""
        return {"server": (env.large, state.output)} | {a: (a, w) for a, w in state.small.items()}

    def privacy_gap(self) -> str | None:
        """Calibration and mixtures make the loss of one example depend on the others."""
        if not self.calibrate and not self.local_mix:
            return None
        return "an example's loss depends on the client's other examples: set method.calibrate = 0 and method.local_mix = 0"

    def _public(self, env: Env) -> PublicInputs:
        assert env.public is not None
        plain = self.views == 1 and self.mix == "none"
        return env.public if plain else MixedViews(env.public, self.views, self.mix, self.beta)

    def _warmed_up(self, env: Env) -> Weights:
        """W after self-supervised training of its body on the public inputs; its head is the common one."""
        assert env.public is not None
        n = len(env.public)
        views = MixedViews(env.public, 2).subset(0, torch.arange(2 * n))
        model = env.build(env.large, env.initial(env.large))

        def loss(model: Model, data: InputSource, index: Tensor) -> Tensor:
            pairs = views.inputs(torch.cat([index, index + n]))
            return maths.matching_views(model.representation(train.to_device(pairs, model.device)), 0.2)

        seed = seed_of(env.seed, "warmup")
        train.fit(model, env.public.view(0), self.warmup, seed=seed, loss=loss, progress=partial(env.progress, "warm up"))
        return weights_of(model) | head_of(env.initial(env.large))

    def _target(
        self, small: dict[str, Weights], marginal: Tensor, number: int, public: DistillationInputs, r: Round, env: Env
    ) -> tuple[maths.Consensus, Tensor]:
        """The teachers' consensus on the inputs that training visits, and its marginal, averaged over all rounds."""
        teachers = [*r.teachers.values(), *(small.items() if self.small_teachers else ())]
        probs = torch.softmax(train.ensemble_logits(env, teachers, public), dim=-1)
        c = r.consensus(probs, maths.agreement(probs) if self.agreement else None, self.cap)
        r.notes.update(describe(replace(c, alpha=c.alpha[: len(r.teachers)]), list(r.teachers), env.num_classes))
        marginal = marginal + (c.probs.mean(dim=0) - marginal) / number
        if self.align:
            c = maths.agreed(c.alpha, probs, maths.aligned(c.probs, marginal, self.align))
        return replace(c, probs=maths.sharpen(c.probs, self.temperature)), marginal
