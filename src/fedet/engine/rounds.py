"""Run one round: select clients, call the method, start the evaluation; and the rules that end a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fedet.core import ClientInfo, Round, Transport, seed_of
from fedet.engine import defences, divergence, evaluation, gate
from fedet.engine.evaluation import Due, NamedModel, RoundModels
from fedet.engine.exchange import BudgetReached, NoReplies, RoundExchange, is_finite
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.storage.client_store import ClientStore
from fedet.storage.metrics import Ledger, Record
from fedet.trust import attacks

KNOWN_BEFORE_EVALUATION = ("state", "round", "totals", "set_aside", "replies", "directions", "bodies")
"""The fields of a snapshot that a round has changed before its evaluation has ended."""
TOTALS = ("params_up", "params_down", "bytes_up", "bytes_down", "model_params_up", "model_params_down")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two rounds."""

    state: Any
    round: int = 0
    best_accuracy: float = -1.0
    best_round: int = 0
    accuracy: float = -1.0
    stale: int = 0
    best_val: float = -1.0
    seconds: float = 0.0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    budget_reached: bool = False
    """Whether the next round would exceed `run.budget_params`."""
    stopped: bool = False
    """Whether a callback ended the run; a resumed run goes on."""
    set_aside: dict[int, int] = field(default_factory=dict)
    """In how many rounds each client's reply was refused."""
    replies: dict[int, list[str]] = field(default_factory=dict)
    """The digests of each client's last replies, if `run.robust` looks for replays."""
    directions: dict[int, list[float]] = field(default_factory=dict)
    """The sum and the number of the cosines between each client's updates and the others', if `run.robust` compares them."""
    bodies: dict[int, list[float]] = field(default_factory=dict)
    """The same for the layers below the representation layer, among clients of the same architecture."""

    @property
    def sent(self) -> int:
        """Parameters sent so far, up and down."""
        return self.totals["params_up"] + self.totals["params_down"]


@dataclass
class PendingRound:
    """A round whose evaluation may still be in progress."""

    entry: Record
    ledger: Ledger
    after: Snapshot
    models: RoundModels
    output: NamedModel | None
    evaluated: Due
    scores: Callable[[], Record] | None
    """Waits for the scores; None if the round is not evaluated."""

    def finish(self, before: Snapshot) -> tuple[Record, Ledger, Snapshot]:
        """Wait for the evaluation; returns the round's record, its ledger, and the snapshot after it."""
        start = time.perf_counter()
        scores = self.scores() if self.scores else {}
        waited = time.perf_counter() - start
        seconds = self.entry["seconds"]
        seconds |= {"round": seconds["round"] + waited, "evaluate": seconds["evaluate"] + waited}
        after = replace(before, **{name: getattr(self.after, name) for name in KNOWN_BEFORE_EVALUATION})
        return self.entry | scores, self.ledger, scored(after, scores)


def run_round(
    experiment: Experiment, store: ClientStore, before: Snapshot, transport: Transport
) -> tuple[Record, Ledger, Snapshot]:
    """Run and evaluate one round; returns its record, its ledger, and the snapshot after it."""
    return start_round(experiment, store, before, transport).finish(before)


def start_round(
    experiment: Experiment,
    store: ClientStore,
    before: Snapshot,
    transport: Transport,
    after_exchange: Callable[[], None] = lambda: None,
) -> PendingRound:
    """Run one round and start its evaluation; `after_exchange` is called after each exchange."""
    number, clock = before.round + 1, _Clock()
    clients = transport.start_round(number)  # first: on a network this determines which clients are available
    settings = experiment.config.run
    believed, banned = gate.credible(clients, settings.robust), gate.banned(before.set_aside, settings.ban_after)
    cohort, draws = select(experiment, believed, number, banned)
    left = settings.budget_params - before.sent if settings.budget_params and before.round else None  # round 1 always runs
    after_each = clock.excluding(after_exchange)
    known = before.replies, before.directions, before.bodies
    exchange = RoundExchange(experiment, clients, store, number, transport.send, left, after_each, *known)
    seed = seed_of(experiment.seed, "round", number)
    r = Round(number, cohort, exchange, seed, draws, **defences.combining(settings.robust))
    state, why_lost = _run_method(experiment, store, before.state, r, exchange)
    middle = clock.read()
    replied = sorted(exchange.ledger.up.keys() - {f.client for f in exchange.failures})
    states = evaluation.client_states(experiment, store, [] if why_lost else replied)
    models = RoundModels(experiment, state, number, list(r.teachers.values()), states, store)
    due = evaluation.due(experiment, number, last=number == experiment.config.run.rounds)
    scores = evaluation.start(models, due)
    end = clock.read()
    totals = exchange.ledger.totals()
    entry: Record = {
        "round": number,
        "cohort": [c.id for c in cohort],
        "replied": replied,
        "lost": why_lost is not None,
        **({"why_lost": why_lost} if why_lost else {}),
        "failures": [f.as_dict() for f in exchange.failures],
        **totals,
        "params_total": before.sent + totals["params_up"] + totals["params_down"],
        "notes": r.notes,
        **_about_trust(experiment, exchange, cohort, banned),
        "seconds": {
            "round": end,
            "clients": exchange.seconds,
            "server": middle - exchange.seconds,
            "evaluate": end - middle,
        },
    }
    after = replace(
        before,
        state=state,
        round=number,
        totals={key: before.totals[key] + totals[key] for key in TOTALS},
        set_aside=gate.counted(before.set_aside, exchange.failures) if settings.ban_after else before.set_aside,
        replies=gate.remembered(before.replies, exchange.digests),
        directions=gate.directed(before.directions, exchange.cosines),
        bodies=gate.directed(before.bodies, exchange.bodies),
    )
    return PendingRound(entry, exchange.ledger, after, models, models.output(), due, scores)


