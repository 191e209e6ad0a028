"""What the scripts in `benchmarks/` measured, as documents show it: their tables, and where they come from."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedet.errors import ConfigError
from fedet.storage.files import reason
from fedet.study.tables import LINE, Table, to_markdown

FOLDER = Path("results/measurements")


class Printed(BaseModel):
    """A table that a script printed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    head: list[str]
    rows: list[list[str]]


class Measurement(BaseModel):
    """The file that a script writes with `--json`; the scripts' own keys beside these are not shown."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    command: str
    tables: list[Printed]
    hardware: dict[str, Any]


def read(path: Path) -> Measurement:
    """A measurement from its file."""
    try:
        return Measurement.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no measurement {path}; write it with the script's --json") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {reason(error)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None


def tables(found: Measurement, only: int | None = None) -> str:
    """What was printed, or one of its tables, in Markdown."""
    chosen = found.tables if only is None else found.tables[only - 1 : only]
    return "\n\n".join(to_markdown(Table(table.head, table.rows)) for table in chosen) or "Not run yet."


def source(found: Measurement) -> str:
    """The command and the machine."""
    known = {
        name: found.hardware.get(name, "?") for name in ("processor", "cores", "capability", "python", "torch", "load_before")
    }
    machine = "{processor}, {cores} cores, {capability}, Python {python}, torch {torch}; load before {load_before}".format(
        **known
    )
    return "\n".join(textwrap.fill(f"- {line}.", LINE, subsequent_indent="  ") for line in (f"`{found.command}`", machine))
