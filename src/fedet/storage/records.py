"""The JSON that a run leaves behind, as it is checked when it is read; keys not listed here may hold anything.

Everything is optional except what identifies a record, because older versions wrote less.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Schema(BaseModel):
    """What a record must look like; only ever used to check one."""

    model_config = ConfigDict(strict=True)


class Seconds(Schema):
    """Where a round's time went."""

    round: float = 0.0


class ClientFailure(Schema):
    """A client that did not contribute to a round."""

    client: Count | None = None
    kind: str = ""
    why: str = ""


class Stored(Schema):
    """The accuracies of the models that all clients keep."""

    clients: Count
    mean: float
    best: float
    worst_tenth: float | None = None
    weighted: float | None = None


class PerClient(Schema):
    """The accuracy of the method's output on each client's label mix."""

    mean: float
    worst_tenth: float
    std: float
    accuracies: dict[str, float] | None = None


class RoundRecord(Schema):
    """A line of metrics.jsonl."""

    round: Count
    cohort: list[Count] = []
    replied: list[Count] = []
    lost: bool = False
    why_lost: str | None = None
    failures: list[ClientFailure] | None = None
    params_up: Count = 0
    params_down: Count = 0
    bytes_up: Count = 0
    bytes_down: Count = 0
    model_params_up: Count = 0
    model_params_down: Count = 0
    params_total: Count
    accuracy: float | None = None
    val_accuracy: float | None = None
    models: dict[str, float] | None = None
    stored: dict[str, Stored] | None = None
    per_class: list[float | None] | None = None
    confusion: list[list[Count]] | None = None
    per_client: PerClient | None = None
    notes: dict[str, Any] | None = None
    banned: list[Count] | None = None
    backdoor: float | None = None
    seconds: Seconds = Seconds()


class LedgerRecord(Schema):
    """A line of ledger.jsonl."""

    round: Count


class AskedRecord(Schema):
    """A line of asked.jsonl: clients that were asked to train with noise, before they are."""

    round: Count
    clients: list[Count]


class Epsilons(Schema):
    """The largest and the median epsilon of the clients; None if one of them has no guarantee."""

    max: float | None = None
    median: float | None = None


class PrivacyRecord(Schema):
    """What the clients of a run have spent of their privacy: single examples, whole clients."""

    delta: float
    secret: bool = False
    epsilon: Epsilons | None = None
    client_epsilon: Epsilons | None = None
    clients: dict[str, dict[str, float | None]] = {}


class Caught(Schema):
    """How well the gate knew simulated attackers."""

    set_aside: Count
    precision: float | None = None
    recall: float | None = None


class ResultRecord(Schema):
    """result.json."""

    seed: Count = 0
    data: str = ""
    rounds: Count
    accuracy: float | None
    best_accuracy: float | None
    best_round: Count | None
    params_up: Count
    params_down: Count
    bytes_up: Count
    bytes_down: Count
    seconds: float
    stopped: str | None
    c_acc: dict[Annotated[str, Field(pattern=r"^\d+(\.\d+)?(e-?\d+)?$")], Count | None] | None = None
    arch_params: dict[str, Count] | None = None
    server: str | None = None
    reference: bool = False
    majority: float | None = None
    stored: dict[str, Stored] | None = None
    privacy: PrivacyRecord | None = None
    attackers: list[Count] | None = None
    caught: Caught | None = None
    backdoor: float | None = None
    warnings: list[str] = []


class EnvRecord(Schema):
    """env.json; `rounds` is how many rounds the run was started for."""

    command: str | list[str] | None = None
    rounds: Count | None = None


class MethodTable(Schema):
    """`[method]` in config.toml, as far as reports read it."""

    name: str


class DataTable(Schema):
    """`[data]` in config.toml, as far as reports read it."""

    name: str | None = None
    clients: Count | str | None = None
    partition: str | None = None
    alpha: float = 0.0


class ModelTable(Schema):
    """A model in config.toml, as far as reports read it."""

    name: str
    label: str | None = None
    options: dict[str, Any] = {}


