"""Arguments and options that several commands share, and how their values are read.

What an argument means stands in the command's docstring, and a default in the option's help: not every version of typer
prints the ones it is told about.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def argument(metavar: str | None = None, complete: Callable[[str], list[str]] | None = None) -> Any:
    """An argument that the command's docstring explains; `complete` gives the shell what may follow the typed letters."""
    return typer.Argument(metavar=metavar, hidden=True, autocompletion=complete)


def complete_config(typed: str) -> list[str]:
    """The presets and the TOML files that a shell may complete to."""
    from fedet.config.sources import presets

    files = [*Path().glob(f"{typed}*.toml"), *(folder / "" for folder in Path().glob(f"{typed}*/"))]
    return [*(name for name in presets() if name.startswith(typed)), *sorted(map(str, files))]


def at_least(least: int) -> Callable[[int | None], int | None]:
    """Check a whole number."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise typer.BadParameter(f"{value} is less than {least}.")
        return value

    return check


Config = Annotated[str | None, argument("[CONFIG]", complete_config)]
Run = Annotated[Path, argument("RUN")]
Method = Annotated[str | None, typer.Option("--method", help="Use this method instead of the configured one.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Number of communication rounds.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the partition, the initial weights and all sampling.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the configuration; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Don't show progress.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", callback=at_least(1), help="Number of runs at a time (default: one per core).")
]
Tracker = Annotated[
    list[str] | None,
    typer.Option("--tracker", metavar="NAME", help="Log to tensorboard, mlflow or a module such as wandb; repeatable."),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", show_default=False, help="Directory for run folders (default: runs).")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Directory of the data sets (default: $FEDET_DATA).")
]


def changes(
    method: str | None, rounds: int | None, seed: int | None, settings: list[str] | None, data_dir: Path | None
) -> dict[str, Any]:
    """The changes to a configuration that the options ask for; named options win over `--set`."""
    from fedet.config import assignments

    given = {"method": method, "rounds": rounds, "seed": seed, "data_dir": data_dir}
    return assignments(settings or []) | {key: value for key, value in given.items() if value is not None}


def words(text: str | None) -> list[str]:
    """Comma-separated words."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def some_words(option: str, text: str) -> list[str]:
    """Comma-separated words, at least one of them."""
    if found := words(text):
        return found
    raise typer.BadParameter("give at least one name.", param_hint=f"'{option}'")


def numbers(text: str, option: str) -> list[int]:
    """Comma-separated whole numbers."""
    try:
        return [int(word) for word in words(text)]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers separated by commas, got '{text}'", param_hint=f"'{option}'"
        ) from None


def command_line() -> str:
    """The command as it was typed, for the record."""
    return shlex.join(["fedet", *sys.argv[1:]])
