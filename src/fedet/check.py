"""Checks of the properties that every method must have, for the package's methods and for users'."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedet import config as configuration
from fedet import experiment as experiments
from fedet import train
from fedet.core import ClientTask, Delivery, Payload, Transport
from fedet.data import Examples, FederatedData
from fedet.engine import evaluation, loop, rounds
from fedet.engine.evaluation import RoundModels
from fedet.engine.exchange import InProcess
from fedet.engine.rounds import Snapshot
from fedet.errors import FedetError, Interrupted, tracebacks
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Record, num_scalars
from fedet.storage.run_folder import RunFolder
from fedet.train import Training
from fedet.workers.pool import Pool

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "clients": 6, "alpha": 1.0, "augment": {"crop": 1, "flip": False, "color": 0.0, "gray": 0.0}},
    "models": {
        "clients": [{"name": "cnn", "width": 0.5}, {"name": "resnet8", "width": 0.0625}],
        "server": {"name": "cnn", "width": 1.5},
        "assignment": "balanced",
        "feature_width": 16,
        "representation_width": 8,
    },
    "run": {"rounds": 3, "cohort": 3, "threads": 1},
}
"""A federation small enough to run a dozen times in a few seconds."""


MAX_STRING = 64
"""Characters that a string scalar may have, because the ledger counts it as one number."""


@dataclass(frozen=True)
class Outcome:
    """The result of one check."""

    name: str
    ok: bool
    detail: str


def check(reference: str, **hyper: Any) -> Iterator[Outcome]:
    """Run all checks on a method by its name or `module:Class`."""
    with tempfile.TemporaryDirectory() as scratch:
        yield from run_checks(Lab(reference, hyper, Path(scratch)), CHECKS)


def run_checks(lab: Lab, checks: Iterable[Callable[[Lab], str | None]]) -> Iterator[Outcome]:
    """Run these checks, one after the other."""
    for check_function in checks:
        if check_function in ABOUT_MESSAGES and not lab.exchanges:
            yield Outcome(_name(check_function), True, "does not apply to a reference that exchanges no messages")
            continue
        try:
            problem = check_function(lab)
        except FedetError as error:
            problem = str(error)
        except Exception as error:  # a user's method may raise anything, which fails the check
            problem = f"{type(error).__name__}: {error} (at {tracebacks.place(error)})"
        text = (check_function.__doc__ or "").split("\n")[0].rstrip(".")
        yield Outcome(_name(check_function), problem is None, text if problem is None else problem)


def _name(check_function: Callable[[Lab], str | None]) -> str:
    return check_function.__name__.replace("_", "-")


@dataclass(frozen=True)
class Lab:
    """Builds and runs small experiments with the method under test."""

    reference: str
    hyper: Mapping[str, Any]
    scratch: Path

    @property
    def exchanges(self) -> bool:
        """Whether clients are asked for anything; only a reference may ask for nothing."""
        cls = configuration.method_class(self.reference)
        return not cls.reference or any(entry["replied"] for entry in self.baseline[1])

    @cached_property
    def baseline(self) -> tuple[Snapshot, list[Record]]:
        """The small federation's run in this process, with which several checks compare theirs."""
        return self.run(self.experiment())

    def experiment(self, **changes: Any) -> Experiment:
        """The small federation, with these configuration keys changed."""
        settings = {"method.name": self.reference, **quick(configuration.method_class(self.reference))}
        settings |= {f"method.{key}": value for key, value in self.hyper.items()}
        return experiments.build(configuration.load(SMALL, {**settings, **changes}), self.scratch / "cache")

    def run(
        self, experiment: Experiment, transport: Transport | None = None, store: ClientStore | None = None
    ) -> tuple[Snapshot, list[Record]]:
        """Run all rounds without a run folder; returns the last snapshot and the records."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            store = store or ClientStore(Path(folder))
            snapshot, entries = Snapshot(experiment.method.init(experiment.env)), []
            while rounds.ended(experiment, snapshot) is None:
                entry, _, snapshot = rounds.run_round(experiment, store, snapshot, transport or InProcess(experiment))
                store.commit(snapshot.round)
                entries.append({key: value for key, value in entry.items() if key != "seconds"})
        return snapshot, entries


class ReverseOrder(InProcess):
    """A transport that runs clients one by one in descending id, and reports each task and reply."""

    def __init__(
        self, experiment: Experiment, observe: Callable[[int, ClientTask, Payload], None] = lambda k, task, reply: None
    ) -> None:
        super().__init__(experiment)
        self._observe = observe

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """Run the tasks in descending client id."""
        replies, states = {}, {}
        for k in sorted(tasks, reverse=True):
            done = super().send(number, {k: tasks[k]})
            replies[k], states[k] = done.replies[k], done.states[k]
            self._observe(k, tasks[k], replies[k])
        return Delivery(replies, states)


def quick(method: Any) -> dict[str, Any]:
    """Settings that shorten a method's training: the checks need few steps."""
    short = {f"method.{name}.{key}": value for name in training_fields(method) for key, value in (("batch", 16), ("steps", 6))}
    return short | ({"method.epochs": 1} if "epochs" in {f.name for f in dataclasses.fields(method)} else {})


