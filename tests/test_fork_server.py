"""Worker processes: one is started, the others are its copies, and none is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from lab import Spy

from fedet import check
from fedet.workers import fork_server
from fedet.workers.pool import Pool

linux = pytest.mark.skipif(not fork_server._can_copy(), reason="processes are copied on Linux only")


@pytest.fixture(autouse=True)
def _nobody_is_left(monkeypatch):
    monkeypatch.delenv("FEDET_EARLY", raising=False)
    yield
    fork_server.forget()


def close(*processes):
    for process in processes:
        process.kill()
        process.wait(timeout=20)
        process.stdin.close()
        process.stdout.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except OSError:
        return False


@linux
def test_copies_are_processes_of_their_own_that_can_be_ended():
    first, *copies = fork_server.processes(3)
    pids = [first.pid, *(copy.pid for copy in copies)]
    assert len(set(pids)) == 3
    assert all(map(alive, pids))
    assert [copy.poll() for copy in copies] == [None, None]
    with pytest.raises(subprocess.TimeoutExpired):
        copies[0].wait(timeout=0.01)
    copies[0].kill()
    assert copies[0].wait(timeout=20) == copies[0].poll() == fork_server.ForkedWorker.UNKNOWN
    copies[0].kill()  # once more does no harm
    assert alive(copies[1].pid)
    close(first)
    assert alive(copies[1].pid)  # a copy does not need its original
    copies[1].stdin.close()  # the parent is gone, for all it knows
    copies[1].wait(timeout=20)
    assert not any(map(alive, pids))
    close(*copies)


@linux
def test_copies_of_a_worker_that_dies_first_never_come_to_be():
    first = fork_server.ForkServer()
    first.process.send_signal(signal.SIGSTOP)
    copies = first.copies(2)
    close(first.process)
    assert [copy.pid for copy in copies] == [0, 0]
    assert all(copy.poll() is not None for copy in copies)
    close(*copies)


@linux
def test_a_killed_copy_is_replaced(tmp_path):
    lab = check.Lab("moon", {}, tmp_path)
    serial, _ = lab.play(lab.experiment())
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        assert isinstance(pool.workers[1].process, fork_server.ForkedWorker)

        def kill_one(number):
            if number == 2:
                os.kill(pool.workers[1].process.pid, signal.SIGKILL)
                pool.workers[1].process.wait(timeout=20)

        pooled, _ = lab.play(ready, Spy(pool, kill_one))
        assert not isinstance(pool.workers[1].process, fork_server.ForkedWorker)
    assert check.same(serial.state, pooled.state)


BUSY = """
import os, socket, sys, threading, time
from fedet.workers import worker

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
worker._make_copies(socket.socket(fileno=int(sys.argv[1])), os.dup(1))
"""


@linux
def test_a_process_with_other_threads_is_not_copied_but_started_anew():
    copy = fork_server.ForkedWorker()
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-c", BUSY, str(there.fileno())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=(there.fileno(),)) as process:
            socket.send_fds(here, [b"."], copy.ends)
            for end in copy.ends:
                os.close(end)
            assert copy.pid not in (0, process.pid)
            here.shutdown(socket.SHUT_RDWR)
    copy.stdin.write('{"config": "none"}\n')
    copy.stdin.close()
    assert "fedet.workers.worker" in Path(f"/proc/{copy.pid}/cmdline").read_text(encoding="utf-8")
    copy.wait(timeout=60)
    assert copy.stdout.read() == ""  # it has read its line, and could do nothing with it
    copy.stdout.close()


@pytest.mark.parametrize(
    ("source", "changes", "so"),
    [
        ("digits", {}, True),
        (None, {}, True),
        ("digits", {"run.workers": 0}, False),
        ({"run": {"workers": 2}}, {}, True),
        ({"run.workers": 2}, {}, True),
        ({"base": "digits"}, {}, True),
        ({"base": "digits", "run": {"workers": 0}}, {}, False),
        ({"run": {"rounds": 1}}, {}, False),
        ("no such preset", {}, False),
        ({"run": 3}, {}, False),
        (7, {}, False),
    ],
)
def test_a_worker_is_expected_where_the_settings_ask_for_some(source, changes, so, monkeypatch):
    started = []
    monkeypatch.setattr(fork_server, "_waiting", [])
    monkeypatch.setattr(fork_server, "ForkServer", lambda: started.append(1))
    fork_server.expect(source, changes)
    assert bool(started) is so
    fork_server._waiting.clear()


def test_expecting_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("FEDET_EARLY", "0")
    fork_server.expect("digits", {})
    assert not fork_server._waiting


def test_what_was_expected_is_used_once_and_else_forgotten(tmp_path):
    fork_server.expect("digits", {})
    (first,) = fork_server._waiting
    fork_server.expect("digits", {})
    assert fork_server._waiting == [first]
    (process,) = fork_server.processes(1)
    assert process is first.process
    assert not fork_server._waiting
    close(process)
    fork_server.expect("digits", {})
    left = fork_server._waiting[0].process
    fork_server.forget()
    assert left.poll() is not None


def test_a_run_that_is_refused_leaves_no_worker(tmp_path):
    code = (
        "import fedet, subprocess, os\n"
        "try:\n    fedet.run('digits', data__alpha=-1)\n"
        "except fedet.ConfigError:\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read() if os.path.exists('/proc/self/task') else '')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path)
    assert done.stdout.strip() == ""


def test_settings_are_looked_at_without_torch():
    code = "import sys, fedet.api; fedet.api.expect('digits', {'run.workers': 0}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_imports_without_garbage_collection_leave_the_collector_as_it_was():
    code = (
        "import gc, json\nfrom fedet import runtime\n"
        "with runtime.no_garbage_collection():\n    inside = gc.isenabled()\n"
        "frozen = gc.get_freeze_count()\n"
        "with runtime.no_garbage_collection(freeze=True):\n    pass\n"
        "after = gc.get_freeze_count()\n"
        "gc.disable()\n"
        "with runtime.no_garbage_collection():\n    pass\n"
        "print(json.dumps([inside, frozen, after > 0, gc.isenabled()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [False, 0, True, False]


def test_a_program_that_calls_fedet_keeps_its_own_objects_collectable(tmp_path):
    code = (
        f"import gc, fedet\nfedet.run('digits', out={str(tmp_path)!r}, rounds=1, run__workers=0)\nprint(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-1] == "0"
