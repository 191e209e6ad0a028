"""FedGKT: clients train a feature extractor and a small classifier, the server a larger network on their features.

He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020, in the
adaptation to partial participation of the Fed-ET paper's appendix.
Symbols: f_e = the stem (3x3, 16 channels) of a client's model, H = f_e(x); f_c = the client's small architecture on H; f_s =
`State.server`, the large architecture on H; T = `temperature`, alpha = `alpha`. A client's model stays in
`client.state["model"]`; features, logits and labels are sent, parameters never are.
Adaptation: server logits are computed on the fly on the features of the client's current extractor (`server_logits =
"on_the_fly"`, which costs one more upload of features) or on those of its last participation (`"cached"`); clients' models are
stored between participations; the server's passes over a round's uploads start at `epochs` and decrease. Before the server has
been trained, clients train on their labels only. The evaluated model is f_s on each participant's extractor; the mean over
participants is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedet import maths, train
from fedet.core import Client, ClientInfo, ClientStates, Env, Method, Payload, Round, Traits, Weights, seed_of, weights_of
from fedet.data import Inputs
from fedet.models import SPLIT
from fedet.train import NonNegative, Training

SHARES = ((20, 1.0), (30, 0.75), (40, 0.5), (100, 0.25), (150, 0.15))
"""Up to this round, this share of `epochs`: the original's 20, 15, 10, 5, 3 and then 2 passes."""


@dataclass(frozen=True)
class State:
    """The server's network on features, and each client's last features (`cached` only)."""

    server: Weights
    features: dict[str, Tensor]
    trained: bool = False


