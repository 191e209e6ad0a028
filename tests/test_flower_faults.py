"""What happens to real machines: killed nodes, killed servers, late ones, cut cables, large messages. Minutes each."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from test_flower_local import ARCHS, make_app, only_run, simulated

from fedet import check
from fedet.flower import local, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLOW = """
import json, os, random, time
from dataclasses import dataclass
from pathlib import Path
from fedet.methods.{module} import {name}

PLAN = Path({plan!r})


@dataclass(frozen=True)
class Slow({name}):
    def local(self, down, client):
        plan = json.loads(PLAN.read_text()) if PLAN.exists() else {{}}
        (PLAN.parent / f"began-{{client.round}}-{{client.id}}").touch()
        chance = random.Random(f"{{client.round}}/{{client.id}}").random()
        if chance < plan.get("fail", 0) / 2:
            os._exit(9)
        if chance < plan.get("fail", 0):
            raise RuntimeError("out of luck")
        if [client.round, client.id] in plan.get("slow", []):
            time.sleep(plan["seconds"])
        return super().local(down, client)
"""


class Trial:
    """An app whose clients are slow or unlucky as a plan says, and a federation that the test disturbs."""

    def __init__(self, place, nodes, module="fedavg", name="FedAvg", **changes):
        self.place, self.app, self.nodes = place, place / "app", nodes
        self.plan = place / "plan.json"
        code = SLOW.format(module=module, name=name, plan=str(self.plan))
        self.config = make_app(self.app, ("slow.py", "Slow", code), **{"run.cohort": 4, "flower.wait": 120.0, **changes})
        self.heard = []
        self.local = local.LocalFederation(self.app, lambda who, text: self.hear(who, text))

    def hear(self, who, text):
        self.heard.append((time.monotonic(), who, text))
        print(f"{time.strftime('%H:%M:%S')} {who} | {text}", flush=True)

    def start(self, database=False):
        self.local.start_superlink(self.place / "link.db" if database else None)
        self.keys = {}
        for number, settings in enumerate(self.nodes):
            self.node(number, settings)

    def node(self, number, settings):
        name = f"node{number}"
        self.keys[name] = self.keys.get(name) or self.local.register(name)
        self.local.start_node(name, settings, self.keys[name])

    def submit(self, **changes):
        """Submit and follow in the background; `status` is there when it is over."""
        self.number, self.status = runs.submit(self.app, changes, None, self.local.home), None

        def follow():
            with contextlib.suppress(Exception):
                self.status = runs.follow(self.number, None, self.local.home, self.hear)

        self.follower = threading.Thread(target=follow, daemon=True)
        self.follower.start()

    def finish(self, seconds=300):
        self.follower.join(seconds)
        assert not self.follower.is_alive(), "the run does not end"
        return self.status

    def began(self, number, client, seconds=120):
        until((self.place / f"began-{number}-{client}").exists, seconds)

    def planned(self, **plan):
        self.plan.write_text(json.dumps(plan), encoding="utf-8")

    def metrics(self):
        return only_run(self.app).metrics()

    def same_as_simulated(self):
        with contextlib.suppress(FileNotFoundError):
            self.plan.unlink()
        return check.same(only_run(self.app).restore()["state"], simulated(self.config, self.place).restore()["state"])


def until(ready, seconds):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def kill_family(process):
    """As a power cut does: at once, and everyone."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def find(process, word):
    return next(p for p in psutil.Process(process.pid).children(recursive=True) if any(word in part for part in p.cmdline()))


@pytest.fixture
def trial(tmp_path):
    trials = []

    def make(nodes, *args, **changes):
        trials.append(Trial(tmp_path, nodes, *args, **changes))
        return trials[-1]

    yield make
    for each in trials:
        each.local.stop()


TWO = ['client-ids="0-1"', 'client-ids="2-3"']


