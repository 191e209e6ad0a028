"""Membership inference against a run's models: who has a model tries to tell which examples it was trained on.

Clients' models are not stored, so the state of the last checkpoint plays further rounds in memory: their cohorts train, with
DP-SGD and noise if the run has them, and the models they would send (or keep, in methods that send none) are attacked. So is
the server's model after each of these rounds. Members are the examples that a client of the cohort really took gradients of in
the round, non-members are test examples, as many of each label as both sides have: an attack can't win by telling labels
apart. What a method holds out, or has no step for, is no member, and neither is anything of a client that the server refused.

Two attacks, neither of which trains a shadow model. `loss` says "member" if the example's loss is small (Yeom et al., CSF
2018). `ratio` is the offline likelihood-ratio attack of Carlini et al. (S&P 2022) with the cohort's other clients in place of
shadow models: phi = log(p / (1 - p)) of the true label's probability p is taken as normally distributed over models that did
not train on the example, with the mean over the others' models and one variance for all examples; the score is by how much the
attacked model's phi exceeds that mean, which orders examples as the likelihood ratio does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import ClientState, ClientTask, Delivery, Weights, generator, seed_of
from fedet.data import Dataset, Examples, FederatedData
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError
from fedet.experiment import Experiment, Progress
from fedet.storage.files import write_json
from fedet.study import replay
from fedet.study.replay import Replay

Model = tuple[str, Weights]
Floats = npt.NDArray[np.float64]
RATE = 0.01
"""The false positives at which true positives are reported."""
RESAMPLES = 200


@dataclass(frozen=True)
class Attack:
    """How well one attack on one kind of model does; intervals are 95%, by bootstrap over examples."""

    target: str
    attack: str
    members: int
    non_members: int
    auc: float
    auc_interval: tuple[float, float]
    tpr: float
    """True positives at 1% false positives; guessing has 0.01."""
    tpr_interval: tuple[float, float]
    roc: list[tuple[float, float]]
    """False and true positive rates."""


@dataclass(frozen=True)
class AuditOfRun:
    """What `fedet audit` found after a round of the run."""

    round: int
    clients: list[int]
    private: bool
    """Whether clients trained with DP-SGD or noise on updates."""
    attacks: list[Attack]


@dataclass(frozen=True)
class Watched(Dataset):
    """A client's view of the data set, which notes the rows that are read for gradients, whoever reads them."""

    seen: set[int] = field(default_factory=set)

    def batch(self, rows: Tensor) -> Tensor:
        """As for any data set; predictions need no gradients, and leave no note."""
        if torch.is_grad_enabled():
            self.seen.update(rows.tolist())
        return super().batch(rows)


class WatchedExamples(Examples):
    """Examples of a watched data set, of another type than those that training lays out in memory as a whole."""


@dataclass(frozen=True)
class WatchedData(FederatedData):
    """A federation whose clients' data are watched."""

    clients: dict[int, WatchedExamples] = field(default_factory=dict)

    def client(self, k: int) -> Examples:
        """The same examples as ever, of a data set that only this client reads."""
        if k not in self.clients:
            own = super().client(k)
            self.clients[k] = WatchedExamples(Watched(**vars(own.dataset)), own.rows)
        return self.clients[k]

    def trained(self, k: int) -> Examples:
        """Those of a client's examples that it has taken gradients of."""
        own = self.client(k)
        assert isinstance(own.dataset, Watched)
        seen = sorted(own.dataset.seen & set(own.rows.tolist()))
        return Examples(self.dataset, torch.tensor(seen, dtype=torch.int64))


@dataclass(frozen=True)
class Scores:
    """Scores of the attacks on members and on non-members; higher means "member"."""

    members: dict[str, Floats]
    others: dict[str, Floats]


def of_run(run_dir: Path, cohorts: int = 3, progress: Progress | None = None) -> AuditOfRun:
    """Attack the models of a run's next cohorts and its server model, and write what is found to audit.json in its folder."""
    run = replay.of_run(run_dir, progress)
    experiment, first = run.experiment, run.snapshot.round + 1
    with runtime.limit_threads(experiment.config.run.threads):
        probes = [_probe(run, first + i) for i in range(cohorts)]
    seed, named = seed_of(experiment.seed, "audit"), ("clients", "server")
    pooled = {target: [scores for _, found in probes for scores in found[target]] for target in named}
    attacks = [judge(target, attack, found, seed) for target, found in pooled.items() if found for attack in found[0].members]
    seen = sorted({k for clients, _ in probes for k in clients})
    found = AuditOfRun(run.snapshot.round, seen, experiment.privacy is not None, attacks)
    write_json(run.folder.path / "audit.json", as_record(found))
    return found


def as_record(found: AuditOfRun) -> dict[str, object]:
    """Plain data for audit.json."""
    return asdict(found)


def judge(target: str, attack: str, found: Sequence[Scores], seed: int) -> Attack:
    """AUC and true positives at 1% false positives, over all scores together."""
    members, others = (np.concatenate([getattr(s, side)[attack] for s in found]) for side in ("members", "others"))
    rng = np.random.default_rng(seed)
    drawn = [(rng.choice(members, len(members)), rng.choice(others, len(others))) for _ in range(RESAMPLES)]
    return Attack(
        target=target,
        attack=attack,
        members=len(members),
        non_members=len(others),
        auc=auc(members, others),
        auc_interval=_interval([auc(*sample) for sample in drawn]),
        tpr=true_positives(members, others),
        tpr_interval=_interval([true_positives(*sample) for sample in drawn]),
        roc=roc(members, others),
    )


