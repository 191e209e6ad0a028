"""The program `fedet`: its commands, and how errors become one line and an exit code."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from fedet.cli import config_commands, data_commands, info_commands, output, run_commands, sweep_commands, ui_commands
from fedet.cli.flower_commands import app as flower_app
from fedet.cli.study_commands import app as study_app
from fedet.errors import FedetError, tracebacks
from fedet.runtime import package_version, wait_briefly

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's class: newer versions of typer contain click, older ones depend on it."""


class Commands(typer.core.TyperGroup):
    """A group of commands that suggests the nearest one once; some versions of typer and click both do."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of this name."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if error.format_message().count("Did you mean") > 1:
                error.message = error.message.partition(" Did you mean")[0]
            raise


GROUPS = {
    "data": typer.Typer(help="List, download, verify and plot data sets.", no_args_is_help=True, rich_markup_mode=None),
    "config": typer.Typer(help="Show configurations.", no_args_is_help=True, rich_markup_mode=None),
    "study": study_app,
    "flower": flower_app,
}
COMMANDS = {
    "": (
        run_commands.run,
        run_commands.resume,
        run_commands.compare,
        sweep_commands.sweep,
        run_commands.report,
        run_commands.export,
        run_commands.bound,
        run_commands.audit,
        ui_commands.ui,
        info_commands.runs,
        info_commands.methods,
        info_commands.models,
        info_commands.check,
        info_commands.doctor,
    ),
    "data": (data_commands.list_, data_commands.fetch, data_commands.verify, data_commands.show),
    "config": (config_commands.show, config_commands.list_),
}

app = typer.Typer(
    name="fedet",
    cls=Commands,
    help="Train one large model on a server from many small, different models on clients that never show their data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and exit."""
    wait_briefly()
    # A shell that starts us in the background has SIGINT ignored; a run must still be stoppable, and by SIGTERM too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            app()
        finally:
            output.flush()
    except output.OutputError as error:
        output.give_up(error)
    except OSError as error:  # commands report their own: what arrives here, typer met while printing help
        output.give_up(output.OutputError(error))


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn whatever a command raises into one line and an exit code; only usage errors are left to typer."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except (typer.Exit, typer.BadParameter):
            output.clear_notice()
            raise
        except FedetError as error:
            _fail(error, str(error), error.exit_code)
        except KeyboardInterrupt:
            output.fail("interrupted; everything written so far is intact", 130)
        except output.OutputError as error:
            output.give_up(error)
        except Exception as error:
            _fail(error, _sentence(error), 1)

    return call


def _fail(error: Exception, sentence: str, code: int) -> NoReturn:
    """End the program with the sentence, below the lines of the user's code that led to the error or the whole traceback."""
    if details := tracebacks.details(error):
        output.log(details)
        if not tracebacks.debugging():
            sentence += " (FEDET_DEBUG=1 shows the whole traceback)"
    output.fail(sentence, code)


def _sentence(error: Exception) -> str:
    if not isinstance(error, OSError):
        hint = "" if tracebacks.details(error) else " (unexpected; FEDET_DEBUG=1 shows the traceback)"
        return f"{type(error).__name__}: {error}{hint}"
    if error.filename is None:
        return f"the system reports: {error.strerror or error}"
    return f"can't use {error.filename}: {error.strerror or error}"


def _print_version(wanted: bool) -> None:
    if wanted:
        output.write(f"fedet {package_version()}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


for _group, _functions in COMMANDS.items():
    for _function in _functions:
        (GROUPS[_group] if _group else app).command(_function.__name__.rstrip("_"))(report_errors(_function))
for _command in [*study_app.registered_commands, *flower_app.registered_commands]:
    assert _command.callback is not None
    _command.callback = report_errors(_command.callback)
for _group, _commands in GROUPS.items():
    if _commands is study_app:  # it has a class of its own: a first word that is no command is a plan
        app.add_typer(_commands, name=_group)
    else:
        app.add_typer(_commands, name=_group, cls=Commands)
