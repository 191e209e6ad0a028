"""The promises every method keeps, as checks that run on anyone's."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedet import config as configuration
from fedet import experiment
from fedet.core import Exchange, Payload
from fedet.data import Examples, FederatedData
from fedet.engine import rounds
from fedet.engine.exchange import in_process
from fedet.engine.rounds import Snapshot
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Record
from fedet.storage.run_folder import RunFolder
from fedet.train import Training
from fedet.workers.pool import process_pool

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
"""A federation small enough to be run a dozen times in a few seconds."""


@dataclass(frozen=True)
class Outcome:
    """One check: what it is called, whether it held, what was found."""

    name: str
    ok: bool
    detail: str


def check(reference: str, **hyper: Any) -> Iterator[Outcome]:
    """Run all checks on a method by its name or `module:Class`."""
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(reference, hyper, Path(scratch))
        for promise in (determinism, resume, parity, arrival, drop_out, silence, ledger, aliasing, locality):
            name = promise.__name__.replace("_", "-")
            try:
                complaint = promise(lab)
            except FedetError as error:
                complaint = str(error)
            except Exception as error:  # a user's method may raise anything: that is a finding, not a crash
                complaint = f"{type(error).__name__}: {error}"
            text = (promise.__doc__ or "").split("\n")[0].rstrip(".")
            yield Outcome(name, complaint is None, text if complaint is None else complaint)


@dataclass(frozen=True)
class Lab:
    """Makes small experiments with the method under test."""

    reference: str
    hyper: Mapping[str, Any]
    scratch: Path

    def experiment(self, **changes: Any) -> Experiment:
        """The small federation, with keys changed."""
        asked = {"method.name": self.reference, **quick(configuration.method_class(self.reference))}
        asked |= {f"method.{key}": value for key, value in self.hyper.items()}
        return experiment.build(configuration.load(SMALL, {**asked, **changes}), self.scratch / "cache")

    def play(self, ready: Experiment, connect: rounds.Connect = in_process) -> tuple[Snapshot, list[Record]]:
        """All its rounds, in memory."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            store, snapshot, entries = ClientStore(Path(folder)), Snapshot(ready.method.init(ready.env)), []
            while rounds.ended(ready, snapshot) is None:
                entry, _, snapshot = rounds.play(ready, store, snapshot, connect)
                store.commit(snapshot.round)
                entries.append({key: value for key, value in entry.items() if key != "seconds"})
        return snapshot, entries


def quick(method: Any) -> dict[str, Any]:
    """Settings that make a method's training short: promises show in few steps."""
    names = {f.name: isinstance(f.default, Training) for f in dataclasses.fields(method)}
    short = {f"method.{n}.{key}": value for n, yes in names.items() if yes for key, value in (("batch", 16), ("steps", 6))}
    return short | ({"method.epochs": 1} if "epochs" in names else {})


def determinism(lab: Lab) -> str | None:
    """The same seed gives the same bits and another seed does not."""
    first, second, other = (lab.play(lab.experiment(**{"run.seed": seed})) for seed in (0, 0, 1))
    if not same(first[0].state, second[0].state) or first[1] != second[1]:
        return "two runs with one seed differ: draw random numbers from client.seed and r.seed only"
    return "two seeds give the same run" if same(first[0].state, other[0].state) else None


def resume(lab: Lab) -> str | None:
    """Stopped after a round and resumed, a run gives the same bits as undisturbed."""
    folders = []
    for name, pauses in (("whole", (3,)), ("stopped", (1, 2, 3))):
        for length in pauses:
            ready = lab.experiment(**{"run.rounds": length})
            folder = RunFolder(lab.scratch / name)
            folder.begin(ready, "")
            last = rounds.run(ready, folder)
        folders.append((last, folder.metrics()))
    (whole, log), (stopped, other) = folders
    if not same(whole.state, stopped.state):
        return "the state after a resume differs: everything a round needs must be in the state or in client.state"
    return None if [_timeless(e) for e in log] == [_timeless(e) for e in other] else "the metrics after a resume differ"


def parity(lab: Lab) -> str | None:
    """Clients in processes of their own give the same bits as in this one."""
    serial, entries = lab.play(lab.experiment())
    ready = lab.experiment()
    with process_pool(ready, lab.scratch / "cache", 2) as pool:
        pooled, others = lab.play(replace(ready, env=replace(ready.env, predictor=pool)), pool.connect)
    if not same(serial.state, pooled.state):
        return "the state differs from that of one process: use nothing but what the client is given and keeps in client.state"
    return None if entries == others else "the metrics differ from those of one process"


