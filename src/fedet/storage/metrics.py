"""A run's metrics and communication ledger as JSON lines, and the cost of reaching an accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedet.core import Payload
from fedet.errors import FedetError
from fedet.storage.files import MAX_JSON, conform, reason, write_error, write_text
from fedet.storage.records import AskedRecord, LedgerRecord, RoundRecord

Record = dict[str, Any]
"""A JSON object: a line of a log, or the summary of a run."""
MODEL = "model"
"""The group of a payload that counts as model parameters; all other groups, such as SCAFFOLD's controls, count as other."""


SCHEMAS: Mapping[str, type[BaseModel]] = {"ledger.jsonl": LedgerRecord, "asked.jsonl": AskedRecord}
"""Of the lines of files other than metrics."""


def count(payload: Payload) -> dict[str, int]:
    """Numbers and bytes in one message, with model parameters counted separately."""
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
    """How many numbers a message contains."""
    return sum(t.numel() for tensors in payload.tensors.values() for t in tensors.values()) + len(payload.scalars)


@dataclass
class Ledger:
    """Counts what crosses the network in one round, from the payloads."""

    down: dict[int, dict[str, int]] = field(default_factory=dict)
    up: dict[int, dict[str, int]] = field(default_factory=dict)

    def count(self, requests: Mapping[int, Payload], replies: Mapping[int, Payload]) -> None:
        """Add the requests and replies of one exchange."""
        for counts, payloads in ((self.down, requests), (self.up, replies)):
            for client, payload in payloads.items():
                _add(counts.setdefault(client, dict.fromkeys(("model", "other", "bytes"), 0)), count(payload))

    @property
    def total(self) -> int:
        """Numbers sent so far, in both directions."""
        return sum(c["model"] + c["other"] for counts in (self.down, self.up) for c in counts.values())

    def totals(self) -> dict[str, int]:
        """The round's totals, as they appear in the metrics."""
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
    """Parameters sent in both directions up to and including the first round that reached this accuracy; None if none did."""
    return next((r["params_total"] for r in records if (r.get("accuracy") or -1) >= accuracy), None)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a JSON-lines file."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise write_error(path, error) from error


def read(path: Path, *, skip_damaged: bool = False) -> list[Record]:
    """All complete lines of a metrics or ledger file; a last line that was cut off is left out.

    A damaged line elsewhere is an error, unless it is to be skipped: somebody who watches a run wants to see the rest.
    """
    if not path.is_file():
        return []
    schema = SCHEMAS.get(path.name, RoundRecord)
    records: list[Record] = []
    damaged: FedetError | None = None
    try:
        for number, line in enumerate(_lines(path), start=1):
            if damaged:  # and it is not the last one, which a killed process may have left
                raise damaged
            try:
                records.append(_parse(line, schema, f"{path}, line {number},"))
            except FedetError as error:
                damaged = None if skip_damaged else error
    except (OSError, ValueError) as error:
        raise FedetError(f"{path} is damaged: {error}") from None
    return records


def _lines(path: Path) -> Iterator[str]:
    """The complete lines of a file, one at a time."""
    with path.open(encoding="utf-8") as file:
        while (line := file.readline(MAX_JSON)).endswith("\n"):
            yield line
    if len(line) == MAX_JSON:
        raise ValueError(f"it has a line of more than {MAX_JSON >> 20} MB")


def _parse(line: str, schema: type[BaseModel], what: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FedetError(f"{what} is damaged: {reason(error)}") from None
    return conform(value, schema, what)


def replace_last(path: Path, record: Record) -> None:
    """Replace the last line of a metrics file."""
    _write(path, [*read(path)[:-1], record])


def truncate(path: Path, last_round: int) -> None:
    """Drop the lines of all rounds after this one."""
    _write(path, [record for record in read(path) if record["round"] <= last_round])


def _write(path: Path, records: Iterable[Record]) -> None:
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def summary_cost(records: Sequence[Mapping[str, Any]], levels: Iterable[float]) -> dict[str, int | None]:
    """C_acc at several accuracies, keyed by their text for JSON."""
    return {f"{level:g}": c_acc(records, level) for level in levels}
