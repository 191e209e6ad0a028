"""Build an experiment from a configuration: data, models, clients and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedet import config as configuration
from fedet import data as datasets
from fedet import privacy
from fedet.config import Config, DataConfig, ModelsConfig, PrivacyConfig, objects
from fedet.config.sources import nearest
from fedet.core import REMOTE_STATE, Client, ClientInfo, Env, Method, Payload, malformed, not_named_tensors, seed_of
from fedet.data import FederatedData, shared
from fedet.errors import ConfigError, FedetError
from fedet.models import ModelCache
from fedet.privacy import Spending, StepsTaken
from fedet.train import Training

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs; `client` builds a client's side on demand."""

    config: Config
    method: Any
    data: FederatedData
    env: Env
    clients: Sequence[ClientInfo]

    @property
    def seed(self) -> int:
        """The root seed of the run."""
        return self.config.run.seed

    @property
    def privacy(self) -> PrivacyConfig | None:
        """How the clients' examples are protected; None if they are not, as in references, which send nothing."""
        return self.config.privacy if self.config.privacy.on and not self.method.reference else None

    def local(self, request: Payload, client: Client) -> Payload:
        """A client's reply: the method's, with the noise that is due before it is sent."""
        with privacy.counted_steps() as taken:
            reply: Payload = self.method.local(request, client)
        self._check_steps(taken, len(client.data))
        who = f"'{type(self.method).__name__}.local'"
        if problem := malformed(reply):
            raise FedetError(f"the reply of {who} {problem}")
        if problem := next(filter(None, (not_named_tensors(*group) for group in client.state.items())), None):
            raise FedetError(f"client.state, as {who} left it, {problem}")
        return reply if self.privacy is None else privacy.private_update(self.privacy, request, reply, client.seed)

    def _check_steps(self, taken: StepsTaken, examples: int) -> None:
        """Refuse a reply that took more private steps, or larger ones, than its epsilon is computed for."""
        training = vars(self.method).get("client")
        if taken.steps and (taken.steps > training.steps or taken.largest > min(training.batch, examples)):
            raise FedetError(
                f"'{type(self.method).__name__}.local' took {taken.steps} private steps with batches of {taken.largest}, and "
                f"the epsilon counts {training.steps} with batches of {training.batch}: train once per request, with the "
                "settings `client`"
            )

    def spending(self) -> Spending | None:
        """What private training costs the clients, or None if there is none."""
        if self.privacy is None:
            return None
        return Spending(self.privacy, self.data.sizes.tolist(), self.method.client.batch, self.method.client.steps)

    def client(self, number: int, round_number: int, state: dict[str, Any]) -> Client:
        """The client's side of a round, with access to its own data only."""
        if REMOTE_STATE in state:
            raise FedetError(
                f"the state of client {number} is on its own disk: this run was made on Flower, submit it there again"
            )
        return Client(
            id=number,
            arch=self.clients[number].arch,
            large=self.env.large,
            data=replace(self.data.client(number), privacy=self.privacy),
            seed=seed_of(self.seed, "client", number, round_number),
            round=round_number,
            model_cache=self.env.model_cache,
            state=state,
            public=self.env.public if self.method.traits.clients_read_public else None,
        )


def build(config: Config, cache: Path, progress: Progress | None = None) -> Experiment:
    """Load and split the data and assign an architecture to every client."""
    with objects.scope(shared.saved([config.data.name, config.data.public], cache)):
        method = configuration.build_method(config.method)
        data = datasets.load(config.data, config.run.seed, cache)
        _check(config, method, data)
        built = assemble(config, method, data, progress)
        method.check(built.env)
        return built


def share_arrays(config: Config, cache: Path) -> None:
    """Write arrays that were passed as data to a file, for other processes."""
    shared.save([config.data.name, config.data.public], cache)