def training_fields(method: Any) -> list[str]:
    """The names of a method's hyper-parameters of type `Training`."""
    return [f.name for f in dataclasses.fields(method) if isinstance(f.default, Training)]


def determinism(lab: Lab) -> str | None:
    """Two runs with the same seed are bit-identical, and a different seed gives a different run."""
    first, second, other = lab.baseline, *(lab.run(lab.experiment(**{"run.seed": seed})) for seed in (0, 1))
    if not same(first[0].state, second[0].state) or first[1] != second[1]:
        return "two runs with the same seed differ: draw random numbers from client.seed and r.seed only"
    return "two different seeds give the same run" if same(first[0].state, other[0].state) else None


def learns(lab: Lab) -> str | None:
    """No round is lost, every round changes the state, and the loss on the clients' own data falls."""
    longer = {f"method.{name}.steps": 20 for name in training_fields(configuration.method_class(lab.reference))}
    experiment = lab.experiment(**{"run.rounds": 5, "data.partition": "iid", **longer})
    store = ClientStore(lab.scratch / "learns")
    snapshot = Snapshot(experiment.method.init(experiment.env))
    losses = [_loss_on_own_data(experiment, snapshot.state, store, ())]
    while rounds.ended(experiment, snapshot) is None:
        entry, _, after = rounds.run_round(experiment, store, snapshot, InProcess(experiment))
        store.commit(after.round)
        if entry["lost"]:
            why = "; ".join(sorted({f["why"] for f in entry["failures"]}))
            return f"round {entry['round']} was lost: {why or 'no reply was usable'}"
        if same(after.state, snapshot.state):
            return f"round {entry['round']} did not change the state"
        snapshot = after
        losses.append(_loss_on_own_data(experiment, snapshot.state, store, entry["replied"]))
    first, *later = [loss for loss in losses if math.isfinite(loss)] or [math.inf]  # before round 1 there may be no model
    best = min(later, default=math.inf)
    return (
        None
        if best < first - 0.01
        else f"the loss on the clients' own data never fell: {first:.4f} at first, {best:.4f} at best"
    )


def _loss_on_own_data(experiment: Experiment, state: Any, store: ClientStore, replied: Any) -> float:
    """The lowest mean loss that any of the method's models has on all clients' examples."""
    states = evaluation.client_states(experiment, store, replied)
    models = RoundModels(experiment, state, 0, [], states, store).by_name()
    pooled = experiment.data.pooled
    losses = [train.evaluate(experiment.env.build(*model), pooled).loss for group in models.values() for model in group]
    return min((loss for loss in losses if math.isfinite(loss)), default=math.inf)


def resume(lab: Lab) -> str | None:
    """A run that is stopped after each round and resumed is bit-identical to an uninterrupted one."""
    folders = []
    for name, on_round in (("whole", None), ("stopped", _interrupt)):
        for _ in range(4):  # a round each, and one that only reads what is there
            experiment, folder = lab.experiment(), RunFolder(lab.scratch / name)
            folder.begin(experiment, "")
            with suppress(Interrupted):
                last = loop.run(experiment, folder, InProcess(experiment), on_round)
        folders.append((last, folder.metrics()))
    (whole, log), (stopped, other) = folders
    if not same(whole.state, stopped.state):
        return "the state after a resume differs: everything a round needs must be in the state or in client.state"
    return (
        None
        if [_without_seconds(e) for e in log] == [_without_seconds(e) for e in other]
        else "the metrics after a resume differ"
    )


def _interrupt(entry: Record) -> None:
    raise KeyboardInterrupt


def parity(lab: Lab) -> str | None:
    """Runs with worker processes and in one process are bit-identical."""
    serial, entries = lab.baseline
    experiment = lab.experiment()
    with closing(Pool(experiment, lab.scratch / "cache", 2)) as pool:
        pooled, others = lab.run(replace(experiment, env=replace(experiment.env, predictor=pool)), pool)
    if not same(serial.state, pooled.state):
        return "the state differs from that of one process: clients may use only their arguments and client.state"
    return None if entries == others else "the metrics differ from those of one process"


def arrival(lab: Lab) -> str | None:
    """The result does not depend on the order in which clients train."""
    experiment = lab.experiment()
    forward, entries = lab.baseline
    backward, others = lab.run(experiment, ReverseOrder(experiment))
    if same(forward.state, backward.state) and entries == others:
        return None
    return "the result depends on the order of the clients: they share something that is not in a message"