def auc(members: Floats, others: Floats) -> float:
    """The probability that a member scores higher than a non-member; ties count half."""
    below, upto = (np.searchsorted(np.sort(others), members, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(others))


def true_positives(members: Floats, others: Floats, rate: float = RATE) -> float:
    """The share of members above the lowest threshold that at most this share of non-members exceeds."""
    allowed = int(rate * len(others))
    return float((members > np.sort(others)[len(others) - 1 - allowed]).mean())


def roc(members: Floats, others: Floats, points: int = 200) -> list[tuple[float, float]]:
    """False and true positive rates, at most about so many points, denser where false positives are few."""
    counts = np.unique(np.concatenate([[0], np.geomspace(1, len(others), points).astype(int)]))
    falling = np.sort(others)[::-1]
    above = [np.inf if n == 0 else falling[n - 1] for n in counts]  # a threshold that n non-members reach
    return [(float((others >= t).mean()), float((members >= t).mean())) for t in above]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


class _Recording(InProcess):
    """A transport that keeps what it delivered."""

    def __init__(self, experiment: Experiment, state: object) -> None:
        super().__init__(experiment)
        self.state = state
        self.models: dict[int, Model] = {}

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """As in a run."""
        delivery = super().send(number, tasks)
        for k, reply in delivery.replies.items():
            model = self._trained(k, tasks[k], reply.tensors, delivery.states[k])
            if model:
                self.models[k] = model
        return delivery

    def _trained(self, k: int, task: ClientTask, sent: Mapping[str, Weights], own: ClientState) -> Model | None:
        """The model that a client has trained: the one it sends, or else the one it keeps, or the change it sends added up."""
        method, env, info = self.experiment.method, self.experiment.env, self.experiment.clients[k]
        arch = info.arch if method.traits.heterogeneous else env.large
        if method.replies_with_model:
            return arch, sent["model"]
        if "model" in own:
            kept: Sequence[Model] = method.client_models(self.state, env, [(info, own)]).get("clients", ())
            return next(iter(kept), None)
        start = task.request.tensors.get("model")
        if start is None or sent.get("model", {}).keys() != start.keys():
            return None
        return arch, {name: w + sent["model"][name] for name, w in start.items()}


def _probe(run: Replay, number: int) -> tuple[list[int], dict[str, list[Scores]]]:
    """Let one more cohort train; returns the clients that were attacked, and the scores by target."""
    data = WatchedData(**vars(run.experiment.data))
    experiment = replace(run.experiment, data=data)
    recording = _Recording(experiment, run.snapshot.state)
    r, exchange = run.round(number, recording.send)
    state = experiment.method.round(run.snapshot.state, r, experiment.env)
    refused = {failure.client for failure in exchange.failures}
    models = {k: model for k, model in recording.models.items() if len(data.trained(k))}
    if len(models) < 2:
        raise ConfigError(
            f"'{experiment.method.name}' trained {len(models)} client models that can be attacked and the attack compares "
            "at least two: raise run.cohort, or choose another method"
        )
    server = next(iter(experiment.method.models(state, experiment.env).values()), None)
    found: dict[str, list[Scores]] = {"clients": [], "server": []}
    for k in sorted(models):
        sides = matched(data.trained(k), data.test, seed_of(experiment.seed, "audit", number, k))
        others = [_phi(experiment, model, sides) for i, model in sorted(models.items()) if i != k]
        targets = {"clients": models[k]} | ({"server": server} if server and k not in refused else {})
        for target, model in targets.items():
            found[target].append(_scores(_phi(experiment, model, sides), others))
    return sorted(models), found


def matched(own: Examples, test: Examples, seed: int) -> tuple[Examples, Examples]:
    """As many examples of each label from both: members and non-members."""
    g, sides = generator(seed, "members"), (own, test)
    chosen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in own.labels.unique().tolist():  # type: ignore[no-untyped-call]
        places = [(side.labels == label).nonzero().squeeze(-1) for side in sides]
        for place, rows in zip(places, chosen, strict=True):
            rows.append(place[torch.randperm(len(place), generator=g)[: min(map(len, places))]])
    members, others = (Examples(side.dataset, side.rows[torch.cat(rows)]) for side, rows in zip(sides, chosen, strict=True))
    return members, others


def _phi(experiment: Experiment, model: Model, sides: Sequence[Examples]) -> list[Tensor]:
    """Log(p / (1 - p)) of the true label, per side; it falls as the loss rises."""
    net = experiment.env.build(*model)
    return [log_odds(train.predict(net, side), side.labels) for side in sides]


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Log(p / (1 - p)) of the labels' probabilities, without rounding p to 1."""
    logits = logits.double()
    others = logits.scatter(1, labels.unsqueeze(1), -torch.inf)
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1) - others.logsumexp(dim=1)


def _scores(attacked: Sequence[Tensor], references: Sequence[Sequence[Tensor]]) -> Scores:
    """The scores of both attacks; the loss is a falling function of phi, so phi itself orders examples by it."""
    out = []
    for side, phi in enumerate(attacked):
        usual = torch.stack([phis[side] for phis in references]).mean(dim=0)
        out.append({"loss": phi.numpy(), "ratio": (phi - usual).numpy()})
    return Scores(*out)
