"""`fedet study`: parses, calls, prints; nothing heavy is imported before it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from fedet.cli import output
from fedet.cli.options import DataDir, Jobs, Json, Out, Quiet, Rounds, Set, argument, changes, command_line
from fedet.errors import ConfigError, FedetError

if TYPE_CHECKING:
    from fedet.study.cells import Grid
    from fedet.study.plan import Plan, PlannedRun, Scale
    from fedet.study.runner import Progress
    from fedet.study.tables import Table

RECORDS = Path("results/records")


class PlanOrCommand(TyperGroup):
    """A group in which a first word that is not a command is a plan: `fedet study PLAN` means `fedet study run PLAN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` where it is left out."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=PlanOrCommand,
    help="Run a plan of many runs, and make tables of their records. `fedet study PLAN` is short for `fedet study run PLAN`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
PlanName = Annotated[str, argument("PLAN")]
Records = Annotated[
    Path,
    typer.Option("--records", metavar="DIR", show_default=False, help="Directory of the records (default: results/records)."),
]
ScaleName = Annotated[
    str, typer.Option("--scale", show_default=False, help="`desk` (default) or `paper`: the size of the plan's experiments.")
]


@app.command()
def run(
    plan: PlanName,
    scale: ScaleName = "desk",
    jobs: Jobs = None,
    rounds: Rounds = None,
    settings: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs in their order and stop.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Delete a run's folder, with its models, when its record is written.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    out: Out = Path("runs"),
    records: Records = RECORDS,
    data_dir: DataDir = None,
) -> None:
    """Do the runs of a plan that have no record yet. They run side by side; then the plan's tables are written.

    PLAN is a TOML file or the name of a plan (`fedet study list`). A study may be stopped at any time; the same command
    continues it.
    """
    from fedet.cli import study_progress
    from fedet.config.sources import overrides
    from fedet.study import cells, live, runner, tables
    from fedet.study import plan as planning
    from fedet.study.records import Store

    loaded, asked = _load(plan, scale), overrides(changes(None, rounds, None, settings, data_dir))
    runs, store = planning.expand(loaded, asked), Store(records)
    if loaded.kind != "runs":
        _set_up(loaded, runs, records, out)
        return
    progress = runner.prepare(runs, store, jobs)
    if dry_run:
        _list_runs(progress)
        return

    def fill() -> Table:
        return tables.main(cells.arrange(loaded, runs, progress.finished.get))

    def write() -> tuple[Grid, Path]:
        return _write(loaded, runs, store, folder, dict(progress.errors))

    folder = out / f"study-{loaded.name}"
    try:
        with (
            live.page(folder, write) as changed,
            study_progress.shown(loaded.title, fill, progress, quiet) as notify,
        ):

            def tell(what: str, run: PlannedRun) -> None:
                notify(what, run)
                if what in ("finished", "failed"):
                    changed()

            runner.run(runs, store, out, discard=discard, command=command_line(), progress=progress, notify=tell)
    finally:
        grid, page = write()
    _print(grid, page, as_json)
    if progress.errors:
        name, why = next(iter(progress.errors.items()))
        raise FedetError(f"{len(progress.errors)} runs failed, and the same command tries them again; {name}: {why}")


@app.command()
def table(
    plan: PlanName,
    scale: ScaleName = "desk",
    rounds: Rounds = None,
    settings: Set = None,
    as_json: Json = False,
    out: Out = Path("runs"),
    records: Records = RECORDS,
) -> None:
    """Write the tables of a plan from the records, and run nothing.

    PLAN is a TOML file or the name of a plan.
    """
    from fedet.config.sources import overrides
    from fedet.study import plan as planning
    from fedet.study.records import Store

    loaded, asked = _load(plan, scale), overrides(changes(None, rounds, None, settings, None))
    runs = planning.expand(loaded, asked)
    if loaded.kind != "runs":
        raise ConfigError(f"nothing is trained for the plan {plan}: use `fedet study {plan}`")
    grid, page = _write(loaded, runs, Store(records), out / f"study-{loaded.name}", {})
    _print(grid, page, as_json)


