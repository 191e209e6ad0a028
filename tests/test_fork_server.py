"""Worker processes: one is started, the others are forked from it, and none is left behind."""

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
from fedet.workers import fork_server, process
from fedet.workers.pool import Pool

linux = pytest.mark.skipif(not fork_server.can_fork(), reason="workers are forked on Linux only")


@pytest.fixture(autouse=True)
def _nobody_is_left(monkeypatch):
    monkeypatch.delenv("FEDET_EARLY", raising=False)
    yield
    fork_server.discard()


def close(*processes):
    for one in processes:
        one.kill()
        one.wait(timeout=20)
        one.stdin.close()
        one.stdout.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except OSError:
        return False


@linux
def test_forked_workers_are_processes_of_their_own_that_can_be_ended():
    first, *forked = fork_server.start_workers(3)
    pids = [first.pid, *(worker.pid for worker in forked)]
    assert len(set(pids)) == 3
    assert all(map(alive, pids))
    assert [worker.poll() for worker in forked] == [None, None]
    with pytest.raises(subprocess.TimeoutExpired):
        forked[0].wait(timeout=0.01)
    forked[0].kill()
    assert forked[0].wait(timeout=20) == forked[0].poll() == fork_server.ForkedWorker.UNKNOWN
    forked[0].kill()  # once more does no harm
    assert alive(forked[1].pid)
    close(first)
    assert alive(forked[1].pid)  # it does not need the fork server
    forked[1].stdin.close()  # the parent is gone, for all it knows
    forked[1].wait(timeout=20)
    assert not any(map(alive, pids))
    close(*forked)


@linux
def test_workers_of_a_fork_server_that_dies_first_are_never_forked():
    first = fork_server.ForkServer()
    first.process.send_signal(signal.SIGSTOP)
    forked = first.fork(2)
    close(first.process)
    assert [worker.pid for worker in forked] == [0, 0]
    assert all(worker.poll() is not None for worker in forked)
    close(*forked)


@linux
def test_stopping_a_worker_that_is_still_to_be_forked_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(fork_server.ForkedWorker, "GRACE", 0.01)
    monkeypatch.setattr(process, "STOP_SECONDS", 0.01)
    first = fork_server.ForkServer()
    first.process.send_signal(signal.SIGSTOP)
    (worker,) = first.fork(1)
    assert worker.poll() is None
    process.ChildProcess(worker).stop()
    first.process.send_signal(signal.SIGCONT)
    worker.wait(timeout=60)  # its input is closed
    close(first.process, worker)


def test_a_prestarted_worker_that_died_is_not_used():
    fork_server.prestart("digits", {})
    (dead,) = fork_server._prestarted
    dead.process.kill()
    dead.process.wait(timeout=20)
    workers = fork_server.start_workers(2)
    assert dead.process not in workers
    assert all(worker.poll() is None for worker in workers)
    close(*workers)


@linux
def test_a_fork_server_that_dies_while_it_is_used_is_replaced(tmp_path, monkeypatch):
    lab = check.Lab("moon", {}, tmp_path)
    serial, _ = lab.run(lab.experiment())
    dead = fork_server.ForkServer()
    dead.process.kill()
    dead.process.wait(timeout=20)
    monkeypatch.setattr(fork_server, "ForkServer", lambda: dead)
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        pooled, _ = lab.run(ready, pool)
    assert check.same(serial.state, pooled.state)


@linux
def test_a_killed_forked_worker_is_replaced(tmp_path):
    lab = check.Lab("moon", {}, tmp_path)
    serial, _ = lab.run(lab.experiment())
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        assert isinstance(pool.workers[1].process, fork_server.ForkedWorker)

        def kill_one(number):
            if number == 2:
                os.kill(pool.workers[1].process.pid, signal.SIGKILL)
                pool.workers[1].process.wait(timeout=20)

        pooled, _ = lab.run(ready, Spy(pool, kill_one))
        assert not isinstance(pool.workers[1].process, fork_server.ForkedWorker)
    assert check.same(serial.state, pooled.state)


BUSY = """
import os, socket, sys, threading, time
from fedet.workers import worker

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
worker._fork_copies(socket.socket(fileno=int(sys.argv[1])), os.dup(1))
"""


@linux
def test_a_process_with_other_threads_is_not_forked_but_started_anew():
    worker = fork_server.ForkedWorker()
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-c", BUSY, str(there.fileno())]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=(there.fileno(),)) as busy:
            socket.send_fds(here, [b"."], worker.child_ends)
            for end in worker.child_ends:
                os.close(end)
            assert worker.pid not in (0, busy.pid)
            here.shutdown(socket.SHUT_RDWR)
    worker.stdin.write('{"config": "none"}\n')
    worker.stdin.close()
    assert "fedet.workers.worker" in Path(f"/proc/{worker.pid}/cmdline").read_text(encoding="utf-8")
    worker.wait(timeout=60)
    assert "error" in json.loads(worker.stdout.read())  # it has read its line, and could do nothing with it
    worker.stdout.close()


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
def test_a_worker_is_prestarted_where_the_settings_ask_for_some(source, changes, so, monkeypatch):
    started = []
    monkeypatch.setattr(fork_server, "_prestarted", [])
    monkeypatch.setattr(fork_server, "ForkServer", lambda: started.append(1))
    fork_server.prestart(source, changes)
    assert bool(started) is so
    fork_server._prestarted.clear()


def test_prestarting_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("FEDET_EARLY", "0")
    fork_server.prestart("digits", {})
    assert not fork_server._prestarted


def test_a_prestarted_worker_is_used_once_or_discarded(tmp_path):
    fork_server.prestart("digits", {})
    (first,) = fork_server._prestarted
    fork_server.prestart("digits", {})
    assert fork_server._prestarted == [first]
    (worker,) = fork_server.start_workers(1)
    assert worker is first.process
    assert not fork_server._prestarted
    close(worker)
    fork_server.prestart("digits", {})
    left = fork_server._prestarted[0].process
    fork_server.discard()
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
    code = "import sys, fedet.api; fedet.api.prestart_worker('digits', {'run.workers': 0}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("given", "count"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_the_command_line_lets_threads_wait_briefly_unless_told_otherwise(given, count):
    code = (
        "import os, sys, fedet.cli\nassert 'torch' not in sys.modules, 'too late for OpenMP'\n"
        "sys.argv = ['fedet', '--version']\ntry:\n    fedet.cli.main()\nfinally:\n    print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(count)


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