def test_a_supernode_killed_in_mid_round(trial):
    t = trial(TWO, **{"run.rounds": 3, "flower.round_timeout": 200.0})
    t.planned(slow=[[2, 2]], seconds=20)
    t.start()
    t.submit()
    t.began(2, 2)
    kill_family(t.local.processes["node1"])
    began = time.monotonic()
    until(lambda: len(t.metrics()) >= 2, 200)
    print("round 2 ended", round(time.monotonic() - began, 1), "s after the kill")
    assert t.finish() == "finished:completed"
    first, second, third = t.metrics()
    print("failures", [e["failures"] for e in (first, second, third)])
    assert first["failures"] == []
    assert sorted(f["client"] for f in second["failures"]) == [2, 3]
    assert {f["kind"] for f in second["failures"]} <= {"unavailable", "crashed"}
    assert second["replied"] == [0, 1]
    assert third["replied"] == [0, 1]


def test_a_client_process_killed_in_mid_round(trial):
    t = trial(TWO, **{"run.rounds": 3, "flower.round_timeout": 200.0})
    t.planned(slow=[[2, 2]], seconds=60)
    t.start()
    t.submit()
    t.began(2, 2)
    find(t.local.processes["node1"], "flwr-clientapp").kill()
    assert t.finish() == "finished:completed"
    _, second, third = t.metrics()
    print("failures", second["failures"])
    assert {(f["client"], f["kind"]) for f in second["failures"]} == {(2, "crashed"), (3, "crashed")}
    assert third["failures"] == []


@pytest.mark.parametrize(("module", "name"), [("fedavg", "FedAvg"), ("scaffold", "Scaffold")])
def test_a_server_app_killed_and_submitted_again(trial, module, name):
    t = trial(TWO, module, name, **{"run.rounds": 3})
    t.planned(slow=[[2, 2]], seconds=15)
    t.start()
    t.submit()
    t.began(2, 2)
    find(t.local.processes["superlink"], "flwr-serverapp").kill()
    status = t.finish()
    print("killed:", status)
    assert status != "finished:completed"
    t.submit()
    assert t.finish() == "finished:completed"
    assert [e["round"] for e in t.metrics()] == [1, 2, 3]
    assert t.same_as_simulated()


def test_a_superlink_killed_started_again_and_the_run_submitted_again(trial):
    t = trial(TWO, "scaffold", "Scaffold", **{"run.rounds": 3})
    t.planned(slow=[[2, 2]], seconds=15)
    t.start(database=True)
    t.submit()
    t.began(2, 2)
    kill_family(t.local.processes["superlink"])
    time.sleep(5)
    t.local.start_superlink(t.place / "link.db")
    t.follower.join(60)
    t.submit()
    assert t.finish(400) == "finished:completed"
    assert [e["round"] for e in t.metrics()] == [1, 2, 3]
    assert t.same_as_simulated()


def test_a_node_that_joins_late_takes_part(trial):
    t = trial(TWO[:1], **{"run.rounds": 6, "flower.clients": 2})
    t.start()
    t.submit()
    until(lambda: (t.app / "runs").exists() and t.metrics(), 120)
    t.node(1, TWO[1])
    assert t.finish() == "finished:completed"
    entries = t.metrics()
    print("replied", [e["replied"] for e in entries])
    assert entries[0]["replied"] == [0, 1]
    assert entries[-1]["replied"] == [0, 1, 2, 3]


def test_a_fifth_of_the_work_failing_for_ten_rounds(trial):
    five = {"data.clients": 5, "models.given": [ARCHS[0]] * 3 + [ARCHS[1]] * 2, "run.cohort": 5}
    t = trial([f"client-id={k}" for k in range(5)], **five, **{"run.rounds": 10, "flower.min_replies": 2})
    t.planned(fail=0.2)
    t.start()
    t.submit()
    assert t.finish(900) == "finished:completed"
    entries = t.metrics()
    failures = [(e["round"], f["client"], f["kind"]) for e in entries for f in e["failures"]]
    print(len(failures), "of 50 failed:", failures)
    assert len(entries) == 10
    assert 3 <= len(failures) <= 20
    assert {kind for _, _, kind in failures} <= {"raised", "crashed"}
    assert not any(e["lost"] for e in entries)


