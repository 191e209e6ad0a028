"""FedDF: ensemble distillation into one model per architecture.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithm 3 (heterogeneous).

Symbols: x_p = `state[arch]`, the student of architecture p; the teachers are all participants of all architectures; target =
softmax of the mean of their logits (AVGLOGITS); eta, tau_s = `server.lr, .steps`.
Deviations: a fixed number of steps with Adam and a cosine schedule; the original stops early on labelled validation data, which
this comparison does not have. With a validation split, `validate_every` steps does so: training stops after `patience`
validations without improvement and keeps the best student. The evaluated model is the largest small one; all students and the
average of their logits are logged. An architecture without participants keeps its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, Env, Method, Payload, Round, Traits, Weights, weights_of
from fedet.errors import ConfigError
from fedet.models import Model
from fedet.train import DistillationInputs, InputSource, Training


@dataclass(frozen=True)
class FedDF(Method[dict[str, Weights]]):
    """Clients train small models; each architecture's average is distilled from the ensemble of all of them."""

    name: ClassVar[str] = "feddf"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, public_data="unlabelled")
    replies_with_model: ClassVar[bool] = True

    ensemble_name: ClassVar[str] = "ensemble"

    client: Training = Training(lr=0.1, batch=64, steps=30)
    server: Training = Training(lr=0.001, batch=64, steps=128, optimiser="adam", schedule="cosine")
    validate_every: Annotated[int, Field(ge=0)] = 0
    patience: Annotated[int, Field(ge=1)] = 10

    def check(self, env: Env) -> None:
        """Early stopping needs labels."""
        if self.validate_every and env.val is None:
            raise ConfigError("method.validate_every needs labelled validation data: set data.val_fraction, for example to 0.1")

    def init(self, env: Env) -> dict[str, Weights]:
        """One model per architecture."""
        return {arch: env.initial(arch) for arch in env.archs}

    def round(self, state: dict[str, Weights], r: Round, env: Env) -> dict[str, Weights]:
        """Average by architecture, then distil every student from the same ensemble."""
        public = train.distillation_inputs(env, r, self.server)
        ups = r.exchange({c.id: Payload({"model": state[c.arch]}) for c in r.cohort})  # lines 4-6
        arch = {c.id: c.arch for c in r.cohort}
        models = {k: up.tensors["model"] for k, up in ups.items()}
        students = {}
        for name in env.archs:  # line 8
            members = [k for k in models if arch[k] == name]
            if members:
                students[name] = r.average([models[k] for k in members], r.weights(members))
        students = self._distil(students, [(arch[k], w) for k, w in models.items()], public, r, env)  # lines 9-13
        new = state | students
        r.teachers.update(enumerate(new.items()))
        return new

    def local(self, down: Payload, client: Client) -> Payload:
        """Tau steps of SGD on the client's own architecture."""
        model = client.build(client.arch, down.tensors["model"])
        train.fit(model, client.data, self.client, seed=client.seed)
        return Payload({"model": weights_of(model)})

    def models(self, state: dict[str, Weights], env: Env) -> Mapping[str, tuple[str, Weights]]:
        """The largest student, then the others."""
        order = sorted(env.archs, key=lambda arch: arch != env.largest)
        return {arch: (arch, state[arch]) for arch in order}

    def ensemble_probs(self, logits: Tensor) -> Tensor:
        """The softmax of the mean of the students' logits."""
        return maths.average_logits(logits)

    def _distil(
        self,
        students: dict[str, Weights],
        teachers: list[tuple[str, Weights]],
        public: DistillationInputs,
        r: Round,
        env: Env,
    ) -> dict[str, Weights]:
        if self.server.steps == 0:
            return students
        target = maths.average_logits(train.ensemble_logits(env, teachers, public), r.mean)

        def loss(model: Model, data: InputSource, index: Tensor) -> Tensor:
            return maths.divergence(train.forward(model, data, index), target[public.place[index]].to(model.device))

        distilled = {}
        for done, (arch, weights) in enumerate(students.items()):
            env.progress("distil", done, len(students))
            model = env.build(arch, weights)
            best = _Best(model, env, self.validate_every, self.patience) if self.validate_every else None
            train.fit(model, public.view, self.server, seed=train.distillation_seed(r), loss=loss, stop=best)
            distilled[arch] = best.weights if best else weights_of(model)
        return distilled


class _Best:
    """Called after each step: keeps the student with the best validation accuracy and stops when it no longer improves."""

    def __init__(self, model: Model, env: Env, every: int, patience: int) -> None:
        assert env.val is not None
        self.model, self.data, self.every, self.patience = model, env.val, every, patience
        self.weights, self.accuracy, self.stale = weights_of(model), train.evaluate(model, env.val).accuracy, 0

    def __call__(self, step: int) -> bool:
        if step % self.every:
            return False
        accuracy = train.evaluate(self.model, self.data).accuracy
        self.model.train()
        self.stale += 1
        if accuracy > self.accuracy:
            self.weights, self.accuracy, self.stale = weights_of(self.model), accuracy, 0
        return self.stale >= self.patience
