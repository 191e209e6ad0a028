"""A federation on this machine, for trying out."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedet.errors import FedetError
from fedet.flower import bundle, keys, programs
from fedet.flower.programs import Say, last_words
from fedet.storage.files import write_text

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Local:
    """A SuperLink with TLS and authenticated SuperNodes, as processes of this one."""

    def __init__(self, app: Path, say: Say, host: str = LOOPBACK) -> None:
        self.app, self.home, self.say, self.host = app.resolve(), bundle.home_of(app), say, host
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.before: dict[str, Sequence[str]] = {}
        """Words before the command of a program, by its name."""

    def link(self, database: Path | None = None) -> None:
        """Make certificates, write down where the SuperLink is, start it, wait until it listens."""
        tls = self.home / "tls"
        if not (tls / "server.key").is_file() or not self.processes:
            keys.certificates(tls, [self.host, "localhost"])
        self._settings({"root-certificates": str(tls / "ca.crt")})
        secure = [
            "--ssl-ca-certfile",
            tls / "ca.crt",
            "--ssl-certfile",
            tls / "server.crt",
            "--ssl-keyfile",
            tls / "server.key",
        ]
        kept = ["--database", database] if database else []
        self.start("superlink", ["flower-superlink", *self._where(), *secure, "--enable-supernode-auth", *kept])
        self._listening(60)

    def simulator(self, clients: int) -> None:
        """A SuperLink that plays all nodes itself, on Ray; it is this machine's alone, so it needs no certificates."""
        self._settings({"insecure": True, "options": {"num-supernodes": clients}})
        self.start("superlink", ["flower-superlink", *self._where(), "--insecure", "--simulation"])
        self._listening(60)

    def register(self, name: str) -> Path:
        """Make a node's key and tell the SuperLink of it; returns the private key's file."""
        private, public = keys.node_key(self.home / "nodes", name)
        done = programs.flwr(["supernode", "register", str(public), "local", "--name", name], self.home)
        if done.returncode:
            raise FedetError(f"{name} could not be registered: {last_words(done)}")
        return private

    def node(self, name: str, settings: str, private: Path | None = None, ca: Path | None = None) -> None:
        """Start a SuperNode with these settings; it connects by itself, and again whenever it must."""
        private = private or self.register(name)
        where = [
            "--superlink",
            f"{self.host}:{self.port}",
            "--host",
            LOOPBACK,
            "--port",
            free_port(),
            "--node-config",
            settings,
        ]
        trust = ["--root-certificates", ca or self.home / "tls" / "ca.crt", "--auth-supernode-private-key", private]
        self.start(name, ["flower-supernode", *where, *trust])

    def start(self, name: str, command: Sequence[object]) -> None:
        """Start one of Flower's programs and show what it says."""
        self.processes[name] = process = programs.start([*self.before.get(name, ()), *command], self.home, self.app)
        threading.Thread(target=self._relay, args=(name, process), daemon=True).start()

    def callbacks(self) -> None:
        """Stay until the SuperLink ends."""
        code = self.processes["superlink"].wait()
        raise FedetError(f"the SuperLink ended with exit code {code}: its last lines are above")

    def stop(self, grace: float = 10.0) -> None:
        """Nodes first, then the SuperLink; what does not end in time is killed, with all that it started."""
        nodes = [process for name, process in self.processes.items() if name != "superlink"]
        programs.end(nodes, grace)
        programs.end([process for process in self.processes.values() if process not in nodes], grace)

    def _settings(self, how: Mapping[str, Any]) -> None:
        """Where the SuperLink is, for Flower's command line."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = {"address": f"{self.host}:{self.port}", **how}
        write_text(self.home / "config.toml", tomli_w.dumps({"superlink": {"default": "local", "local": place}}))

    def _where(self) -> list[object]:
        return ["--host", self.host, "--port", self.port, "--disable-runtime-dependency-installation"]

    def _relay(self, name: str, process: subprocess.Popen[str]) -> None:
        for text in programs.lines(process):
            self.say(name, text)

    def _listening(self, seconds: float) -> None:
        until, link = time.monotonic() + seconds, self.processes["superlink"]
        while time.monotonic() < until:
            if link.poll() is not None:
                raise FedetError(f"the SuperLink ended with exit code {link.returncode}: its last lines are above")
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 0.5):
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
    bundle.require(app)
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
