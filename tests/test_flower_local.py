"""A real federation on this machine: TLS, authenticated nodes, Flower's own programs, started and ended by the test."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import tomli_w

pytest.importorskip("flwr")

from fedet import check, config, experiment
from fedet.engine import loop
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError
from fedet.flower import bundle, keys, local
from fedet.storage.run_folder import RunFolder

ARCHS = ("cnn-w0.5", "resnet8-w0.0625")
NODES = [f'client-ids="0-1" arch="{ARCHS[0]}"', f'client-ids="2-3" arch="{ARCHS[1]}"']


def make_app(place, method="fedet", **changes):
    """An app folder with a small federation of four clients; the method may be (file, class, code) of its own."""
    bundle.new(place)
    if not isinstance(method, str):
        file, name, code = method
        (place / file).write_text(code, encoding="utf-8")
        method = f"{place / file}:{name}"
    asked = {
        "method.name": method,
        **check.quick(config.method_class(method)),
        "data.clients": 4,
        "models.assignment": "given",
        "models.given": [ARCHS[0], ARCHS[0], ARCHS[1], ARCHS[1]],
        "run.rounds": 2,
        **changes,
    }
    loaded = config.load(check.SMALL, asked)
    text = tomli_w.dumps(loaded.model_dump(mode="json", exclude_none=True))
    (place / "fedet.toml").write_text(text.replace(f"{place}/", ""), encoding="utf-8")  # code moves with the app
    return loaded


def simulated(loaded, place):
    built = experiment.build(loaded, place / "cache")
    folder = RunFolder(place / "simulated")
    folder.path.mkdir(parents=True)
    folder.begin(built, "")
    loop.run(built, folder, InProcess(built))
    return folder


def only_run(app):
    (folder,) = (p for p in (app / "runs").iterdir() if p.name != ".cache")
    return RunFolder(folder)


class Program:
    """A program of ours, its lines, and its end."""

    def __init__(self, *arguments, cwd):
        self.lines = []
        command = [sys.executable, "-m", "fedet", *map(str, arguments)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)

    def until(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = next((m for line in list(self.lines) if (m := re.search(pattern, line))), None)
            if found:
                return found
            assert self.process.poll() is None or time.monotonic() < end, "".join(self.lines)
            time.sleep(0.1)
        raise AssertionError(f"no '{pattern}' in:\n{''.join(self.lines)}")

    def family(self):
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]


def listening(processes):
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_a_federation_with_tls_and_authenticated_nodes(tmp_path):
    app = tmp_path / "app"
    loaded = make_app(app)
    up = Program("flower", "up", app, *(word for node in NODES for word in ("--node", node)), cwd=tmp_path)
    strangers = local.LocalFederation(app, lambda who, text: heard.setdefault(who, []).append(text))
    heard = {}
    try:
        up.until("ready; in another terminal", 180)
        place = tomllib.loads((app / ".flwr" / "config.toml").read_text(encoding="utf-8"))["superlink"]["local"]
        strangers.port = int(place["address"].rpartition(":")[2])
        private, _ = keys.node_key(tmp_path / "elsewhere", "stranger")
        strangers.start_node("unregistered", "client-id=0", private)
        wrong, _, _ = keys.certificates(tmp_path / "elsewhere", ["127.0.0.1"])
        strangers.start_node("deceived", "client-id=1", private, wrong)

        run = subprocess.run(
            [sys.executable, "-m", "fedet", "flower", "run", str(app), "--json"], capture_output=True, text=True, timeout=400
        )
        assert run.returncode == 0, run.stderr + "".join(up.lines)
        assert json.loads(run.stdout)["status"] == "finished:completed"
        assert "round 2" in run.stderr

        family = up.family()
        assert len(family) >= 4  # the SuperLink, two SuperNodes, and what they start
        assert listening(family) == {"127.0.0.1"}
        assert "".join(up.lines).count("Activated node_id") == 2  # neither stranger came in
        assert refused(heard["unregistered"], strangers.processes["unregistered"])
        assert any("certificate" in line.lower() or "ssl" in line.lower() for line in heard["deceived"]), heard["deceived"]
    finally:
        strangers.stop(3)
        family = up.family()
        up.process.send_signal(signal.SIGINT)
        code = up.process.wait(180)
    assert code == 0
    assert "".join(up.lines).rstrip().endswith("stopped")
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    ours, theirs = only_run(app), simulated(loaded, tmp_path)
    assert check.same(ours.restore()["state"], theirs.restore()["state"])
    weights = [(folder.path / "best" / "model.safetensors").read_bytes() for folder in (ours, theirs)]
    assert weights[0] == weights[1]
    assert (ours.path / "report.html").is_file()


def refused(lines, process):
    return process.poll() is not None or any(re.search(r"auth|denied|40[13]|register", line, re.I) for line in lines)


@pytest.mark.slow
def test_a_failed_run_says_so(tmp_path):
    app = tmp_path / "app"
    make_app(app, **{"flower.wait": 1.0})
    with local.up(app, [], lambda who, text: None):
        run = subprocess.run(
            [sys.executable, "-m", "fedet", "flower", "run", str(app)], capture_output=True, text=True, timeout=400
        )
    assert run.returncode == 1
    assert "finished:failed" in run.stderr
    assert "fix it and resubmit; the run resumes" in run.stderr
    assert "0 clients are connected after 1 s" in run.stderr
    assert Path(app / ".flwr" / "tls" / "server.key").stat().st_mode & 0o077 == 0


def test_without_flower_the_command_says_what_to_install(tmp_path):
    hide = (
        "import importlib.util as u, sys; find = u.find_spec; u.find_spec = lambda n, *a: n != 'flwr' and find(n, *a) or None"
    )
    code = f"{hide}\nsys.argv = ['fedet', 'flower', 'up']\nfrom fedet.cli import main\nmain()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert run.returncode == 2
    assert "pip install 'fedet[flower]'" in run.stderr


def test_an_app_folder_is_thin_and_never_written_over(tmp_path):
    app = bundle.new(tmp_path / "My App")
    assert sorted(p.name for p in app.iterdir()) == [
        ".gitignore",
        "README.md",
        "apps.py",
        "fedet.toml",
        "pyproject.toml",
        "task.py",
    ]
    assert 'name = "my-app"' in (app / "pyproject.toml").read_text(encoding="utf-8")
    config.load(app / "fedet.toml")
    with pytest.raises(ConfigError, match="is not empty"):
        bundle.new(app)


def test_clients_are_dealt_to_nodes():
    assert local.split_clients(30, 2) == ['client-ids="0-14"', 'client-ids="15-29"']
    assert local.split_clients(2, 5) == ['client-ids="0-0"', 'client-ids="1-1"']


def fedet(*arguments, cwd):
    command = [sys.executable, "-m", "fedet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=400)


def test_what_can_not_be_is_refused_before_anything_is_submitted(tmp_path):
    for arguments, code, text in (
        (("flower", "run", "."), 2, "is not an app folder: create one with `fedet flower new DIR`"),
        (("flower", "new", "app"), 0, ""),
        (("flower", "run", "app"), 2, "no federation was started in app"),
        (("flower", "run", "app", "--set", "run.ronds=3"), 2, "run.ronds is not a known key (did you mean 'rounds'?)"),
    ):
        done = fedet(*arguments, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert text in done.stderr
    (tmp_path / "app" / ".flwr").mkdir()
    gone = f'[superlink.local]\naddress = "127.0.0.1:{local.free_port()}"\n'
    (tmp_path / "app" / ".flwr" / "config.toml").write_text(gone, encoding="utf-8")
    done = fedet("flower", "run", "app", cwd=tmp_path)
    assert done.returncode == 1
    assert "start the federation with `fedet flower up`" in done.stderr
