"""`fedet flower`: parses, calls, prints; nothing heavy is imported before it is needed."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedet.cli.options import Json, Method, Quiet, Rounds, Seed, Set, argument, at_least, changes
from fedet.config.sources import SHORT
from fedet.errors import ConfigError, FedetError, Interrupted

app = typer.Typer(help="Run on many machines with Flower.", no_args_is_help=True, rich_markup_mode=None)

App = Annotated[Path, argument("[APP]")]


@app.command()
def new(folder: Annotated[Path, argument("DIR")]) -> None:
    """Create a Flower app. It runs unchanged with `fedet flower run` and can be edited.

    DIR is the app's folder, a new or empty one.
    """
    _require("flwr", "fedet[flower]")
    from fedet.flower import bundle

    print(bundle.new(folder))


@app.command()
def up(
    folder: App = Path(),
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            callback=at_least(1),
            show_default=False,
            help="Number of SuperNodes sharing the clients (default: 2).",
        ),
    ] = 2,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="SETTINGS", help="Start a SuperNode with this node config instead; repeatable."),
    ] = None,
) -> None:
    """Start a federation on this machine. It is a SuperLink with TLS and authenticated SuperNodes; Ctrl-C stops it.

    APP is an app folder made by `fedet flower new` (default: the working directory).
    """
    _require("flwr", "fedet[flower]")
    from fedet.flower import local

    settings = list(node or []) or local.split_clients(_config(folder, {}).data.clients, nodes)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # when the terminal is closed
    try:
        with local.up(folder, settings, _print_with_name) as federation:
            print(f"ready; in another terminal: fedet flower run {folder}; Ctrl-C stops it", file=sys.stderr, flush=True)
            federation.wait()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)


@app.command()
def run(
    folder: App = Path(),
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    settings: Set = None,
    superlink: Annotated[
        str | None,
        typer.Option("--superlink", metavar="NAME", help="Use this SuperLink of your Flower configuration, not the local one."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Submit the app and follow its progress. The exit status is the run's; resubmitted, a run resumes.

    APP is an app folder made by `fedet flower new` (default: the working directory).
    """
    _require("flwr", "fedet[flower]")
    from fedet.flower import bundle

    asked = _by_key(changes(method, rounds, seed, settings, None))
    _config(folder, asked)
    home = None if superlink else bundle.home_of(folder)
    if home and not (home / "config.toml").is_file():
        raise ConfigError(
            f"no federation was started in {folder}: start one with `fedet flower up {folder}`, or name one with --superlink"
        )
    _follow(folder, asked, superlink, home, as_json, quiet)


@app.command()
def sim(
    folder: App = Path(),
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the app in Flower's own simulation, on Ray. There is one virtual node per client.

    APP is an app folder made by `fedet flower new` (default: the working directory).
    """
    _require("ray", "flwr[simulation]")
    from fedet.flower import local

    asked = _by_key(changes(method, rounds, seed, settings, None))
    clients = _config(folder, asked).data.clients
    with local.running(folder, lambda name, line: None) as federation:
        federation.start_simulation(clients)
        _follow(folder, asked, None, federation.home, as_json, quiet)


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"this needs {module}: pip install '{extra}'")


def _config(folder: Path, asked: dict[str, Any]) -> Any:
    """The app's configuration; an invalid one is refused before anything is started or submitted."""
    from fedet.flower import bundle

    bundle.require(folder)
    return bundle.load(folder.resolve(), bundle.settings(folder) | {"set": json.dumps(asked)})


def _by_key(asked: dict[str, Any]) -> dict[str, Any]:
    """The same changes by their full keys, as a submitted app takes them."""
    return {SHORT.get(key, key): value for key, value in asked.items()}


def _follow(folder: Path, asked: dict[str, Any], superlink: str | None, home: Path | None, as_json: bool, quiet: bool) -> None:
    from fedet.flower import runs

    number = runs.submit(folder, asked, superlink, home)
    try:
        status = runs.follow(number, superlink, home, (lambda name, line: None) if quiet else _print_line)
    except KeyboardInterrupt:
        stop = f"flwr stop {number}{f' {superlink}' if superlink else ''}"
        raise Interrupted(f"no longer following run {number}, which continues; `{stop}` stops it") from None
    print(json.dumps({"run": number, "status": status}) if as_json else f"run {number} {status}")
    if status != "finished:completed":
        raise FedetError(f"run {number} is {status}: the server's log above says why; fix it and resubmit; the run resumes")


def _print_with_name(name: str, line: str) -> None:
    print(f"{name:>9} | {line}", file=sys.stderr, flush=True)


def _print_line(name: str, line: str) -> None:
    print(line.removeprefix("INFO :").strip(), file=sys.stderr, flush=True)
