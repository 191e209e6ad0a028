"""Where the processes of Linux do not exist, the plain way is taken, to the same bits; here it is forced on Linux."""

import ast
import os
import select
import signal
import socket
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from fedet import check, runtime
from fedet import config as configuration
from fedet.engine import session
from fedet.workers import buffers, fork_server, process
from fedet.workers.pool import Pool

ONLY_ON_LINUX = [
    (os, "fork"),
    (os, "pidfd_open"),
    (os, "posix_fallocate"),
    (select, "poll"),
    (signal, "pidfd_send_signal"),
    (socket, "send_fds"),
    (socket, "recv_fds"),
]


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A system that is not Linux, without being told so."""
    monkeypatch.delenv("FEDET_PORTABLE", raising=False)
    monkeypatch.setattr(fork_server.sys, "platform", "darwin")
    monkeypatch.setattr(buffers, "SHARED_MEMORY", tmp_path / "no shared memory")
    for module, name in ONLY_ON_LINUX:
        monkeypatch.delattr(module, name, raising=False)


def test_a_pool_without_fork_pidfd_and_shared_memory_gives_the_same_bits(elsewhere, tmp_path):
    lab = check.Lab("moon", {}, tmp_path)
    serial, _ = lab.run(lab.experiment())
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        assert pool.scratch.parent == Path(tempfile.gettempdir())
        assert all(isinstance(worker.process, subprocess.Popen) for worker in pool.workers)
        pooled, _ = lab.run(ready, pool)
    assert check.same(serial.state, pooled.state)
    assert not pool.scratch.exists()


def refused(_pid):
    raise PermissionError("a sandbox")


@pytest.mark.parametrize("lack", ["pidfd", "permission", "asked"])
def test_one_missing_part_is_enough_to_start_workers_instead_of_forking_them(monkeypatch, lack):
    monkeypatch.delenv("FEDET_PORTABLE", raising=False)
    if lack == "pidfd":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif lack == "permission":
        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    else:
        monkeypatch.setenv("FEDET_PORTABLE", "1")
    assert not fork_server.can_fork()


def test_workers_are_not_used_where_buffers_can_not_be_shared(monkeypatch):
    config = configuration.load("digits")
    assert session.num_workers(config) > 0
    assert fork_server._configured_workers("digits", {}) == "auto"
    monkeypatch.setattr(runtime, "mapped_files_grow", lambda: False)
    monkeypatch.setattr(fork_server, "mapped_files_grow", lambda: False)
    assert session.num_workers(config) == 0
    assert fork_server._configured_workers("digits", {}) == 0
    assert fork_server._configured_workers("digits", {"run": {"workers": 2}}) == 2  # whoever asks gets them


class NoSignals:
    """A process on a system that knows no SIGINT for others."""

    killed = False

    def send_signal(self, sig):
        raise ValueError(f"Unsupported signal: {sig}")

    def kill(self):
        self.killed = True


def test_a_process_that_can_not_be_sent_ctrl_c_is_ended():
    child = NoSignals()
    process.ChildProcess(child).interrupt()
    assert child.killed


NOT_ON_WINDOWS = {
    "fcntl", "grp", "pty", "pwd", "resource", "termios",
    "os.fork", "os.geteuid", "os.getuid", "os.killpg", "os.mkfifo", "os.sched_getaffinity", "os.setsid", "os.waitid",
    "signal.SIGALRM", "signal.SIGCONT", "signal.SIGHUP", "signal.SIGKILL", "signal.SIGSTOP", "signal.SIGUSR1",
    "signal.setitimer",
}  # fmt: skip


def at_import(node):
    """The names that a module needs when it is imported: those in the bodies of functions come later."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    later = node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
    for child in ast.iter_child_nodes(node):
        if child not in later and not isinstance(node, ast.Lambda):
            yield from at_import(child)


def test_all_tests_can_be_collected_on_windows_too():
    for path in sorted(Path(__file__).parent.glob("*.py")):
        needed = set(at_import(ast.parse(path.read_text(encoding="utf-8"))))
        assert not needed & NOT_ON_WINDOWS, path.name
