"""A federation on this machine for trying out, and runs on it or on any other: Flower's own programs, started and watched."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from fedet.errors import ConfigError, FedetError
from fedet.flower import keys
from fedet.state import write_text

Say = Callable[[str, str], None]
"""Shows a line of someone's: who, what."""
LOOPBACK = "127.0.0.1"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "PYTHONUNBUFFERED": "1",
}
"""Nothing calls home, Ray stays on this machine, and work begins soon after it arrives."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CHATTER = re.compile(r"^INFO:|^INFO :$|uvicorn|lifespan|Lifespan")
"""Lines of the web servers inside Flower's programs: every request is one."""


def new(folder: Path) -> Path:
    """Write a thin app folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another place for the app")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "fedet-app"
    for source in (resources.files("fedet.flower") / "template").iterdir():
        if source.is_file():
            place = folder / (".gitignore" if source.name == "gitignore" else source.name)
            write_text(place, source.read_text(encoding="utf-8").replace("{name}", name))
    return folder


def home_of(app: Path) -> Path:
    """Where a local federation of this app keeps Flower's settings, certificates and keys; never part of what is submitted."""
    return app.resolve() / ".flwr"


def environment(home: Path | None) -> dict[str, str]:
    """Flower's programs find each other, one private home, and no reason to call anyone."""
    binaries = str(Path(sys.executable).parent)
    found = os.environ | QUIET | {"PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")])}
    return found | ({"FLWR_HOME": str(home)} if home else {})


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Local:
    """A SuperLink with TLS and authenticated SuperNodes, as processes of this one."""

    def __init__(self, app: Path, say: Say) -> None:
        self.app, self.home, self.say = app.resolve(), home_of(app), say
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def link(self) -> None:
        """Make certificates, write down where the SuperLink is, start it, wait until it listens."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca, certificate, key = keys.certificates(self.home / "tls", [LOOPBACK, "localhost"])
        place = {"address": f"{LOOPBACK}:{self.port}", "root-certificates": str(ca)}
        write_text(self.home / "config.toml", tomli_w.dumps({"superlink": {"default": "local", "local": place}}))
        secure = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key, "--enable-supernode-auth"]
        where = ["--host", LOOPBACK, "--port", self.port, "--disable-runtime-dependency-installation"]
        self.start("superlink", ["flower-superlink", *where, *secure])
        self._listening(60)

    def simulator(self, clients: int) -> None:
        """A SuperLink that plays all nodes itself, on Ray; it is this machine's alone, so it needs no certificates."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = {"address": f"{LOOPBACK}:{self.port}", "insecure": True, "options": {"num-supernodes": clients}}
        write_text(self.home / "config.toml", tomli_w.dumps({"superlink": {"default": "local", "local": place}}))
        where = ["--host", LOOPBACK, "--port", self.port, "--disable-runtime-dependency-installation"]
        self.start("superlink", ["flower-superlink", *where, "--insecure", "--simulation"])
        self._listening(60)

    def register(self, name: str) -> Path:
        """Make a node's key and tell the SuperLink of it; returns the private key's file."""
        private, public = keys.node_key(self.home / "nodes", name)
        done = flwr(["supernode", "register", str(public), "local", "--name", name], self.home)
        if done.returncode:
            raise FedetError(f"{name} could not be registered: {_last(done)}")
        return private

    def node(self, name: str, settings: str, private: Path | None = None, ca: Path | None = None) -> None:
        """Start a SuperNode with these settings; it connects by itself, and again whenever it must."""
        private = private or self.register(name)
        where = ["--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", free_port(), "--node-config", settings]
        trust = ["--root-certificates", ca or self.home / "tls" / "ca.crt", "--auth-supernode-private-key", private]
        self.start(name, ["flower-supernode", *where, *trust])

    def start(self, name: str, command: Sequence[object]) -> None:
        """Start one of Flower's programs in its own session: Ctrl-C is ours to deal with."""
        self.processes[name] = process = subprocess.Popen(
            [str(part) for part in command],
            env=environment(self.home),
            cwd=self.app,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._relay, args=(name, process), daemon=True).start()

    def watch(self) -> None:
        """Stay until the SuperLink ends."""
        code = self.processes["superlink"].wait()
        raise FedetError(f"the SuperLink ended with exit code {code}: its last lines are above")

    def stop(self, grace: float = 10.0) -> None:
        """Nodes first, then the SuperLink; what does not end in time is killed, with all that it started."""
        nodes = [process for name, process in self.processes.items() if name != "superlink"]
        end(nodes, grace)
        end([process for process in self.processes.values() if process not in nodes], grace)

    def _relay(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                text = COLOUR.sub("", line).strip()
                if text and not CHATTER.search(text):
                    self.say(name, text)

    def _listening(self, seconds: float) -> None:
        until, link = time.monotonic() + seconds, self.processes["superlink"]
        while time.monotonic() < until:
            if link.poll() is not None:
                raise FedetError(f"the SuperLink ended with exit code {link.returncode}: its last lines are above")
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), 0.5):
                return
            time.sleep(0.1)
        raise FedetError(f"the SuperLink does not listen after {seconds:g} s")


