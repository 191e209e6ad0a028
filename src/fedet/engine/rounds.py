"""The run itself: choose clients, play a round, evaluate, record, checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fedet.core import REMOTE_STATE, ClientInfo, ClientStates, Exchange, Payload, Round, seed_of
from fedet.engine import evaluation, exchange
from fedet.engine.evaluation import Named
from fedet.engine.exchange import Failure, NoReplies
from fedet.errors import Diverged, FedetError, Interrupted
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Ledger, Record
from fedet.storage.run_folder import RunFolder, uninterrupted

Callbacks = Callable[[Record], None]
Connect = Callable[[Experiment, Any, int], Exchange]
"""Makes the exchange of one round: of this experiment, with this client store, for this round number."""


TOTALS = ("params_up", "params_down", "bytes_up", "bytes_down", "model_params_up", "model_params_down")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run carries from one round to the next."""

    state: Any
    round: int = 0
    best_accuracy: float = -1.0
    best_round: int = 0
    accuracy: float = -1.0
    stale: int = 0
    best_val: float = -1.0
    seconds: float = 0.0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))


def run(
    experiment: Experiment, folder: RunFolder, callbacks: Callbacks | None = None, connect: Connect = exchange.in_process
) -> Snapshot:
    """Run from the folder's checkpoint, or from the start, to the end of the configuration.

    Where other processes evaluate, a round is evaluated while the clients of the next one train, unless its accuracy decides
    whether there is a next one.
    """
    log = Log(experiment, folder, callbacks, _restore(experiment, folder))
    how = experiment.config.run
    overlap = experiment.env.predictor is not None and not how.target_accuracy and not how.patience
    snapshot = log.snapshot
    try:
        while ended(experiment, snapshot) is None:
            played = begin(experiment, folder.store, snapshot, connect, log.finish)
            log.finish()
            with uninterrupted():
                folder.store.commit(played.after.round)
                log.waiting = played
            if not overlap or played.scores is None:
                log.finish()
            snapshot = replace(log.waiting.after if log.waiting else log.snapshot, seconds=log.seconds())
        log.finish()
    except (KeyboardInterrupt, Diverged) as stop:
        folder.store.rollback()
        with contextlib.suppress(KeyboardInterrupt), uninterrupted():
            log.finish(tell=False)
            log.close()
        if isinstance(stop, Diverged):
            raise
        raise Interrupted(f"stopped after round {log.snapshot.round}; go on with: fedet resume {folder.path}") from None
    return log.snapshot


class Log:
    """Writes down finished rounds: metrics, models, checkpoints."""

    def __init__(self, experiment: Experiment, folder: RunFolder, callbacks: Callbacks | None, snapshot: Snapshot) -> None:
        self.experiment, self.folder, self.callbacks, self.snapshot = experiment, folder, callbacks, snapshot
        self.waiting: Played | None = None
        """A round that was played and is still being evaluated."""
        self._best: Named | None = None
        self._last: Named | None = None
        self._saved = snapshot.round
        self._began = time.perf_counter() - snapshot.seconds

    def seconds(self) -> float:
        """How long the run has taken, over all its parts."""
        return time.perf_counter() - self._began

    def finish(self, tell: bool = True) -> None:
        """Wait for the evaluation of the round that was played last, and write the round down."""
        if self.waiting is None:
            return
        entry, ledger, after = self.waiting.finish(self.snapshot)
        with uninterrupted():
            self._last, self.waiting = self.waiting.output, None
            self.snapshot = s = replace(after, seconds=self.seconds())
            self.folder.log(entry, ledger)
            self._best = self._last if s.best_round == s.round else self._best
            if s.round % self.experiment.config.run.checkpoint_every == 0 or ended(self.experiment, s):
                self.save()
        if self.callbacks and tell:
            self.callbacks(entry)

    def save(self) -> None:
        """Checkpoint."""
        _save(self.experiment, self.folder, self.snapshot, self._best, self._last)
        self._saved, self._best = self.snapshot.round, None

    def close(self) -> None:
        """Checkpoint what is not yet, and drop what was logged after it."""
        if self._saved < self.snapshot.round or self.snapshot.round == 0:
            self.save()
        self.folder.forget_after(self.snapshot.round)


