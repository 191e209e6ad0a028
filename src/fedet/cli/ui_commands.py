"""`fedet ui`: parses, calls, prints; nothing heavy is imported before it is needed."""

from __future__ import annotations

import importlib.util
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedet.cli import output
from fedet.cli.options import argument
from fedet.errors import ConfigError


def ui(
    folder: Annotated[Path, argument("[DIR]")] = Path("runs"),
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, show_default=False, help="Port on 127.0.0.1 (default: 0, a free one)."),
    ] = 0,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the page start, stop and resume runs; otherwise it only shows them.")
    ] = False,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", show_default=False, help="Open the page in the browser (default: yes).")
    ] = True,
) -> None:
    """Show runs, comparisons and studies on a local web page, live. Ctrl-C ends it, and the runs that it started.

    DIR is the directory of run folders (default: runs). The page is reachable from this machine only, at the address that is
    printed, which contains a secret token.
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ConfigError("`fedet ui` needs Starlette and uvicorn: pip install 'fedet[ui]'")
    from fedet.ui import server

    def announce(address: str) -> None:
        output.write(address)
        output.flush()
        if open_browser:
            webbrowser.open(address)

    for what in server.serve(folder, port, allow_control, announce):
        output.log(f"stopped at a checkpoint: {what}")