class ModelsTable(Schema):
    """`[models]` in config.toml, as far as reports read it."""

    clients: list[str | ModelTable] = []
    server: str | ModelTable | None = None


class AttackTable(Schema):
    """`[run.attack]` in config.toml, as far as reports read it."""

    kind: str


class RunTable(Schema):
    """`[run]` in config.toml, as far as reports read it."""

    rounds: Count | None = None
    cohort: Count | None = None
    seed: Count = 0
    threads: Count | None = None
    report_accuracy: list[float] = []
    attack: AttackTable | None = None


class ConfigRecord(Schema):
    """config.toml, as far as reports read it: they never import what it refers to."""

    method: MethodTable
    data: DataTable = DataTable()
    models: ModelsTable = ModelsTable()
    run: RunTable = RunTable()


def _sum_and_number(values: list[float]) -> list[float]:
    if len(values) != 2 or not all(map(math.isfinite, values)) or values[1] < 1:
        raise ValueError("is not the sum and the number of some cosines")
    return values


class CheckpointRecord(Schema):
    """The fields of a run's checkpoint, next to the method's `state`."""

    round: Count
    best_round: Count = 0
    stale: Count = 0
    best_accuracy: float | None = None
    accuracy: float | None = None
    best_val: float | None = None
    seconds: float = 0.0
    totals: dict[str, Count]
    set_aside: dict[Count, Count] = {}
    replies: dict[Count, list[str]] = {}
    directions: dict[Count, Annotated[list[float], AfterValidator(_sum_and_number)]] = {}
    bodies: dict[Count, Annotated[list[float], AfterValidator(_sum_and_number)]] = {}
    state: Any


class ComparisonRecord(Schema):
    """comparison.json."""

    runs: list[str]
    seeds: list[Count] = []
    command: str | None = None
    threads: Count = 0
    notes: list[str] = []


class StudyRecord(Schema):
    """study.json: how far a study is, and its table as text."""

    title: str
    runs: Count
    finished: Count
    failed: dict[str, str]
    head: list[str]
    body: list[list[str]]


class MLflowRecord(Schema):
    """mlflow.json: the MLflow run to which a run is logged."""

    run_id: str


class TrainingRecord(Schema):
    """Where a model comes from, in a model folder's config.json."""

    method: str
    data: str
    seed: Count
    round: Count
    accuracy: float | None


class ModelRecord(Schema):
    """config.json of a model folder."""

    model_type: str
    architecture: dict[str, Any]
    training: TrainingRecord | None = None


class ModelSpecRecord(Schema):
    """The `architecture` in a model folder's config.json: the arguments of `fedet.models.build`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    width: float = 1.0
    stem: str = "cifar"
    norm: str = "none"
    conv_bias: bool = True
    options: dict[str, Any] = {}
    input_shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 16)]], Field(min_length=1, max_length=8)]
    num_classes: Annotated[int, Field(ge=1)]
    feature_width: Annotated[int, Field(ge=1)]
    representation_width: Annotated[int, Field(ge=1)]


class Confidence(Schema):
    """A method's notes on who led the consensus: labels per class, and each client's mean weight on each class."""

    clients: list[Count]
    labels: list[float]
    alpha: list[list[float]]


class ClientBoundRecord(Schema):
    """A client in bound.json."""

    arch: str
    examples: Count
    weight: float
    total: float


class RankCorrelation(Schema):
    """A rank correlation and its p-value."""

    rho: float
    p: float


class BoundRecord(Schema):
    """bound.json: what `fedet bound` found."""

    round: Count
    delta: float
    clients: list[ClientBoundRecord]
    correlations: dict[str, RankCorrelation | None]


class AttackRecord(Schema):
    """An attack in audit.json."""

    target: str
    attack: str
    members: Count
    non_members: Count
    auc: float
    auc_interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    tpr: float
    tpr_interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    roc: list[Annotated[list[float], Field(min_length=2, max_length=2)]]


class AuditRecord(Schema):
    """audit.json: what `fedet audit` found."""

    round: Count
    clients: list[Count]
    private: bool
    attacks: list[AttackRecord]