def test_messages_of_vgg19(trial):
    vgg = {"models.server": {"name": "vgg19", "width": 1.0}, "models.feature_width": 512, "models.representation_width": 128}
    t = trial(TWO, **vgg, **{"run.rounds": 1, "run.cohort": 2, "method.client.steps": 1, "method.client.batch": 4})
    t.start()
    t.submit()
    assert t.finish(600) == "finished:completed"
    (entry,) = t.metrics()
    print("bytes up per client", entry["bytes_up"] // 2, "seconds", entry["seconds"])
    assert len(entry["replied"]) == 2
    assert entry["bytes_up"] // 2 > 80_000_000
    assert t.same_as_simulated()


NETS = {"link": "10.77.0.1", "one": "10.77.0.2", "two": "10.77.0.3"}


@contextlib.contextmanager
def three_hosts():
    """Three network namespaces on one bridge, which only they can reach."""
    tag = f"f{os.getpid() % 10000}"
    names = {host: f"{tag}{host}" for host in NETS}
    ip = lambda *words: subprocess.run(["ip", *words], check=True)  # noqa: E731
    try:
        ip("netns", "add", f"{tag}hub")
        ip("-n", f"{tag}hub", "link", "add", "hub", "type", "bridge")
        ip("-n", f"{tag}hub", "link", "set", "hub", "up")
        for host, address in NETS.items():
            ip("netns", "add", names[host])
            ip("-n", names[host], "link", "add", "eth", "type", "veth", "peer", "name", f"to-{host}", "netns", f"{tag}hub")
            ip("-n", f"{tag}hub", "link", "set", f"to-{host}", "master", "hub", "up")
            ip("-n", names[host], "address", "add", f"{address}/24", "dev", "eth")
            ip("-n", names[host], "link", "set", "eth", "up")
            ip("-n", names[host], "link", "set", "lo", "up")
        yield names, lambda host, way: ip("-n", f"{tag}hub", "link", "set", f"to-{host}", way)
    finally:
        for name in (*names.values(), f"{tag}hub"):
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.skipif(getattr(os, "geteuid", lambda: None)() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_a_host_cut_off_for_a_round_comes_back(tmp_path):
    with three_hosts() as (names, cable):
        script = tmp_path / "inside.py"
        script.write_text(INSIDE.format(tests=str(Path(__file__).parent), place=str(tmp_path), names=names), encoding="utf-8")
        inside = subprocess.Popen(["ip", "netns", "exec", names["link"], sys.executable, str(script)], start_new_session=True)
        try:
            until((tmp_path / "began-2-2").exists, 200)
            cable("two", "down")
            print(time.strftime("%H:%M:%S"), "cut", flush=True)
            until(lambda: (tmp_path / "rounds-2").exists(), 200)
            cable("two", "up")
            print(time.strftime("%H:%M:%S"), "mended", flush=True)
            assert inside.wait(500) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(inside.pid, signal.SIGTERM)
                inside.wait(30)
    entries = only_run(tmp_path / "app").metrics()
    for e in entries:
        print(
            "round",
            e["round"],
            "replied",
            e["replied"],
            "failures",
            [(f["client"], f["kind"], f["why"]) for f in e["failures"]],
        )
    assert {2, 3} <= set(entries[0]["replied"])
    assert {2, 3} <= {f["client"] for f in entries[1]["failures"]}
    assert len(entries) == 8
    assert any({2, 3} <= set(e["replied"]) for e in entries[2:])  # it came back


INSIDE = textwrap.dedent("""
    import signal, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from test_flower_faults import TWO, Trial
    from fedet.flower import local

    place, names = Path({place!r}), {names!r}
    t = Trial(place, TWO, **{{"run.rounds": 8, "flower.round_timeout": 45.0, "flower.min_replies": 2}})
    t.local = local.LocalFederation(t.app, t.hear, "10.77.0.1")
    t.local.prefixes = {{"node0": ["ip", "netns", "exec", names["one"]], "node1": ["ip", "netns", "exec", names["two"]]}}
    t.planned(slow=[[2, 2], *([n, 0] for n in range(3, 9))], seconds=5)
    try:
        t.start()
        t.submit()
        while t.follower.is_alive():
            time.sleep(0.2)
            done = len(t.metrics()) if (t.app / "runs").exists() else 0
            (place / f"rounds-{{done}}").touch()
        print(subprocess.run(["ss", "-tln"], capture_output=True, text=True).stdout)
        sys.exit(0 if t.status == "finished:completed" else 1)
    finally:
        t.local.stop()
""")