def assemble(config: Config, method: Any, data: FederatedData, progress: Progress | None = None) -> Experiment:
    """Build an experiment from data that is already loaded."""
    model_cache = ModelCache(
        {spec.id: spec for spec in [*config.models.clients, config.models.server]},
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        feature_width=config.models.feature_width,
        representation_width=config.models.representation_width,
        seed=config.run.seed,
        device=device(config.run.device),
    )
    _check_vocabulary(model_cache, data)
    archs = tuple(spec.id for spec in config.models.clients)
    params = {} if config.models.assignment in ("uniform", "balanced") else {a: model_cache.num_params(a) for a in archs}
    assigned = assign(config.models, archs, data, seed_of(config.run.seed, "assignment"), params)
    public = data.public
    if public is not None and method.traits.public_data != "labelled":
        public = public.without_labels()
    env = Env(model_cache, archs, config.models.server.id, data.num_classes, config.run.seed, len(assigned), public, data.val)
    if method.reference:
        env = replace(env, pooled=data.pooled)
    if progress:
        env = replace(env, progress=progress)
    infos = tuple(ClientInfo(k, arch, int(n)) for k, (arch, n) in enumerate(zip(assigned, data.sizes, strict=True)))
    return Experiment(config, method, data, env, infos)


def with_fixed_threads(config: Config) -> Config:
    """Store the number of the server's threads in the configuration: thread count changes floating-point rounding."""
    import torch

    if config.run.threads is not None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": torch.get_num_threads()})})


