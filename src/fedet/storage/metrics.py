"""What a run leaves behind: metrics, the communication ledger, and the cost of reaching an accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedet.core import Payload
from fedet.errors import FedetError
from fedet.storage.checkpoint import cannot_write, write_text

Record = dict[str, Any]
MODEL = "model"
"""The group of a payload that is counted as model parameters; everything else, SCAFFOLD's controls too, is other."""


def count(payload: Payload) -> dict[str, int]:
    """Scalars and bytes of one message: model parameters apart from the rest."""
    sizes = {
        group: (sum(t.numel() for t in tensors.values()), sum(t.nbytes for t in tensors.values()))
        for group, tensors in payload.tensors.items()
    }
    return {
        "model": sum(n for group, (n, _) in sizes.items() if group == MODEL),
        "other": sum(n for group, (n, _) in sizes.items() if group != MODEL) + len(payload.scalars),
        "bytes": sum(b for _, b in sizes.values()) + 8 * len(payload.scalars),
    }


def num_scalars(payload: Payload) -> int:
    """How many numbers a message holds."""
    return sum(t.numel() for tensors in payload.tensors.values() for t in tensors.values()) + len(payload.scalars)


@dataclass
class Ledger:
    """Counts what crosses the network in one round, from the payloads themselves."""

    down: dict[int, dict[str, int]] = field(default_factory=dict)
    up: dict[int, dict[str, int]] = field(default_factory=dict)

    def count(self, requests: Mapping[int, Payload], replies: Mapping[int, Payload]) -> None:
        """Add the requests and replies of one exchange."""
        for counts, payloads in ((self.down, requests), (self.up, replies)):
            for client, payload in payloads.items():
                _add(counts.setdefault(client, dict.fromkeys(("model", "other", "bytes"), 0)), count(payload))

    @property
    def total(self) -> int:
        """Scalars sent so far, both ways."""
        return sum(c["model"] + c["other"] for counts in (self.down, self.up) for c in counts.values())

    def totals(self) -> dict[str, int]:
        """The round's sums, as they stand in the metrics."""
        out: dict[str, int] = {}
        for way, counts in (("up", self.up.values()), ("down", self.down.values())):
            out[f"params_{way}"] = sum(c["model"] + c["other"] for c in counts)
            out[f"bytes_{way}"] = sum(c["bytes"] for c in counts)
            out[f"model_params_{way}"] = sum(c["model"] for c in counts)
        return out

    def lines(self) -> list[Record]:
        """One entry per client."""
        none = dict.fromkeys(("model", "other", "bytes"), 0)
        return [{"id": k, "down": self.down.get(k, none), "up": self.up.get(k, none)} for k in sorted({*self.down, *self.up})]


def _add(into: dict[str, int], more: Mapping[str, int]) -> None:
    for key, value in more.items():
        into[key] += value


def c_acc(records: Iterable[Mapping[str, Any]], accuracy: float) -> int | None:
    """Parameters sent, both ways, up to and including the first round that was evaluated at this accuracy; None if none was."""
    return next((r["params_total"] for r in records if r.get("accuracy", -1) >= accuracy), None)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a JSON-lines file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def read(path: Path) -> list[Record]:
    """All whole lines of a JSON-lines file; a torn last one is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise FedetError(f"{path}, line {number} is no JSON: the file was changed or damaged") from None
    return records


def replace_last(path: Path, record: Record) -> None:
    """Write the last line of a JSON-lines file anew."""
    records = [*read(path)[:-1], record]
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in records))


def truncate(path: Path, last_round: int) -> None:
    """Drop every line after this round: a checkpoint knows nothing of them."""
    kept = [record for record in read(path) if record["round"] <= last_round]
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def summary_cost(records: Sequence[Mapping[str, Any]], levels: Iterable[float]) -> dict[str, int | None]:
    """C_acc at several levels, keyed as text for JSON."""
    return {f"{level:g}": c_acc(records, level) for level in levels}
