"""The run itself: choose clients, play a round, evaluate, record, checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fedet import maths, train, transport
from fedet.core import ClientInfo, Exchange, Kept, Round, Weights, seed_of
from fedet.errors import Diverged, FedetError, Interrupted
from fedet.experiment import Experiment
from fedet.record import Ledger, Record
from fedet.runfolder import RunFolder, uninterrupted
from fedet.state import ELSEWHERE, ClientStore
from fedet.transport import Failure, NoReplies

Named = tuple[str, Weights]
"""A model: its architecture and weights."""
Watch = Callable[[Record], None]
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
    experiment: Experiment, folder: RunFolder, watch: Watch | None = None, connect: Connect = transport.in_process
) -> Snapshot:
    """Run from the folder's checkpoint, or from the start, to the end of the configuration."""
    snapshot = _restore(experiment, folder)
    best: Named | None = None
    last: Named | None = None
    began = time.perf_counter() - snapshot.seconds
    saved = snapshot.round
    try:
        while ended(experiment, snapshot) is None:
            entry, ledger, after = play(experiment, folder.store, snapshot, connect)
            with uninterrupted():
                snapshot = replace(after, seconds=time.perf_counter() - began)
                folder.log(entry, ledger)
                folder.store.commit(snapshot.round)
                last = _server(experiment, snapshot.state, folder.store, entry["replied"])
                best = last if snapshot.best_round == snapshot.round else best
                if snapshot.round % experiment.config.run.checkpoint_every == 0 or ended(experiment, snapshot):
                    _save(experiment, folder, snapshot, best, last)
                    saved, best = snapshot.round, None
            if watch:
                watch(entry)
    except (KeyboardInterrupt, Diverged) as stop:
        folder.store.rollback()
        with contextlib.suppress(KeyboardInterrupt), uninterrupted():
            if saved < snapshot.round or snapshot.round == 0:
                _save(experiment, folder, snapshot, best, last)
            folder.forget_after(snapshot.round)
        if isinstance(stop, Diverged):
            raise
        raise Interrupted(f"stopped after round {snapshot.round}; go on with: fedet resume {folder.path}") from None
    return snapshot


def play(experiment: Experiment, store: Any, before: Snapshot, connect: Connect) -> tuple[Record, Ledger, Snapshot]:
    """One round: its record, its ledger, and the snapshot after it."""
    number = before.round + 1
    start = time.perf_counter()
    raw = connect(experiment, store, number)  # first: on a network it finds out who is there to be chosen
    cohort, draws = select(experiment, number)
    failures: list[Failure] = []
    ledger = Ledger()
    exchange = _exchange(experiment, raw, number, failures, ledger)
    r = Round(number, cohort, exchange, seed_of(experiment.seed, "round", number), draws)
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
    scores = evaluate(experiment, state, r, [] if lost else _kept(experiment, store, replied))
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
        **scores,
        "notes": r.notes,
        "seconds": {
            "round": end - start,
            "clients": ledger.seconds,
            "server": middle - start - ledger.seconds,
            "evaluate": end - middle,
        },
    }
    return entry, ledger, _after(before, number, state, scores, totals)


def select(experiment: Experiment, number: int) -> tuple[Sequence[ClientInfo], Mapping[int, int]]:
    """The clients of a round: a function of seed and round alone, so every method meets the same ones."""
    run_config = experiment.config.run
    sizes = np.array([c.num_examples for c in experiment.clients])
    rng = np.random.default_rng(seed_of(experiment.seed, "cohort", number))
    chances = (sizes > 0).astype(np.float64) if run_config.selection == "uniform" else sizes.astype(np.float64)
    again = run_config.selection == "with_replacement"
    many = run_config.cohort if again else min(run_config.cohort, int((chances > 0).sum()))
    drawn = rng.choice(len(sizes), many, replace=again, p=chances / chances.sum())
    ids, counts = np.unique(drawn, return_counts=True)
    draws = dict(zip(ids.tolist(), counts.tolist(), strict=True)) if again else {}
    return [experiment.clients[k] for k in ids], draws