def _about_trust(
    experiment: Experiment, exchange: RoundExchange, cohort: Sequence[ClientInfo], banned: frozenset[int]
) -> Record:
    """What a round's record says of defences and simulated attacks, if there are any."""
    settings = experiment.config.run
    hostile = attacks.attackers(experiment)
    return {
        **({"clipped": sorted(exchange.clipped)} if settings.robust else {}),
        **({"banned": sorted(banned)} if settings.ban_after else {}),
        **({"attackers": [c.id for c in cohort if c.id in hostile]} if settings.attack else {}),
    }


def _run_method(
    experiment: Experiment, store: ClientStore, before: Any, r: Round, exchange: RoundExchange
) -> tuple[Any, str | None]:
    """Run the method's `round`; returns the new state, or the old one if the round is lost, and why it is lost."""
    try:
        settings = experiment.config
        chosen, needed = sum(r.draws.values()) or len(r.cohort), min(settings.flower.min_replies, settings.run.cohort)
        if chosen < needed:  # because the others are away or banned
            raise NoReplies("no client is available" if not chosen else f"{chosen} of {needed} clients needed can be chosen")
        state = experiment.method.round(before, r, experiment.env)
        if state is None and before is not None:
            raise FedetError(f"'{type(experiment.method).__name__}.round' returned nothing (None): return the new state")
        if state_is_finite(state):
            return state, None
        if not experiment.config.run.drops_diverged:
            raise divergence.at_server(experiment.method, r.number, exchange.largest_weights(), exchange.suspects())
        exchange.failures += exchange.suspects()
        why = "the server's state left the finite numbers"
    except NoReplies as error:
        why = str(error)
    except BudgetReached:
        store.rollback()
        raise
    store.rollback()
    for k in exchange.lost_states:  # it would otherwise fail again each time it is chosen
        store.stage(k, {})
    r.notes.clear()
    r.teachers.clear()
    return before, why


class _Clock:
    """Seconds since its creation, excluding time spent on another round."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._start

    def excluding(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same function, with its time not counted."""

        def uncounted() -> None:
            start = time.perf_counter()
            work()
            self._start += time.perf_counter() - start

        return uncounted


def select(
    experiment: Experiment, clients: Sequence[ClientInfo], number: int, banned: Collection[int] = ()
) -> tuple[Sequence[ClientInfo], Mapping[int, int]]:
    """Select the clients of a round; depends only on seed, round, available and banned clients, not on the method."""
    settings = experiment.config.run
    all_available = clients is experiment.clients
    sizes = experiment.data.sizes if all_available else np.array([c.num_examples for c in clients])
    rng = np.random.default_rng(seed_of(experiment.seed, "cohort", number))
    chances = (sizes > 0).astype(np.float64) if settings.selection == "uniform" else sizes.astype(np.float64)
    chances[list(banned)] = 0
    replacement = settings.selection == "with_replacement"
    if not chances.any():
        return [], {}
    size = settings.cohort if replacement else min(settings.cohort, int((chances > 0).sum()))
    drawn = rng.choice(len(sizes), size, replace=replacement, p=chances / chances.sum())
    ids, counts = np.unique(drawn, return_counts=True)
    draws = dict(zip(ids.tolist(), counts.tolist(), strict=True)) if replacement else {}
    return [clients[k] for k in ids], draws


def ended(experiment: Experiment, s: Snapshot) -> str | None:
    """Why the run has ended, or None."""
    settings = experiment.config.run
    if s.round >= settings.rounds:
        return "rounds"
    if s.budget_reached or (settings.budget_params and s.sent >= settings.budget_params):
        return "budget_params"
    if settings.budget_seconds and s.seconds >= settings.budget_seconds:
        return "budget_seconds"
    if settings.target_accuracy and s.best_accuracy >= settings.target_accuracy:
        return "target_accuracy"
    if settings.patience and s.stale >= settings.patience:
        return "patience"
    return "callback" if s.stopped else None


def scored(after: Snapshot, scores: Record) -> Snapshot:
    """Update the best round, by validation accuracy if there is a validation split, else by test accuracy as in the paper."""
    if "accuracy" not in scores:
        return after
    judged = float(scores["val_accuracy"] if "val_accuracy" in scores else scores["accuracy"])
    if judged > after.best_val:
        best = {"best_val": judged, "best_accuracy": scores["accuracy"], "best_round": after.round, "stale": 0}
        return replace(after, accuracy=scores["accuracy"], **best)
    return replace(after, accuracy=scores["accuracy"], stale=after.stale + 1)


def state_is_finite(state: Any) -> bool:
    """Whether all values in a method's state are finite."""
    if isinstance(state, torch.Tensor):
        return is_finite(state)
    if isinstance(state, Mapping):
        return all(state_is_finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(state_is_finite(value) for value in state)
    return not is_dataclass(state) or all(state_is_finite(getattr(state, name)) for name in state.__dataclass_fields__)