@app.command()
def collect(
    folders: Annotated[list[Path], argument("RUN...")],
    records: Records = RECORDS,
    commit: Annotated[
        str | None, typer.Option("--commit", help="The commit of fedet that made the runs, for the records.")
    ] = None,
) -> None:
    """Write the records of finished runs that were not made by a study.

    RUN is a run's folder, or a folder with several of them below it. The number of rounds is part of what identifies a run.
    """
    from fedet.study import records as keeping

    written, left_out = keeping.collect(folders, keeping.Store(records), commit)
    for path in written:
        output.write(str(path))
    for why in left_out:
        output.log(f"left out: {why}")


@app.command()
def docs(
    root: Annotated[Path, argument("[ROOT]")] = Path(),
    records: Records = RECORDS,
    check: Annotated[bool, typer.Option("--check", help="Only check: fail if a document differs from the records.")] = False,
) -> None:
    """Write the results in documents again. These stand between `<!-- results: PLAN -->` and `<!-- end -->`.

    ROOT is the folder with README.md and docs/ (default: the working directory).
    """
    from fedet.study.docs import Documents

    documents = Documents(root, records)
    if not check:
        for path in documents.write():
            output.write(str(path))
    elif differing := documents.differing():
        names = ", ".join(str(path) for path in differing)
        raise FedetError(f"documents differ from the records, run `fedet study docs`: {names}")


@app.command("list")
def list_() -> None:
    """List the plans that come with the package."""
    from fedet.cli import console
    from fedet.study import plan as planning

    console.table("Plans", [{"plan": name, "what it shows": planning.load(name).title} for name in planning.plans()])


def _load(plan: str, scale: str) -> Plan:
    from fedet.study import plan as planning

    known: dict[str, Scale] = {"desk": "desk", "paper": "paper"}
    if scale not in known:
        raise ConfigError(f"--scale {scale}: it is `desk` or `paper`")
    return planning.load(plan, known[scale])


def _write(plan: Plan, runs: Any, store: Any, folder: Path, errors: dict[str, str]) -> tuple[Grid, Path]:
    from fedet.study import cells, pages

    grid = cells.arrange(plan, runs, store.get)
    return grid, pages.write(grid, folder, errors)


def _set_up(plan: Plan, runs: Any, records: Path, out: Path) -> None:
    """Do a plan that trains nothing."""
    from fedet.cli import console
    from fedet.storage.run_folder import cache_folder
    from fedet.study import pages, setups

    for why in setups.prepare(runs, records, cache_folder(out), output.log):
        output.log(f"left out: {why}")
    if plan.kind == "sizes":
        table = setups.sizes(plan, runs, records)
        console.cells(plan.title, table.head, table.body)
    output.write(f"report  {pages.write_setups(plan, runs, records, out / f'study-{plan.name}')}")


def _print(grid: Grid, page: Path, as_json: bool) -> None:
    from fedet.cli import console
    from fedet.reporting.references import HEADING
    from fedet.study import effects, tables

    changes = effects.applies(grid)
    found = {"table": tables.main(grid), "differences": effects.table(grid) if changes else tables.differences(grid)}
    if as_json:
        output.write_json(
            {name: {"head": each.head, "body": each.body} for name, each in found.items()} | {"report": str(page)}
        )
        return
    titles = {"differences": grid.plan.title} if changes else {"table": grid.plan.title, "differences": "Paired differences"}
    for name, title in titles.items():  # the differences of changes are in a table with their accuracies
        if (each := found[name]).body:
            console.cells(title, each.head, each.body, each.heading_before, HEADING)
    output.write(f"report  {page}")


def _list_runs(progress: Progress) -> None:
    from fedet.cli import console

    rows = [
        [str(number), run.key, "finished" if run.key in progress.finished else "to do"]
        for number, run in enumerate(progress.runs, start=1)
    ]
    console.cells("Runs, in their order", ["", "run", "state"], rows)