def arrival(lab: Lab) -> str | None:
    """The order in which clients answer does not matter."""

    def reversed_order(ready: Experiment, store: Any, number: int) -> Exchange:
        inner = in_process(ready, store, number)
        return lambda requests: dict(sorted(inner(requests).items(), reverse=True))

    forward, backward = lab.play(lab.experiment()), lab.play(lab.experiment(), reversed_order)
    return None if same(forward[0].state, backward[0].state) else "the result depends on which client answers first"


def drop_out(lab: Lab) -> str | None:
    """With 30% of the clients never answering, the run goes through."""
    snapshot, entries = lab.play(lab.experiment(**{"run.dropout": 0.3, "run.rounds": 6}))
    if not any(entry["failures"] for entry in entries):
        return "nobody dropped out: the check is void"
    return None if snapshot.round == 6 else "the run stopped early"


def silence(lab: Lab) -> str | None:
    """A round in which nobody answers leaves the state as it was."""
    ready = lab.experiment(**{"run.dropout": 1.0, "run.rounds": 1})
    snapshot, entries = lab.play(ready)
    if not entries[0]["lost"]:
        return "the round is not recorded as lost"
    return None if same(snapshot.state, ready.method.init(ready.env)) else "the state changed in a lost round"


def ledger(lab: Lab) -> str | None:
    """The ledger counts every scalar of every message."""
    seen: list[dict[str, int]] = []

    def spying(ready: Experiment, store: Any, number: int) -> Exchange:
        inner, tally = in_process(ready, store, number), {"down": 0, "up": 0}
        seen.append(tally)

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            replies = inner(requests)
            tally["down"] += sum(scalars(payload) for payload in requests.values())
            tally["up"] += sum(scalars(payload) for payload in replies.values())
            return replies

        return exchange

    _, entries = lab.play(lab.experiment(), spying)
    for entry, tally in zip(entries, seen, strict=True):
        counted = {way: entry[f"params_{way}"] for way in ("down", "up")}
        if counted != tally:
            return f"round {entry['round']}: {tally} crossed, {counted} was recorded"
    return None


def aliasing(lab: Lab) -> str | None:
    """No tensor is shared: scribbling on messages changes no state, and a round leaves the state it got alone."""
    messages: list[Payload] = []

    def keeping(ready: Experiment, store: Any, number: int) -> Exchange:
        inner = in_process(ready, store, number)

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            copies = {k: Payload(clone(p.tensors), p.scalars) for k, p in requests.items()}
            replies = inner(copies)
            messages.extend([*copies.values(), *replies.values()])
            return replies

        return exchange

    ready = lab.experiment(**{"run.rounds": 1})
    before = ready.method.init(ready.env)
    kept = clone(before)
    store = ClientStore(lab.scratch / "aliasing")
    _, _, after = rounds.play(ready, store, Snapshot(before), keeping)
    if not same(before, kept):
        return "round() changed the state it was given: return a new one"
    copy = clone(after.state)
    stored = {c.id: clone(store.get(c.id)) for c in ready.clients}
    for payload in messages:
        for group in payload.tensors.values():
            for tensor in group.values():
                tensor.zero_()
    if not same(after.state, copy):
        return "the new state shares tensors with a message"
    return None if all(same(store.get(k), s) for k, s in stored.items()) else "client.state shares tensors with a message"


def locality(lab: Lab) -> str | None:
    """A client's first answer depends on nobody else's data."""
    answers: list[Payload] = []

    def recording(ready: Experiment, store: Any, number: int) -> Exchange:
        inner = in_process(ready, store, number)

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            replies = inner(requests)
            answers.append(replies[min(replies)])
            return replies

        return exchange

    ready = lab.experiment(**{"run.rounds": 1})
    target = rounds.select(ready, 1)[0][0].id
    lab.play(ready, recording)
    own = answers[0]
    answers.clear()
    lab.play(replace(ready, data=_others_changed(ready.data, target)), recording)
    return None if same(own.tensors, answers[0].tensors) else "a client's update changed with other clients' data"


def _others_changed(data: FederatedData, target: int) -> FederatedData:
    class Changed(FederatedData):
        def client(self, k: int) -> Examples:
            mine = super().client(k)
            if k == target:
                return mine
            return Examples(replace(mine.dataset, labels=(mine.dataset.labels + 1) % mine.dataset.num_classes), mine.rows)

    return Changed(**{f.name: getattr(data, f.name) for f in dataclasses.fields(data)})


def same(a: Any, b: Any) -> bool:
    """Equality of nested plain data, tensors bit for bit."""
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


def scalars(payload: Payload) -> int:
    """How many numbers a message holds."""
    return sum(t.numel() for group in payload.tensors.values() for t in group.values()) + len(payload.scalars)


def _timeless(entry: Record) -> Record:
    return {key: value for key, value in entry.items() if key != "seconds"}