def evaluate(experiment: Experiment, state: Any, r: Round, kept: Kept) -> Record:
    """Test the method's models: the first every `eval_every` rounds, all and the ensemble every `eval_all_every`."""
    how = experiment.config.run
    if r.number % how.eval_every and r.number != how.rounds:
        return {}
    env, test, val = experiment.env, experiment.data.test, experiment.data.val
    named = candidates(experiment, state, kept)
    every = r.number % how.eval_all_every == 0
    found: dict[str, train.Score] = {}
    scores: Record = {}
    for done, (name, models) in enumerate(named.items()):
        if every or not found:
            env.progress("evaluate", done, len(named))
            if not found and val is not None:
                scores["val_accuracy"] = _mean_score(experiment, models, val).accuracy
            found[name] = _mean_score(experiment, models, test)
    first = next(iter(found.values()))
    by_name = {name: s.accuracy for name, s in found.items()}
    if every and r.teachers:
        by_name["ensemble" if hasattr(experiment.method, "combine") else "consensus"] = ensemble_accuracy(experiment, r)
    return {"accuracy": first.accuracy, "loss": first.loss, **scores, "models": by_name}


def candidates(experiment: Experiment, state: Any, kept: Kept) -> dict[str, Sequence[Named]]:
    """Every model worth evaluating; where participants hold models of their own, those of one name are averaged over."""
    method, env = experiment.method, experiment.env
    of_clients = method.client_models(state, env, kept) if kept else {}
    of_server: dict[str, Sequence[Named]] = {name: [model] for name, model in method.models(state, env).items()}
    return of_server | dict(of_clients)


def _mean_score(experiment: Experiment, models: Sequence[Named], data: Any) -> train.Score:
    scores = [train.evaluate(experiment.env.build(arch, weights), data) for arch, weights in models]
    return train.Score(*(float(np.mean([getattr(s, name) for s in scores])) for name in ("accuracy", "loss")))


def ensemble_accuracy(experiment: Experiment, r: Round) -> float:
    """How often the round's ensemble is right on the test data: its weighted consensus, or as the method combines."""
    test = experiment.data.test
    logits = train.ensemble_logits(experiment.env, r.teachers.values(), test)
    combine = getattr(experiment.method, "combine", lambda z: maths.consensus(torch.softmax(z, dim=-1)).probs)
    return train.score(combine(logits), test.labels).accuracy


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
    dropping = transport.drop_out(raw, how.dropout, seed_of(experiment.seed, "dropout", number), failures)
    at_least = experiment.config.flower.min_replies
    return transport.checked(ledger.counted(dropping), failures, _expectation(experiment), how.diverged, at_least)


def _expectation(experiment: Experiment) -> transport.Expected:
    example = getattr(experiment.method, "expected_reply", None)
    if example is None:
        return lambda client, down: down
    return lambda client, down: example(down, experiment.clients[client], experiment.env)


def _after(before: Snapshot, number: int, state: Any, scores: Record, totals: Mapping[str, int]) -> Snapshot:
    """Best is by validation accuracy where there is a validation split, else by test accuracy as in the paper."""
    after = replace(before, state=state, round=number, totals={key: before.totals[key] + totals[key] for key in TOTALS})
    if "accuracy" not in scores:
        return after
    after = replace(after, accuracy=scores["accuracy"])
    judged = float(scores["val_accuracy"] if "val_accuracy" in scores else scores["accuracy"])
    if judged > before.best_val:
        return replace(after, best_val=judged, best_accuracy=scores["accuracy"], best_round=number, stale=0)
    return replace(after, stale=before.stale + 1)


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
    return next(iter(candidates(experiment, state, _kept(experiment, store, replied[:1])).values()))[0]


def _kept(experiment: Experiment, store: ClientStore, clients: Sequence[int]) -> Kept:
    if not hasattr(experiment.method, "client_models"):
        return []
    kept = [(experiment.clients[k], store.get(k)) for k in clients]
    return [(client, own) for client, own in kept if ELSEWHERE not in own]


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