@dataclass
class Played:
    """A round whose evaluation may still be going on."""

    entry: Record
    ledger: Ledger
    after: Snapshot
    output: Named
    scores: Callable[[], Record] | None
    """What waits for them, of a round that is evaluated."""

    def finish(self, before: Snapshot) -> tuple[Record, Ledger, Snapshot]:
        """Wait for the evaluation: the round's record, its ledger, and the snapshot after it."""
        start = time.perf_counter()
        scores = self.scores() if self.scores else {}
        waited = time.perf_counter() - start
        seconds = self.entry["seconds"]
        seconds |= {"round": seconds["round"] + waited, "evaluate": seconds["evaluate"] + waited}
        after = replace(before, state=self.after.state, round=self.after.round, totals=self.after.totals)
        return self.entry | scores, self.ledger, _scored(after, scores)


def play(experiment: Experiment, store: Any, before: Snapshot, connect: Connect) -> tuple[Record, Ledger, Snapshot]:
    """One round: its record, its ledger, and the snapshot after it."""
    return begin(experiment, store, before, connect).finish(before)


def begin(
    experiment: Experiment, store: Any, before: Snapshot, connect: Connect, between: Callable[[], None] = lambda: None
) -> Played:
    """One round up to its evaluation, which is begun; `between` is called when the clients have answered."""
    number = before.round + 1
    start = time.perf_counter()
    raw = connect(experiment, store, number)  # first: on a network it finds out who is there to be chosen
    cohort, draws = select(experiment, number)
    failures: list[Failure] = []
    ledger = Ledger()
    exchange = _exchange(experiment, raw, number, failures, ledger)

    def exchange_then(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
        replies = exchange(requests)
        between()
        return replies

    r = Round(number, cohort, exchange_then, seed_of(experiment.seed, "round", number), draws)
    try:
        state, lost = experiment.method.round(before.state, r, experiment.env), False
    except NoReplies:
        store.rollback()
        state, lost = before.state, True
    except Diverged as error:
        raise Diverged(f"round {number}: {error}; lower the learning rate, or set run.diverged = 'drop'") from None
    _check_finite(state, number)
    middle = time.perf_counter()
    replied = sorted(ledger.up.keys() - {f.client for f in failures})
    kept = [] if lost else _kept(experiment, store, replied)
    judged = evaluation.begin(experiment, state, r, kept, lambda: _kept(experiment, store, store.clients()))
    output = _server(experiment, state, store, replied)
    end = time.perf_counter()
    totals = ledger.totals()
    entry: Record = {
        "round": number,
        "cohort": [c.id for c in cohort],
        "replied": replied,
        "lost": lost,
        "failures": [f.as_dict() for f in failures],
        **totals,
        "params_total": before.totals["params_up"] + before.totals["params_down"] + totals["params_up"] + totals["params_down"],
        "notes": r.notes,
        "seconds": {
            "round": end - start,
            "clients": ledger.seconds,
            "server": middle - start - ledger.seconds,
            "evaluate": end - middle,
        },
    }
    after = replace(before, state=state, round=number, totals={key: before.totals[key] + totals[key] for key in TOTALS})
    return Played(entry, ledger, after, output, judged)


def select(experiment: Experiment, number: int) -> tuple[Sequence[ClientInfo], Mapping[int, int]]:
    """The clients of a round: a function of seed and round alone, so every method meets the same ones."""
    run_config = experiment.config.run
    fixed = isinstance(experiment.clients, tuple)  # on a network they come and go
    sizes = experiment.data.sizes if fixed else np.array([c.num_examples for c in experiment.clients])
    rng = np.random.default_rng(seed_of(experiment.seed, "cohort", number))
    chances = (sizes > 0).astype(np.float64) if run_config.selection == "uniform" else sizes.astype(np.float64)
    again = run_config.selection == "with_replacement"
    many = run_config.cohort if again else min(run_config.cohort, int((chances > 0).sum()))
    drawn = rng.choice(len(sizes), many, replace=again, p=chances / chances.sum())
    ids, counts = np.unique(drawn, return_counts=True)
    draws = dict(zip(ids.tolist(), counts.tolist(), strict=True)) if again else {}
    return [experiment.clients[k] for k in ids], draws


def ended(experiment: Experiment, s: Snapshot) -> str | None:
    """Why the run is over, if it is."""
    how = experiment.config.run
    if s.round >= how.rounds:
        return "rounds"
    if how.budget_params and s.totals["params_up"] + s.totals["params_down"] >= how.budget_params:
        return "budget_params"
    if how.budget_seconds and s.seconds >= how.budget_seconds:
        return "budget_seconds"
    if how.target_accuracy and s.best_accuracy >= how.target_accuracy:
        return "target_accuracy"
    if how.patience and s.stale >= how.patience:
        return "patience"
    return None


def _exchange(experiment: Experiment, raw: Exchange, number: int, failures: list[Failure], ledger: Ledger) -> Exchange:
    how = experiment.config.run
    dropping = exchange.drop_out(raw, how.dropout, seed_of(experiment.seed, "dropout", number), failures)
    at_least = experiment.config.flower.min_replies
    method, env = experiment.method, experiment.env
    validate_reply = getattr(method, "complaint", lambda reply, env: None)
    counted, expected = ledger.counted(dropping), _expectation(experiment)
    return exchange.checked(counted, failures, expected, how.diverged, at_least, lambda reply: validate_reply(reply, env))


def _expectation(experiment: Experiment) -> exchange.Expected:
    example = getattr(experiment.method, "expected_reply", None)
    if example is None:
        return lambda client, down: down
    return lambda client, down: example(down, experiment.clients[client], experiment.env)


def _scored(after: Snapshot, scores: Record) -> Snapshot:
    """Best is by validation accuracy where there is a validation split, else by test accuracy as in the paper."""
    if "accuracy" not in scores:
        return after
    judged = float(scores["val_accuracy"] if "val_accuracy" in scores else scores["accuracy"])
    if judged > after.best_val:
        best = {"best_val": judged, "best_accuracy": scores["accuracy"], "best_round": after.round, "stale": 0}
        return replace(after, accuracy=scores["accuracy"], **best)
    return replace(after, accuracy=scores["accuracy"], stale=after.stale + 1)


def _check_finite(state: Any, number: int) -> None:
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and not bool(torch.isfinite(state.sum())) and not bool(torch.isfinite(state).all()):
            raise Diverged(f"round {number}: the server's model left the finite numbers; lower its learning rate")
    elif isinstance(state, Mapping):
        for value in state.values():
            _check_finite(value, number)
    elif is_dataclass(state):
        for name in state.__dataclass_fields__:
            _check_finite(getattr(state, name), number)


def _server(experiment: Experiment, state: Any, store: ClientStore, replied: Sequence[int]) -> Named:
    """The method's output; where it takes a client's part to make one, with the first participant's."""
    return next(iter(evaluation.candidates(experiment, state, _kept(experiment, store, replied[:1])).values()))[0]


def _kept(experiment: Experiment, store: ClientStore, clients: Sequence[int]) -> ClientStates:
    if not hasattr(experiment.method, "client_models"):
        return []
    kept = [(experiment.clients[k], store.get(k)) for k in clients]
    return [(client, own) for client, own in kept if REMOTE_STATE not in own]


def _restore(experiment: Experiment, folder: RunFolder) -> Snapshot:
    fresh = experiment.method.init(experiment.env)
    stored = folder.restore()
    if stored is None:
        return Snapshot(fresh)
    try:
        kind: Any = type(fresh)
        state = kind(**stored.pop("state")) if is_dataclass(fresh) else stored.pop("state")
        return Snapshot(state=state, **stored)
    except TypeError as error:
        raise FedetError(f"{folder.checkpoint} does not fit this run's method ({error}): it is from another run") from None


def _save(experiment: Experiment, folder: RunFolder, s: Snapshot, best: Named | None, last: Named | None) -> None:
    """Models first: the checkpoint is what says that the round is done."""
    stopped = ended(experiment, s)
    if best is not None:
        folder.save_model("best", experiment, best, s.best_round, s.best_accuracy)
    if stopped and last is not None:
        folder.save_model("last", experiment, last, s.round, s.accuracy)
    folder.save({name: getattr(s, name) for name in Snapshot.__dataclass_fields__})
    folder.write_result(experiment, s, stopped)