@dataclass(frozen=True)
class FedGKT(Method[State]):
    """Clients learn from their labels and the server's logits, the server from their features, labels and logits."""

    name: ClassVar[str] = "fedgkt"
    traits: ClassVar[Traits] = Traits(heterogeneous=True, larger_server=True, tasks="images")
    needs_images: ClassVar[bool] = True

    client: Training = Training(lr=0.1, batch=64, steps=30)
    server: Training = Training(lr=0.001, batch=64, steps=0, optimiser="adam", weight_decay=1e-4)
    epochs: Annotated[int, Field(ge=1)] = 20
    temperature: Annotated[float, Field(gt=0)] = 3.0
    alpha: NonNegative = 1.0
    server_logits: Literal["on_the_fly", "cached"] = "on_the_fly"

    def init(self, env: Env) -> State:
        """f_s."""
        return State(env.initial(SPLIT + env.large), {})

    def round(self, state: State, r: Round, env: Env) -> State:
        """Send the server's logits, receive features, logits and labels, and train f_s on them."""
        features = self._current_features(state, r)
        model: Any = env.build(SPLIT + env.large, state.server)
        logits = {k: {"server": train.predict(model.inner, Inputs(h))} for k, h in features.items() if h is not None}
        ups = r.exchange({k: Payload({"logits": logits.get(k, {})}) for k in features})
        believed = {c.id: c.num_examples for c in r.cohort}  # with `run.robust`, not all that a client says it has
        sent = [{name: rows[: believed[k]] for name, rows in up.tensors["upload"].items()} for k, up in ups.items()]
        model = env.build(SPLIT + env.large, state.server)
        self._train(model, {name: torch.cat([s[name] for s in sent]) for name in ("features", "logits", "labels")}, r, env)
        cache = {str(k): up.tensors["upload"]["features"] for k, up in ups.items()} if self.server_logits == "cached" else {}
        return State(weights_of(model), state.features | cache, True)

    def local(self, down: Payload, client: Client) -> Payload:
        """First exchange, if any: upload the current features. Second: train with the server's logits and upload."""
        model: Any = client.build(SPLIT + client.arch, client.state.get("model") or client.initial(SPLIT + client.arch))
        if "request" in down.tensors:
            return Payload({"upload": {"features": train.predict(model.stem, client.data)}})
        server = down.tensors["logits"].get("server")

        def loss(model: Any, data: Any, index: Tensor) -> Tensor:
            inputs, labels = data.batch(index)
            logits = model(train.to_device(inputs, model.device))
            hard = F.cross_entropy(logits, train.to_device(labels, model.device))
            if server is None or self.alpha == 0:
                return hard
            return hard + self.alpha * maths.distillation(logits, server[index].to(model.device), self.temperature)

        train.fit(model, client.data, self.client, seed=client.seed, loss=loss)
        client.state["model"] = weights_of(model)
        features = train.predict(model.stem, client.data)
        logits = train.predict(model.inner, Inputs(features))
        return Payload({"upload": {"features": features, "logits": logits, "labels": client.data.labels.clone()}})

    def models(self, state: State, env: Env) -> Mapping[str, tuple[str, Weights]]:
        """f_s on the initial extractor, until there are participants with a trained one."""
        return {"server": (SPLIT + env.large, state.server)}

    def client_models(self, state: State, env: Env, client_states: ClientStates) -> Mapping[str, list[tuple[str, Weights]]]:
        """f_s on each participant's extractor, and the participants' own models."""
        stems = [{n: w for n, w in own["model"].items() if n.startswith("stem.")} for _, own in client_states]
        return {
            "server": [(SPLIT + env.large, state.server | stem) for stem in stems],
            "clients": [(SPLIT + client.arch, own["model"]) for client, own in client_states],
        }

    def expected_reply(self, down: Payload, client: ClientInfo, env: Env) -> Payload:
        """One row per example: features, and in the second exchange also logits and labels."""
        n, meta = client.num_examples, torch.device("meta")
        upload = {"features": torch.empty((n, *env.model_cache.split_shape), device=meta)}
        if "logits" in down.tensors:
            upload["logits"] = torch.empty((n, env.num_classes), device=meta)
            upload["labels"] = torch.empty(n, dtype=torch.int64, device=meta)
        return Payload({"upload": upload})

    def validate_reply(self, reply: Payload, env: Env) -> str | None:
        """Reject labels that are not classes."""
        labels = reply.tensors["upload"].get("labels", torch.empty(0))
        bad = (labels < 0) | (labels >= env.num_classes)
        return f"sent labels outside 0..{env.num_classes - 1}" if bool(bad.any()) else None

    def privacy_gap(self) -> str | None:
        """Features, logits and labels of every example are sent."""
        return "clients send the features and the label of every example: choose another method"

    def _server_steps(self, number: int, examples: int) -> int:
        """Mini-batch steps of a round: `epochs` passes at first, fewer later."""
        share = next((s for until, s in SHARES if number <= until), 0.1)
        return max(1, round(self.epochs * share)) * max(1, examples // self.server.batch)

    def _current_features(self, state: State, r: Round) -> dict[int, Tensor | None]:
        """The features on which each client gets the server's logits (None: no logits), for clients that replied."""
        if not state.trained:
            return {c.id: None for c in r.cohort}
        if self.server_logits == "cached":
            return {c.id: state.features.get(str(c.id)) for c in r.cohort}
        ups = r.exchange({c.id: Payload({"request": {}}) for c in r.cohort})
        return {k: up.tensors["upload"]["features"] for k, up in ups.items()}

    def _train(self, model: Any, sent: Weights, r: Round, env: Env) -> None:
        labels, teacher = sent["labels"], sent["logits"]

        def loss(inner: Any, data: Inputs, index: Tensor) -> Tensor:
            logits = train.forward(inner, data, index)
            soft = maths.distillation(logits, train.to_device(teacher[index], inner.device), self.temperature)
            return soft + self.alpha * F.cross_entropy(logits, train.to_device(labels[index], inner.device))

        progress = partial(env.progress, "distil")
        settings = replace(self.server, steps=self._server_steps(r.number, len(labels)))
        train.fit(model.inner, Inputs(sent["features"]), settings, seed=seed_of(r.seed, "distil"), loss=loss, progress=progress)
