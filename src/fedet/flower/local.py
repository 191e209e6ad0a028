"""A federation on this machine, for trials."""

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
from fedet.flower.programs import OnLine, last_lines
from fedet.storage.files import write_text

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class LocalFederation:
    """A SuperLink with TLS and authenticated SuperNodes, as child processes."""

    def __init__(self, app: Path, on_line: OnLine, host: str = LOOPBACK) -> None:
        self.app, self.home, self.on_line, self.host = app.resolve(), bundle.home_of(app), on_line, host
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.prefixes: dict[str, Sequence[str]] = {}
        """What goes before the command of a program, by its name."""

    def start_superlink(self, database: Path | None = None) -> None:
        """Make certificates, write the SuperLink's address to Flower's settings, start it, wait until it listens."""
        tls = self.home / "tls"
        if not (tls / "server.key").is_file() or not self.processes:
            keys.certificates(tls, [self.host, "localhost"])
        self._write_settings({"root-certificates": str(tls / "ca.crt")})
        secure = [
            "--ssl-ca-certfile",
            tls / "ca.crt",
            "--ssl-certfile",
            tls / "server.crt",
            "--ssl-keyfile",
            tls / "server.key",
        ]
        stored = ["--database", database] if database else []
        self.start_program(
            "superlink", ["flower-superlink", *self._address_options(), *secure, "--enable-supernode-auth", *stored]
        )
        self._wait_until_listening(60)

    def start_simulation(self, clients: int) -> None:
        """Start a SuperLink that simulates all nodes, on Ray; only this machine reaches it, so it needs no certificates."""
        self._write_settings({"insecure": True, "options": {"num-supernodes": clients}})
        self.start_program("superlink", ["flower-superlink", *self._address_options(), "--insecure", "--simulation"])
        self._wait_until_listening(60)

    def register(self, name: str) -> Path:
        """Make a node's key and register it with the SuperLink; returns the private key's file."""
        private, public = keys.node_key(self.home / "nodes", name)
        done = programs.flwr(["supernode", "register", str(public), "local", "--name", name], self.home)
        if done.returncode:
            raise FedetError(f"{name} could not be registered: {last_lines(done)}")
        return private

    def start_node(self, name: str, settings: str, private: Path | None = None, ca: Path | None = None) -> None:
        """Start a SuperNode with these settings; it connects, and reconnects, by itself."""
        private = private or self.register(name)
        addresses = [
            "--superlink",
            f"{self.host}:{self.port}",
            "--host",
            LOOPBACK,
            "--port",
            free_port(),
            "--node-config",
            settings,
        ]
        security = ["--root-certificates", ca or self.home / "tls" / "ca.crt", "--auth-supernode-private-key", private]
        self.start_program(name, ["flower-supernode", *addresses, *security])

    def start_program(self, name: str, command: Sequence[object]) -> None:
        """Start one of Flower's programs and pass on its output."""
        self.processes[name] = process = programs.start([*self.prefixes.get(name, ()), *command], self.home, self.app)
        threading.Thread(target=self._relay, args=(name, process), daemon=True).start()

    def wait(self) -> None:
        """Wait until the SuperLink ends, which it does only if something went wrong."""
        code = self.processes["superlink"].wait()
        raise FedetError(f"the SuperLink ended with exit code {code}: its last lines are above")

    def stop(self, grace: float = 10.0) -> None:
        """End the nodes, then the SuperLink; those that do not end in time are killed, with their children."""
        nodes = [process for name, process in self.processes.items() if name != "superlink"]
        programs.end(nodes, grace)
        programs.end([process for process in self.processes.values() if process not in nodes], grace)

    def _write_settings(self, options: Mapping[str, Any]) -> None:
        """Tell Flower's command line where the SuperLink is."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        superlink = {"address": f"{self.host}:{self.port}", **options}
        write_text(self.home / "config.toml", tomli_w.dumps({"superlink": {"default": "local", "local": superlink}}))

    def _address_options(self) -> list[object]:
        return ["--host", self.host, "--port", self.port, "--disable-runtime-dependency-installation"]

    def _relay(self, name: str, process: subprocess.Popen[str]) -> None:
        for text in programs.lines(process):
            self.on_line(name, text)

    def _wait_until_listening(self, seconds: float) -> None:
        until, link = time.monotonic() + seconds, self.processes["superlink"]
        while time.monotonic() < until:
            if link.poll() is not None:
                raise FedetError(f"the SuperLink ended with exit code {link.returncode}: its last lines are above")
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 0.5):
                return
            time.sleep(0.1)
        raise FedetError(f"the SuperLink does not accept connections after {seconds:g} s")


@contextlib.contextmanager
def up(app: Path, nodes: Sequence[str], on_line: OnLine) -> Iterator[LocalFederation]:
    """A federation whose nodes have these settings, while the block runs."""
    with running(app, on_line) as local:
        local.start_superlink()
        for number, settings in enumerate(nodes):
            local.start_node(f"node{number}", settings)
        yield local


@contextlib.contextmanager
def running(app: Path, on_line: OnLine) -> Iterator[LocalFederation]:
    """A federation without programs yet; whatever is started in the block ends with it."""
    bundle.require(app)
    local = LocalFederation(app, on_line)
    try:
        yield local
    finally:
        local.stop()


def split_clients(clients: int, nodes: int) -> list[str]:
    """Settings of nodes among which the clients are divided: 30 on 2 are 0-14 and 15-29."""
    cuts = [round(n * clients / nodes) for n in range(nodes + 1)]
    spans = [(a, b - 1) for a, b in itertools.pairwise(cuts) if b > a]
    return [f'client-ids="{a}-{b}"' for a, b in spans]