def drop_out(lab: Lab) -> str | None:
    """Rounds in which 30% of the clients drop out still train the model."""
    experiment = lab.experiment(**{"run.dropout": 0.3, "run.rounds": 6})
    snapshot, entries = lab.run(experiment)
    affected = [entry for entry in entries if entry["failures"]]
    if not affected:
        return "no client dropped out, so nothing was checked"
    if all(entry["lost"] for entry in affected):
        return "every round in which a client dropped out was lost: continue with the replies that arrived"
    return "the state never changed" if same(snapshot.state, experiment.method.init(experiment.env)) else None


def silence(lab: Lab) -> str | None:
    """A round without replies does not change the state."""
    experiment = lab.experiment(**{"run.dropout": 1.0, "run.rounds": 1})
    snapshot, entries = lab.run(experiment)
    if not entries[0]["lost"]:
        return "the round is not recorded as lost: do not catch the error that the exchange raises"
    return None if same(snapshot.state, experiment.method.init(experiment.env)) else "the state changed in a lost round"


def ledger(lab: Lab) -> str | None:
    """The ledger counts every number of every message, and no string scalar is long enough to hide a model."""
    experiment = lab.experiment()
    sent = {"down": 0, "up": 0}
    texts: list[str] = []

    def observe(k: int, task: ClientTask, reply: Payload) -> None:
        for way, payload in (("down", task.request), ("up", reply)):
            sent[way] += num_scalars(payload)
            long = [name for name, v in payload.scalars.items() if isinstance(v, str) and len(v) > MAX_STRING]
            texts.extend(long)

    _, entries = lab.run(experiment, ReverseOrder(experiment, observe))
    counted = {way: sum(entry[f"params_{way}"] for entry in entries) for way in sent}
    if texts:
        return f"the scalar '{texts[0]}' has more than {MAX_STRING} characters and is counted as one number: send tensors"
    return None if counted == sent else f"{sent} numbers were sent, {counted} were recorded"


def aliasing(lab: Lab) -> str | None:
    """State and messages share no tensors, and a round does not change the state it was given."""
    experiment = lab.experiment(**{"run.rounds": 1})
    messages: list[Payload] = []

    class Copying(InProcess):
        def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
            copies = {
                k: replace(task, request=Payload(clone(task.request.tensors), task.request.scalars))
                for k, task in tasks.items()
            }
            delivery = super().send(number, copies)
            messages.extend([*(task.request for task in copies.values()), *delivery.replies.values()])
            return delivery

    before = experiment.method.init(experiment.env)
    untouched = clone(before)
    store = ClientStore(lab.scratch / "aliasing")
    _, _, after = rounds.run_round(experiment, store, Snapshot(before), Copying(experiment))
    if not same(before, untouched):
        return "round() changed the state it was given: return a new one"
    copy = clone(after.state)
    stored = {c.id: clone(store.get(c.id)) for c in experiment.clients}
    for payload in messages:
        for group in payload.tensors.values():
            for tensor in group.values():
                tensor.zero_()
    if not same(after.state, copy):
        return "the new state shares tensors with a message"
    return None if all(same(store.get(k), s) for k, s in stored.items()) else "client.state shares tensors with a message"


def locality(lab: Lab) -> str | None:
    """A client's first reply does not depend on other clients' data."""
    replies: list[Payload] = []
    experiment = lab.experiment(**{"run.rounds": 1})
    target = rounds.select(experiment, experiment.clients, 1)[0][0].id  # the lowest id, so the last to run

    def observe(k: int, task: ClientTask, reply: Payload) -> None:
        if k == target:
            replies.append(Payload(clone(reply.tensors), reply.scalars))

    for data in (experiment.data, _others_changed(experiment.data, target)):
        changed = replace(experiment, data=data)
        lab.run(changed, ReverseOrder(changed, observe))
    own, other = replies[0], replies[len(replies) // 2]
    alike = same(own.tensors, other.tensors) and own.scalars == other.scalars
    return None if alike else "a client's update changed with other clients' data"


CHECKS = (determinism, learns, resume, parity, arrival, drop_out, silence, ledger, aliasing, locality)
ABOUT_MESSAGES = (arrival, drop_out, silence, ledger, locality)


def _others_changed(data: FederatedData, target: int) -> FederatedData:
    class Changed(FederatedData):
        def client(self, k: int) -> Examples:
            mine = super().client(k)
            if k == target:
                return mine
            return Examples(replace(mine.dataset, labels=(mine.dataset.labels + 1) % mine.dataset.num_classes), mine.rows)

    return Changed(**{f.name: getattr(data, f.name) for f in dataclasses.fields(data)})


def same(a: Any, b: Any) -> bool:
    """Whether nested plain data is equal, with tensors compared bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def clone(value: Any) -> Any:
    """A deep copy of nested plain data."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: clone(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: clone(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _without_seconds(entry: Record) -> Record:
    return {key: value for key, value in entry.items() if key != "seconds"}
