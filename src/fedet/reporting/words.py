"""Runs in words: what a run did, with what, and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from fedet.config import objects
from fedet.config.schema import ModelSpec
from fedet.models.text import notice
from fedet.reporting import references, results
from fedet.reporting.results import si
from fedet.reporting.run_data import RunData

STOPPED = {
    "rounds": "all rounds finished",
    "budget_params": "stopped: parameter budget reached",
    "budget_seconds": "stopped: time budget reached",
    "target_accuracy": "stopped: target accuracy reached",
    "patience": "stopped: no further progress",
    "callback": "stopped: a callback asked for it",
}

METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "moon": "MOON",
    "feddf": "FedDF",
    "dsfl": "DS-FL",
    "fedgkt": "FedGKT",
    "fedgems": "FedGEMS",
    "fedet": "Fed-ET",
    "fedet-plus": "Fed-ET+",
}
"""How methods are written in headings and sentences."""

MOST_CLIENTS = 100
"""Clients that are listed by number."""


def title(run: RunData) -> str:
    """The heading of a run."""
    return f"{method_name(run.method)} on {data_name(run)}, seed {run.seed}"


def comparison_title(runs: Sequence[RunData]) -> str:
    """The heading of a comparison."""
    return f"Comparison on {', '.join(sorted({data_name(run) for run in runs}))}"


def method_name(reference: str) -> str:
    """A method as it is written; one of the user's own without its file or module."""
    return METHODS.get(reference) or results.short_name(reference)


def proper(label: str) -> str:
    """The label of a row of a comparison, with the method as it is written."""
    name, bracket, settings = label.partition(" (")
    return METHODS.get(name, name) + bracket + settings


def sentence(run: RunData) -> str:
    """What the run did, and with what."""
    sizes, cohort = run.result.get("arch_params") or {}, run.config.get("run", {}).get("cohort")
    large, data = server_arch(run) or "a large model", data_text(run)
    clients = num_clients(run) or "its"
    if run.reference:
        what = references.MEANING.get(run.method, "")
        return (
            f"This is a reference, not a federated method. It shows what was possible{f': {what}' if what else ''}. The data "
            f"({data}) and the {clients} clients are those of a federated run with the same seed."
        )
    small = ", ".join(client_archs(run))
    own = f"and train models of their own ({small})" if small else "and train models of their own"
    if _large_on_clients(run):
        own = "and train that same model"
    elif not sizes and len(results.model_points(run)) < 2:
        own = "and train on it"  # too early to tell which model
    size = f" ({si(sizes[large])} parameters)" if large in sizes else ""
    trained, took = ("trained", "took") if run.finished else ("trains", "take")
    took_part = f"; {cohort} of them {took} part in each round" if cohort else ""
    return (
        f"The method {method_name(run.method)} {trained} {large}{size} on the server with the help of {clients} clients. "
        f"The clients have the data ({data}), keep it to themselves {own}{took_part}."
    )


def data_text(run: RunData) -> str:
    """The data set and how it is split."""
    data = run.config.get("data", {})
    kind = str(data.get("partition") or "given").replace("dirichlet", "Dirichlet") + " split"
    alpha = f", α = {data['alpha']:g}" if data.get("partition") == "dirichlet" and "alpha" in data else ""
    return f"{data_name(run)}, {kind}{alpha}"


def num_clients(run: RunData) -> int | None:
    """The number of clients, if it is known."""
    given = run.config.get("data", {}).get("clients")
    return (given if isinstance(given, int) else None) or len(run.split.get("sizes", [])) or None


def clients_text(run: RunData) -> str:
    """How many clients there are, and how many take part in a round."""
    number, cohort = num_clients(run), run.config.get("run", {}).get("cohort")
    return (f"{number}" if number else "") + (f", {cohort} in each round" if number and cohort else "")


def client_archs(run: RunData) -> list[str]:
    """The architectures of the clients, by name."""
    return sorted(set(archs(run.split) or map(_spec, run.config.get("models", {}).get("clients", []))))


def server_arch(run: RunData) -> str:
    """The server model's architecture; empty if it is not known."""
    given = run.config.get("models", {}).get("server")
    return str(run.result.get("server") or (_spec(given) if given else ""))


def notices(runs: Sequence[RunData]) -> list[str]:
    """What users of these runs should know, each text once."""
    found = (text for run in runs for text in (notice(run.config.get("models") or {}), *run.result.get("warnings", [])))
    return list(dict.fromkeys(text for text in found if text))


def about_trust(run: RunData) -> list[str]:
    """Sentences on simulated attackers, on a back door and on banned clients; none if there are none of these."""
    result, last = run.result, run.metrics[-1] if run.metrics else {}
    attack = run.config.get("run", {}).get("attack")
    out = []
    if attack and (hostile := result.get("attackers")) is not None:
        out.append(f"{len(hostile)} of {num_clients(run) or 'the'} clients attacked ({attack['kind']}): {_listed(hostile)}.")
    if attack and (caught := result.get("caught")) and caught["set_aside"]:
        right, found = percent(caught.get("precision"), 0), percent(caught.get("recall"), 0)
        out.append(
            f"{caught['set_aside']} replies were set aside, of which {right} were attackers’: {found} of what these sent."
        )
    if result.get("backdoor") is not None:
        out.append(f"The back door works on {percent(result['backdoor'])} of the test images of other classes than its target.")
    if last.get("banned"):
        out.append(f"Banned from later rounds, because their replies were refused too often: {_listed(last['banned'])}.")
    return out


def _listed(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:MOST_CLIENTS])) + (" and so on" if len(clients) > MOST_CLIENTS else "")


def _large_on_clients(run: RunData) -> bool:
    large = (run.result.get("arch_params") or {}).get(run.result.get("server"))
    if not large:
        return False
    return any(m.get("cohort") and m.get("model_params_down") == large * len(m["cohort"]) for m in run.metrics)


def archs(split: dict[str, NDArray[Any]]) -> list[str] | None:
    """Each client's architecture, if it is known."""
    return [str(arch) for arch in split["archs"]] if "archs" in split else None


def data_name(run: RunData) -> str:
    """The data set's name; of the user's own without the folder in front of it, or "arrays"."""
    return objects.shown(str(run.config.get("data", {}).get("name") or run.result.get("data") or "unnamed data"))


def _spec(spec: Any) -> str:
    """The name that a run gives to an architecture of its configuration."""
    try:
        return ModelSpec.model_validate(spec if isinstance(spec, dict) else {"name": spec}).id
    except ValidationError:  # written by another version
        return str(spec.get("label") or spec.get("name", "?")) if isinstance(spec, dict) else str(spec)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def bytes_text(value: float) -> str:
    """A number of bytes."""
    return f"{si(value)}B" if value >= 1000 else f"{value:.0f} B"


FILTERS: dict[str, Any] = {"percent": percent, "si": si, "duration": duration, "bytes": bytes_text}
"""What templates call."""
