"""`fedet sweep`: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedet.cli import output
from fedet.cli.options import (
    Config,
    DataDir,
    Jobs,
    Json,
    Out,
    Quiet,
    Rounds,
    Set,
    at_least,
    changes,
    command_line,
    numbers,
    words,
)
from fedet.cli.study_commands import RECORDS, Records
from fedet.errors import ConfigError, FedetError

if TYPE_CHECKING:
    from fedet.study.plan import PlannedRun
    from fedet.study.sweep import Sweep
    from fedet.study.tables import Table


def sweep(
    config: Config = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=V1,V2,...",
            help="Values of a key, for one method as METHOD:KEY=..., or paper-images, paper-text; repeatable.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Comma-separated names (default: the configured one).")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", "--random", callback=at_least(1), help="Settings per method, drawn at random (default: the whole grid)."
        ),
    ] = None,
    halving: Annotated[bool, typer.Option("--halving", help="Give only the best third of the trials more rounds.")] = False,
    seeds: Annotated[str, typer.Option("--seeds", show_default=False, help="Comma-separated seeds (default: 0).")] = "0",
    rounds: Rounds = None,
    settings: Set = None,
    jobs: Jobs = None,
    as_json: Json = False,
    quiet: Quiet = False,
    out: Out = Path("runs"),
    records: Records = RECORDS,
    data_dir: DataDir = None,
) -> None:
    """Search for hyper-parameters by validation accuracy. Every method gets the same number of trials.

    CONFIG is a TOML file or the name of a preset (default: digits). A search may be stopped at any time; the same command
    continues it. The test data has no influence on the choice.
    """
    from fedet.config.sources import overrides
    from fedet.study import sweep as searching

    if not over:
        raise ConfigError("nothing to search over: give --over KEY=V1,V2,..., for example --over method.client.lr=0.01,0.1")
    plan = searching.prepare(
        config,
        over,
        methods=words(methods),
        trials=trials,
        seeds=numbers(seeds, "--seeds"),
        halving=halving,
        changes=overrides(changes(None, rounds, None, settings, data_dir)),
    )
    _search(plan, records, out, jobs, quiet, as_json)


def _search(plan: Sweep, records: Path, out: Path, jobs: int | None, quiet: bool, as_json: bool) -> None:
    from fedet.cli import study_progress
    from fedet.study import runner, sweep_pages
    from fedet.study import sweep as searching
    from fedet.study.records import Store

    store, errors, first = Store(records), {}, plan.config(plan.trials[0])
    title = f"Search on {first.name}, {len(plan.trials) // len(plan.methods())} trials per method"
    if not first.data.val_fraction:
        output.log(f"data.val_fraction is 0: the trials hold out {searching.VALIDATION:g} of the training data for validation")

    def fill() -> Table:
        return sweep_pages.table(plan, searching.search(plan, store.get))

    def run(runs: list[PlannedRun]) -> None:
        progress = runner.prepare(runs, store, jobs)
        with study_progress.shown(title, fill, progress, quiet) as notify:
            runner.run(runs, store, out, command=command_line(), progress=progress, notify=notify)
        errors.update(progress.errors)

    try:
        searching.search(plan, store.get, run)
    finally:
        scores = searching.search(plan, store.get)
        written = sweep_pages.write(plan, scores, out / f"sweep-{first.name}", title)
    _print(title, sweep_pages.table(plan, scores), written, as_json)
    if errors:
        raise FedetError(f"{len(errors)} runs failed, and the same command tries them again; {next(iter(errors.values()))}")


def _print(title: str, found: Table, written: dict[str, Path], as_json: bool) -> None:
    from fedet.cli import console

    if as_json:
        output.write_json({"head": found.head, "body": found.body, **{name: str(path) for name, path in written.items()}})
        return
    console.cells(title, found.head, found.body)
    for name, path in written.items():
        output.write(f"{name if name == 'report' else f'best {name}'}  {path}")
