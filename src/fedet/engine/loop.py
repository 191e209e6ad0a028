"""The loop over the rounds of a run, from the start or from a checkpoint, with logging and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from fedet import privacy
from fedet.core import ClientInfo, ClientTask, Delivery, Transport
from fedet.engine import evaluation
from fedet.engine.evaluation import NamedModel
from fedet.engine.exchange import BudgetReached
from fedet.engine.rounds import PendingRound, Snapshot, ended, scored, start_round
from fedet.errors import Diverged, FedetError, Interrupted, StopRun
from fedet.experiment import Experiment
from fedet.privacy import Participations
from fedet.storage.metrics import Record
from fedet.storage.run_folder import RunFolder, uninterrupted

OnRound = Callable[[Record], None]


def run(experiment: Experiment, folder: RunFolder, transport: Transport, on_round: OnRound | None = None) -> Snapshot:
    """Run from the folder's checkpoint, or from the start, to the end of the configuration.

    With worker processes, a round is evaluated while the clients of the next one train, unless its accuracy decides whether
    there is a next one.
    """
    log = Log(experiment, folder, on_round, _restore(experiment, folder))
    transport = log.noting(transport)
    settings = experiment.config.run
    overlap = experiment.env.predictor is not None and not settings.target_accuracy and not settings.patience
    try:
        while log.ended() is None:
            pending = start_round(experiment, folder.store, log.latest(), transport, lambda: log.finish(more=True))
            log.finish(more=True)
            with uninterrupted():
                folder.store.commit(pending.after.round)
                log.pending = pending
            if not overlap or pending.scores is None:
                log.finish()
        log.finish()
    except BudgetReached:
        log.finish()
        log.close()
    except StopRun:
        folder.store.rollback()
        log.stop()
    except (KeyboardInterrupt, Diverged) as stop:
        folder.store.rollback()
        with contextlib.suppress(KeyboardInterrupt), uninterrupted():
            log.finish(notify=False)
            log.save_unsaved()
        if isinstance(stop, Diverged):
            raise
        raise Interrupted(f"stopped after round {log.snapshot.round}; resume with: fedet resume {folder.path}") from None
    return log.snapshot


class Log:
    """Records finished rounds: metrics, models, checkpoints."""

    def __init__(self, experiment: Experiment, folder: RunFolder, on_round: OnRound | None, snapshot: Snapshot) -> None:
        self.experiment, self.folder, self.on_round, self.snapshot = experiment, folder, on_round, snapshot
        self.pending: PendingRound | None = None
        """A round that is still being evaluated."""
        self._best: NamedModel | None = None
        self._last: tuple[NamedModel | None, float] | None = None
        """The output of the last recorded round, and its accuracy (-1 if it was not evaluated)."""
        self._maybe_last: tuple[PendingRound, Record] | None = None
        """The last recorded round, if the run may end after it because the next one would exceed the budget."""
        self._saved = snapshot.round
        self._start = time.perf_counter() - snapshot.seconds
        self._spending = experiment.spending()
        self._participations = folder.participations(self._spending.settings.secret) if self._spending else None

    def noting(self, transport: Transport) -> Transport:
        """The transport; with privacy, one that notes who is asked to train before it asks."""
        return transport if self._participations is None else _Noting(transport, self.folder, self._participations)

    def latest(self) -> Snapshot:
        """The snapshot from which the next round starts."""
        return self.pending.after if self.pending else self.snapshot

    def ended(self) -> str | None:
        """Why there is no next round, or None. The clock is read only if a round is pending."""
        s = replace(self.pending.after, seconds=self._seconds()) if self.pending else self.snapshot
        return ended(self.experiment, s)

    def finish(self, notify: bool = True, more: bool = False) -> None:
        """Wait for the evaluation of the pending round and record it; `more` means that the next round has started."""
        if self.pending is None:
            return
        pending = self.pending
        entry, ledger, after = pending.finish(self.snapshot)
        after = replace(after, seconds=self._seconds())
        stopped = None if more else ended(self.experiment, after)
        if stopped:
            entry, after = self._evaluate_all(pending, entry, after)
        with uninterrupted():
            self.pending = None
            spent = self._spent(entry)
            self.folder.log(entry, ledger, spent)
            self._record(pending, entry, after)
            if after.round % self.experiment.config.run.checkpoint_every == 0 or stopped:
                self.save(stopped)
        if self.on_round and notify:
            self.on_round(entry)

    def close(self) -> None:
        """End the run with the last recorded round, because the next one would exceed the budget."""
        after = replace(self.snapshot, budget_reached=True)
        with uninterrupted():
            if self._maybe_last is None:  # just resumed: its ensemble is no longer available, so the record stays as it is
                self.snapshot = after
            else:
                pending, entry = self._maybe_last
                entry, after = self._evaluate_all(pending, entry, after)
                self.folder.replace_last(entry)
                self._record(pending, entry, after)
            self.save(ended(self.experiment, after))

    def stop(self) -> None:
        """End the run with the last recorded round, because a callback asked for it."""
        self.finish(notify=False)
        with uninterrupted():
            self.snapshot = replace(self.snapshot, stopped=True)
            self.save(ended(self.experiment, self.snapshot))
            self.folder.forget_after(self.snapshot.round)

    def save(self, stopped: str | None) -> None:
        """Write a checkpoint, after the models, because the checkpoint marks the round as finished."""
        s = self.snapshot
        if self._best is not None:
            self.folder.save_model("best", self.experiment, self._best, s.best_round, s.best_accuracy)
        if stopped and self._last is not None:
            output, accuracy = self._last
            if output is not None:
                self.folder.save_model("last", self.experiment, output, s.round, accuracy)
        self.folder.save({name: getattr(s, name) for name in Snapshot.__dataclass_fields__})
        self.folder.write_result(self.experiment, s, stopped, self._participations)
        self._saved, self._best = s.round, None

    def save_unsaved(self) -> None:
        """Write a checkpoint if there are unsaved rounds, and remove later records."""
        if self._saved < self.snapshot.round or self.snapshot.round == 0:
            self.save(ended(self.experiment, self.snapshot))
        elif self._participations is not None:  # what an unfinished round has cost
            self.folder.write_result(self.experiment, self.snapshot, None, self._participations)
        self.folder.forget_after(self.snapshot.round)

    def _spent(self, entry: Record) -> dict[int, dict[str, float | None]]:
        """What every client has spent of its privacy; the round's entry gets a summary."""
        if self._spending is None or self._participations is None:
            return {}
        self._participations.finish(entry["round"], entry["cohort"])
        spent = self._spending.clients(self._participations.total)
        entry["privacy"] = privacy.spread(spent)
        return spent

    def _seconds(self) -> float:
        """The duration of the run, including before it was resumed."""
        return time.perf_counter() - self._start

    def _record(self, pending: PendingRound, entry: Record, after: Snapshot) -> None:
        self._last = pending.output, entry.get("accuracy", -1.0)
        self._maybe_last = (pending, entry) if self.experiment.config.run.budget_params else None
        self.snapshot = after
        if after.best_round == after.round:
            self._best = pending.output

    def _evaluate_all(self, pending: PendingRound, entry: Record, after: Snapshot) -> tuple[Record, Snapshot]:
        """The last round with every model evaluated, so that all final values are from the same round."""
        everything = evaluation.due(self.experiment, after.round, last=True)
        if pending.evaluated == everything:
            return entry, after
        finish = evaluation.start(pending.models, everything)
        scores = finish() if finish else {}
        return entry | scores, after if "accuracy" in entry else scored(after, scores)