def assign(models: ModelsConfig, archs: Sequence[str], data: FederatedData, seed: int, params: dict[str, int]) -> list[str]:
    """The architecture of each client."""
    clients, rng = len(data.sizes), np.random.default_rng(seed)
    if models.assignment == "uniform":
        return [archs[i] for i in rng.integers(len(archs), size=clients)]
    if models.assignment == "balanced":
        return [archs[i % len(archs)] for i in rng.permutation(clients)]
    if models.assignment in ("examples", "classes"):
        amounts = data.sizes if models.assignment == "examples" else (data.label_counts() > 0).sum(axis=1)
        ranks = np.lexsort((rng.permutation(clients), amounts)).argsort()  # equal ones in random order
        by_size = sorted(archs, key=lambda arch: params[arch])
        return [by_size[rank * len(archs) // clients] for rank in ranks]
    if models.assignment == "given":
        chosen = _repeat(models.given, clients, "given")
        unknown = next((arch for arch in chosen if arch not in archs), None)
        if unknown:
            raise ConfigError(
                f"models.given names '{unknown}', which is not among models.clients{nearest(unknown, archs)}: "
                f"choose from {', '.join(archs)}"
            )
    else:
        chosen = [largest_fit(params, budget) for budget in _repeat(models.budgets, clients, "budgets")]
    unused = next((arch for arch in archs if arch not in chosen), None)
    if unused:
        raise ConfigError(
            f"no client has the architecture '{unused}': leave it out of models.clients, or change models."
            f"{'given' if models.assignment == 'given' else 'budgets'} so that one does"
        )
    return chosen


def largest_fit(params: dict[str, int], budget: int) -> str:
    """The largest architecture within a budget of parameters."""
    fitting = [arch for arch, n in params.items() if n <= budget]
    if not fitting:
        smallest = min(params, key=lambda arch: params[arch])
        raise ConfigError(
            f"a budget of {budget:,} parameters fits no architecture: the smallest, '{smallest}', has {params[smallest]:,}"
        )
    return max(fitting, key=lambda arch: params[arch])


def device(name: str) -> str:
    """The torch device to use; `auto` is a GPU if one is available."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):  # bit-identical results
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if name != "cpu" and not (name.startswith("cuda") and torch.cuda.is_available()):
        raise ConfigError(f"run.device = '{name}' is not available: use 'cpu', or 'auto' to use a GPU if there is one")
    return name


def _repeat(values: list[Any] | None, clients: int, key: str) -> list[Any]:
    if not values:
        raise ConfigError(f"models.assignment needs models.{key}: one entry per client, or a shorter list that is repeated")
    return [values[k % len(values)] for k in range(clients)]


def _check(config: Config, method: Any, data: FederatedData) -> None:
    if method.needs_images and len(data.input_shape) != 3:
        raise ConfigError(
            f"method '{method.name}' needs images: clients send the output of their first layer, and the first layer of a text "
            "model is an embedding lookup, so this would reveal the text; choose another method"
        )
    if method.traits.public_data != "none" and data.public is None:
        raise ConfigError(
            f"method '{method.name}' needs public data and there is none: {_public_advice(config.data, len(data.dataset))}"
        )
    if method.traits.public_data == "labelled" and data.public is not None:
        _check_public_labels(config, method, data)
    if config.privacy.on and not method.reference:
        _check_privacy(config, method)
    with_data = int((data.sizes > 0).sum())
    if config.run.selection != "with_replacement" and config.run.cohort > with_data:
        raise ConfigError(
            f"run.cohort = {config.run.cohort} clients a round, but only {with_data} of {len(data.sizes)} clients have data: "
            "lower run.cohort, lower data.clients or raise data.alpha"
        )


def _check_privacy(config: Config, method: Any) -> None:
    """Refuse to state an epsilon that would not hold."""
    settings = config.privacy
    if settings.noise or settings.update_noise:
        privacy.check_installed()
    if config.data.standardise:
        raise ConfigError("data.standardise reads all clients' examples without noise: turn it off, or privacy off")
    if settings.clip and (gap := method.privacy_gap()):
        raise ConfigError(f"DP-SGD (privacy.clip) does not protect the examples of '{method.name}': {gap}")
    if settings.clip and ":" in config.method["name"] and type(method).privacy_gap is Method.privacy_gap:
        raise ConfigError(
            f"method '{method.name}' does not say whether DP-SGD protects its clients' examples: define privacy_gap, "
            "see docs/guide/privacy.md"
        )
    if settings.clip and not isinstance(vars(method).get("client"), Training):
        raise ConfigError(f"method '{method.name}' has no setting `client` whose steps could be counted: turn privacy off")
    if settings.update_clip and not method.replies_with_model:
        raise ConfigError(f"privacy.update_clip needs a method whose clients send a model alone, which '{method.name}' is not")


def _public_advice(data: DataConfig, examples: int) -> str:
    """How to get public data, for a configuration that has none."""
    if data.public != "split":
        return f"set data.public (now '{data.public}') to 'split', another data set, a folder or a generator"
    train, public, test = data.split
    if public:
        given = [f"{share:g}" for share in data.split]
        return f"data.split = [{', '.join(given)}] leaves none of {examples} examples: raise the second number or use more data"
    return (
        f"data.split = [{train:g}, {public:g}, {test:g}] leaves none for the server: set it to [{train:g}, 1, {test:g}], for "
        "example, or set data.public to another data set, a folder or a generator"
    )


def _check_public_labels(config: Config, method: Any, data: FederatedData) -> None:
    labels = data.public.labels if data.public else None
    if labels is None:
        raise ConfigError(
            f"method '{method.name}' needs labelled public data and data.public = '{config.data.public}' has no labels: "
            "use 'split', or your own function that returns inputs and labels"
        )
    if int(labels.max()) >= data.num_classes:
        raise ConfigError(
            f"data.public has the label {int(labels.max())}, but the data set's labels are 0 to {data.num_classes - 1}"
        )


def _check_vocabulary(model_cache: ModelCache, data: FederatedData) -> None:
    """Reject a model with a smaller vocabulary than the data's, which would fail in the middle of a run."""
    pieces = data.dataset.vocab_size
    for arch in model_cache.names if pieces else ():
        size = model_cache.vocab_size(arch)
        if size is not None and pieces is not None and size < pieces:
            raise ConfigError(
                f"the data's vocabulary has {pieces} word pieces and that of '{arch}' has {size}: set its options.vocab_size = "
                f"{pieces}, or data.text.vocab to the vocabulary of the model"
            )
