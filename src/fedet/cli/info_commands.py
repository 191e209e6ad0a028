"""The commands that list and check what is available: methods, models, the installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedet.cli import output
from fedet.cli.options import DataDir, Json, Out, argument, at_least, numbers


def methods(as_json: Json = False) -> None:
    """List the methods as in Table 1, and the references."""
    from fedet.cli import console, listings

    rows, references = listings.method_rows(), listings.reference_rows()
    if as_json:
        output.write_json([*(row | {"reference": False} for row in rows), *(row | {"reference": True} for row in references)])
    else:
        console.table("Methods", rows)
        console.table("References: not federated, they show what was possible", references)


def models(
    classes: Annotated[
        int, typer.Option("--classes", callback=at_least(2), show_default=False, help="Number of classes (default: 10).")
    ] = 10,
    shape: Annotated[
        str, typer.Option("--input", metavar="C,H,W", show_default=False, help="Shape of an image (default: 3,32,32).")
    ] = "3,32,32",
    as_json: Json = False,
) -> None:
    """List the model families with their parameters and multiply-adds."""
    from fedet.cli import console, listings

    rows = listings.model_rows(classes, numbers(shape, "--input"))
    output.write_json(rows) if as_json else console.table("Models", rows)


def runs(out: Out = Path("runs"), as_json: Json = False) -> None:
    """List the runs in a directory. It says how far each is, and its accuracy; those of comparisons are listed, too."""
    from fedet.cli import console, listings

    rows = listings.run_rows(out)
    if as_json:
        output.write_json(rows)
    elif rows:
        console.table(f"Runs in {out}", listings.readable(rows))
    else:
        output.write(f"no runs in {out}")


def check(reference: Annotated[str, argument("METHOD")]) -> None:
    """Check a method. Determinism, resuming and drop-outs are among the properties that the engine relies on.

    METHOD is a method's name, module:Class or file.py:Class.
    """
    from fedet import check as checking
    from fedet import config as configuration
    from fedet.cli import console

    configuration.build_method({"name": reference})
    output.notice("checking, this takes some seconds")
    outcomes = list(checking.check(reference))
    output.clear_notice()
    console.checks(outcomes)
    if not all(outcome.ok for outcome in outcomes):
        raise typer.Exit(1)


def doctor(out: Out = Path("runs"), data_dir: DataDir = None) -> None:
    """Show versions, hardware, data and disk space."""
    from fedet.cli import console, listings

    console.table("fedet doctor", listings.doctor_rows(out, data_dir))