class _Noting:
    """A transport that notes, once in each round that is played, which clients it asks."""

    def __init__(self, transport: Transport, folder: RunFolder, participations: Participations) -> None:
        self._transport, self._folder, self._participations = transport, folder, participations
        self._noted: set[int] = set()

    def start_round(self, number: int) -> Sequence[ClientInfo]:
        """As the transport's."""
        self._noted.clear()
        return self._transport.start_round(number)

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """As the transport's, after noting who is asked."""
        new = sorted(tasks.keys() - self._noted)
        if new:
            self._folder.note_asked(number, new)
            self._participations.ask(number, new)
            self._noted.update(new)
        return self._transport.send(number, tasks)


def _restore(experiment: Experiment, folder: RunFolder) -> Snapshot:
    stored = folder.restore()
    if stored is None:
        return Snapshot(experiment.method.init(experiment.env))
    return snapshot(experiment, stored, folder.checkpoint)


def snapshot(experiment: Experiment, stored: dict[str, Any], path: Path) -> Snapshot:
    """The snapshot that a checkpoint's fields describe; `path` is for the error if they don't fit the method."""
    try:
        fresh = experiment.method.init(experiment.env)
        kind: Any = type(fresh)
        state = kind(**stored["state"]) if is_dataclass(fresh) else stored["state"]
        return Snapshot(**stored | {"state": state, "stopped": False})
    except TypeError as error:
        raise FedetError(f"{path} does not match this run's method ({error}): it is from a different run") from None
