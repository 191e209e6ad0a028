"""Submitting an app to a SuperLink, and following the run."""

from __future__ import annotations

import json
import socket
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedet.errors import FedetError
from fedet.flower import bundle, programs
from fedet.flower.programs import OnLine, last_lines
from fedet.storage.files import write_text


def submit(app: Path, changes: Mapping[str, Any], superlink: str | None, home: Path | None) -> int:
    """Submit the app to a SuperLink; returns the run's id."""
    bundle.require(app)
    if home:
        _reachable(home)
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "run.toml"
        write_text(settings, tomli_w.dumps({"set": json.dumps(changes)} if changes else {}))
        overrides = ["--run-config", str(settings)] if changes else []
        done = programs.flwr(
            ["run", str(app.resolve()), *([superlink] if superlink else []), "--format", "json", *overrides], home
        )
    found = _object(done.stdout)
    if done.returncode or not found.get("success", True) or "run-id" not in found:
        raise FedetError(f"the run was not accepted: {found.get('error-message') or last_lines(done)}")
    return int(found["run-id"])


def follow(run: int, superlink: str | None, home: Path | None, on_line: OnLine) -> str:
    """Pass on the server's log until the run is over; returns its status, such as `finished:completed`."""
    command = ["flwr", "log", str(run), *([superlink] if superlink else []), "--stream"]
    stream = programs.start(command, home)
    try:
        for text in programs.lines(stream):
            on_line("server", text)
        while not (found := status(run, superlink, home)).startswith("finished"):
            time.sleep(1)
        return found
    finally:
        programs.end([stream], 5)


def status(run: int, superlink: str | None, home: Path | None) -> str:
    """A run's status; the exit code of `flwr run --stream` is 0 even if the run failed."""
    done = programs.flwr(["list", *([superlink] if superlink else []), "--run-id", str(run), "--format", "json"], home)
    runs = _object(done.stdout).get("runs") or []
    if done.returncode or not runs:
        raise FedetError(f"the status of run {run} is not available: {last_lines(done)}")
    return str(runs[0]["status"])


def _reachable(home: Path) -> None:
    """Refuse at once if the federation is not running; Flower would retry for minutes."""
    address = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))["superlink"]["local"]["address"]
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        raise FedetError(f"no SuperLink is running at {address}: start the federation with `fedet flower up`") from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
