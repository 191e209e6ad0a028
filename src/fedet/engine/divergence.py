"""Words for a run that diverged: what happened, and which learning rate to lower."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedet.core import Failure
from fedet.errors import Diverged
from fedet.train import Training

GROWTH = 10.0
"""Clients whose weights grew by this factor within a round were trained at too high a rate, whatever failed afterwards."""


def at_client(method: Any, number: int, what: str) -> Diverged:
    """The error of a run in which a client sent non-finite values."""
    advice = _lower(method, "client") or "lower the clients' learning rate"
    return Diverged(f"round {number}: {what}: {advice}, or set run.diverged = 'drop' to leave such clients out of the round")


def at_server(method: Any, number: int, largest_weights: tuple[float, float], suspects: Sequence[Failure]) -> Diverged:
    """The error of a run whose server state became non-finite.

    It names the clients' learning rate if the largest weight had grown too much between the requests and the replies.
    """
    before, after = largest_weights
    named = "; ".join(f"client {f.client} {f.why}" for f in suspects)
    if after > GROWTH * max(before, 1.0):
        why = f"the clients' weights grew from {before:.3g} to {after:.3g}; {named}"
        advice = _lower(method, "client") or "lower the clients' learning rate"
    else:
        why = f"the clients sent no weights above {after:.3g}" if after else named or "no client stands out"
        advice = _lower(method, *(name for name in _rates(method) if name != "client")) or "lower the learning rates"
    return Diverged(
        f"round {number}: the server's state is no longer finite ({why}): {advice}, or set run.diverged = 'drop' to discard "
        "such rounds"
    )


def _lower(method: Any, *names: str) -> str:
    """Advice on these of the method's learning rates; empty if it has none of them."""
    rates = {name: rate for name, rate in _rates(method).items() if name in names}
    return " or ".join(f"lower method.{name}.lr (now {rate:g})" for name, rate in rates.items())


def _rates(method: Any) -> dict[str, float]:
    """The learning rates of a method by the name of their table."""
    if not dataclasses.is_dataclass(method):
        return {}
    values = {field.name: vars(method).get(field.name) for field in dataclasses.fields(method)}
    return {name: value.lr for name, value in values.items() if isinstance(value, Training)}