@contextlib.contextmanager
def up(app: Path, nodes: Sequence[str], say: Say) -> Iterator[Local]:
    """A federation with nodes of these settings, for as long as the block runs."""
    with running(app, say) as local:
        local.link()
        for number, settings in enumerate(nodes):
            local.node(f"node{number}", settings)
        yield local


@contextlib.contextmanager
def running(app: Path, say: Say) -> Iterator[Local]:
    """Whatever is started in the block ends with it."""
    require_app(app)
    local = Local(app, say)
    try:
        yield local
    finally:
        local.stop()


def shares(clients: int, nodes: int) -> list[str]:
    """Settings of nodes to which the clients are dealt: of 30 on 2, one has 0-14 and one 15-29."""
    cuts = [round(n * clients / nodes) for n in range(nodes + 1)]
    spans = [(a, b - 1) for a, b in itertools.pairwise(cuts) if b > a]
    return [f'client-ids="{a}-{b}"' for a, b in spans]


def end(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Ask processes to end, wait, and kill whatever is left of them and of what they started."""
    import psutil

    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(family, timeout=max(0.1, until - time.monotonic()))  # they look after their parent
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def flwr(arguments: Sequence[str], home: Path | None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """One command of Flower's command line."""
    command = [shutil.which("flwr", path=environment(home)["PATH"]) or "flwr", *arguments]
    try:
        return subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise FedetError(f"`flwr {' '.join(arguments)}` took longer than {timeout:g} s: is the SuperLink there?") from None


def submit(app: Path, changes: Mapping[str, Any], superlink: str | None, home: Path | None) -> int:
    """Hand the app to a SuperLink; returns the run's number."""
    require_app(app)
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "run.toml"
        write_text(settings, tomli_w.dumps({"set": json.dumps(changes)} if changes else {}))
        asked = ["--run-config", str(settings)] if changes else []
        done = flwr(["run", str(app.resolve()), *([superlink] if superlink else []), "--format", "json", *asked], home)
    found = _object(done.stdout)
    if done.returncode or not found.get("success", True) or "run-id" not in found:
        raise FedetError(f"the run was not accepted: {found.get('error-message') or _last(done)}")
    return int(found["run-id"])


def follow(run: int, superlink: str | None, home: Path | None, say: Say) -> str:
    """Show what the server says until the run is over; returns its true status, such as `finished:completed`."""
    command = ["flwr", "log", str(run), *([superlink] if superlink else []), "--stream"]
    stream = subprocess.Popen(
        command,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert stream.stdout is not None
        for line in stream.stdout:
            text = COLOUR.sub("", line).strip()
            if text:
                say("server", text)
        while not (found := status(run, superlink, home)).startswith("finished"):
            time.sleep(1)
        return found
    finally:
        end([stream], 5)


def status(run: int, superlink: str | None, home: Path | None) -> str:
    """What became of a run: `flwr run --stream` itself ends with 0 also where the run failed."""
    done = flwr(["list", *([superlink] if superlink else []), "--run-id", str(run), "--format", "json"], home)
    runs = _object(done.stdout).get("runs") or []
    if done.returncode or not runs:
        raise FedetError(f"the SuperLink does not say what became of run {run}: {_last(done)}")
    return str(runs[0]["status"])


def require_app(app: Path) -> None:
    """Refuse a folder that is no app of ours, with what to do."""
    if not (app / "pyproject.toml").is_file() or not (app / "apps.py").is_file():
        raise ConfigError(f"{app} is no app folder: make one with `fedet flower new DIR`")


def settings(app: Path) -> dict[str, Any]:
    """The app's own run settings."""
    try:
        plain = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        return dict(plain["tool"]["flwr"]["app"]["config"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{app / 'pyproject.toml'} has no [tool.flwr.app.config] that can be read: {error}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [COLOUR.sub("", line).strip() for line in (done.stdout + "\n" + done.stderr).splitlines()]
    words = [line.strip("│╭╮╰╯─ ") for line in lines]
    return " ".join([word for word in words if word][-6:]) or f"exit code {done.returncode}"
