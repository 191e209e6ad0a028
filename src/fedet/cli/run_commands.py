"""The commands that run experiments and use their results: they parse, call and print; no logic of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedet import api, runtime
from fedet.cli import output
from fedet.cli.options import (
    Config,
    DataDir,
    Jobs,
    Json,
    Method,
    Out,
    Quiet,
    Rounds,
    Run,
    Seed,
    Set,
    Tracker,
    argument,
    at_least,
    changes,
    command_line,
    complete_config,
    numbers,
    some_words,
)


def run(
    config: Config = None,
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
    tracker: Tracker = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
) -> None:
    """Run one experiment. Its metrics, models and report are written to a new run folder.

    CONFIG is a TOML file or the name of a preset (default: digits).
    """
    output.notice("loading")
    asked = changes(method, rounds, seed, settings, data_dir)
    api.prestart_worker(config, asked)
    with runtime.no_garbage_collection(freeze=True):
        from fedet.cli import progress
        from fedet.engine import session  # noqa: F401 - all that is large is imported here, once

    with progress.shown(quiet) as callbacks:
        told: dict[str, Any] = {"callbacks": callbacks, "tracker": tracker, "progress": False}
        result = api.run(config, out=out, command=command_line(), **told, **asked)
    _print_result(result, as_json)


def resume(run_dir: Run, rounds: Rounds = None, as_json: Json = False, quiet: Quiet = False, tracker: Tracker = None) -> None:
    """Resume a run from its last checkpoint; --rounds makes it longer.

    RUN is the run's folder. Code that its configuration names (module:name) is run, as by `fedet run`.
    """
    output.notice("loading")
    api.prestart_worker(run_dir, {})
    with runtime.no_garbage_collection(freeze=True):
        from fedet.cli import progress
        from fedet.engine import session  # noqa: F401 - all that is large is imported here, once

    with progress.shown(quiet) as callbacks:
        result = api.resume(run_dir, callbacks=callbacks, tracker=tracker, progress=False, rounds=rounds)
    _print_result(result, as_json)


def compare(
    configs: Annotated[list[str] | None, argument("[CONFIG]...", complete_config)] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Comma-separated names, or `all`.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", show_default=False, help="Comma-separated seeds (default: 0).")] = "0",
    rounds: Rounds = None,
    settings: Set = None,
    equal_traffic: Annotated[
        bool, typer.Option("--equal-traffic", help="Stop the other runs when they have sent as many parameters as the first.")
    ] = False,
    references: Annotated[
        bool, typer.Option("--references", help="Add runs that show what was possible: central, public-labels, local.")
    ] = False,
    jobs: Jobs = None,
    as_json: Json = False,
    quiet: Quiet = False,
    tracker: Tracker = None,
    out: Out = Path("runs"),
    data_dir: DataDir = None,
) -> None:
    """Compare methods or configurations. All runs share the partition, the cohorts and the initial weights.

    Each CONFIG is a TOML file or the name of a preset (default: digits).
    """
    output.notice("loading")
    from fedet.cli import console, progress

    asked = changes(None, rounds, None, settings, data_dir)
    with progress.shown(quiet) as callbacks:
        outcome = api.compare(
            list(configs) if configs else [None],
            methods=None if methods is None else some_words("--methods", methods),
            seeds=numbers(seeds, "--seeds"),
            out=out,
            equal_traffic=equal_traffic,
            references=references,
            jobs=jobs,
            callbacks=callbacks,
            tracker=tracker,
            progress=False,
            command=command_line(),
            **asked,
        )
    if as_json:
        runs = [result.summary for result in outcome.results]
        output.write_json({"rows": outcome.rows, "runs": runs, "notes": outcome.notes, "report": str(outcome.report)})
    else:
        console.comparison(outcome)


def report(run_dir: Run) -> None:
    """Rewrite the report of a run or a comparison, finished or not.

    RUN is the folder of the run or the comparison.
    """
    from fedet.engine import comparison

    output.write(str(comparison.write_report(run_dir)))


def export(
    run_dir: Run,
    folder: Annotated[Path, argument("FOLDER")],
    which: Annotated[
        str, typer.Option("--which", show_default=False, help="The server model to export: `best` (default) or `last`.")
    ] = "best",
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run the code (module:name) that the run names; needed for models of your own.")
    ] = False,
) -> None:
    """Export the server model. The result is a Hugging Face style folder that `fedet.load_model` reads.

    RUN is the run's folder; FOLDER is a new or empty one.
    """
    from fedet.engine import export as exporting

    output.write(str(exporting.export_run(run_dir, folder, which, trust_code=trust_code)))


def bound(
    run_dir: Run,
    cohorts: Annotated[
        int, typer.Option("--cohorts", callback=at_least(1), show_default=False, help="Cohorts that train (default: 5).")
    ] = 5,
    delta: Annotated[
        float, typer.Option("--delta", show_default=False, help="The bound holds with probability 1 - delta (default: 0.05).")
    ] = 0.05,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute the paper's generalisation bound for a run's clients. Their weights in the consensus of Fed-ET stand next to it.

    RUN is the run's folder. Its next cohorts train for one round, in memory only; bound.json and the report keep what is found.
    """
    from fedet.cli import console, progress
    from fedet.reporting import report as reports
    from fedet.study import bound as bounds

    with progress.shown(quiet) as callbacks:
        found = bounds.of_run(run_dir, cohorts, delta, callbacks.stage)
    reports.write_run(run_dir)
    output.write_json(bounds.as_record(found)) if as_json else console.bound(found)


def audit(
    run_dir: Run,
    cohorts: Annotated[
        int, typer.Option("--cohorts", callback=at_least(1), show_default=False, help="Cohorts that train (default: 3).")
    ] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try membership inference on a run's models. It says how well training examples can be told from others.

    RUN is the run's folder. Its next cohorts train for one round, in memory only; their models and the server's are attacked;
    audit.json and the report keep what is found.
    """
    from fedet.cli import console, progress
    from fedet.reporting import report as reports
    from fedet.study import audit as audits

    with progress.shown(quiet) as callbacks:
        found = audits.of_run(run_dir, cohorts, callbacks.stage)
    reports.write_run(run_dir)
    output.write_json(audits.as_record(found)) if as_json else console.audit(found)


def _print_result(result: Any, as_json: bool) -> None:
    from fedet.cli import console

    output.write_json(result.summary) if as_json else console.result(result)
