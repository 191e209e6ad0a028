"""`fedet ui`: parses, calls, prints; nothing heavy is imported before it is needed."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import tempfile
import webbrowser
from collections.abc import Iterator
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

    with contextlib.ExitStack() as until_the_end:

        def announce(address: str) -> None:
            output.write(address)
            output.flush()
            if open_browser:
                webbrowser.open(until_the_end.enter_context(_leading_to(address)))

        for what in server.serve(folder, port, allow_control, announce):
            output.log(f"stopped at a checkpoint: {what}")


@contextlib.contextmanager
def _leading_to(address: str) -> Iterator[str]:
    """The address of a file that only this user can read and that leads on to the page.

    The command line of a browser can be seen by every user of the machine, and the page's own address has the token.
    """
    place = html.escape(address)
    with tempfile.TemporaryDirectory(prefix="fedet-ui-") as folder:
        path = Path(folder, "open.html")
        path.touch(mode=0o600)
        path.write_text(
            f'<!DOCTYPE html><title>fedet ui</title><meta http-equiv="refresh" content="0; url={place}">'
            f'<p><a href="{place}">fedet ui</a></p>\n',
            encoding="utf-8",
        )
        yield path.as_uri()
