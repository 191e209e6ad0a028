"""fedet, the bare loop and other simulators on exactly the same work (W1), alternating job by job, with their ratios.

python benchmarks/peers.py --data-dir DIR
python benchmarks/peers.py --data-dir DIR --python OTHER/bin/python --pfllib CHECKOUT --repeats 3 --json peers.json
python benchmarks/peers.py --data-dir DIR --only fedet,bare,blazefl --blazefl CHECKOUT --blazefl-python PYTHON

Peers: Flower on Ray (`flwr[simulation]`), pfl, FedLab, and PFLlib and BlazeFL from checkouts. They run under `--python`, by
default this one, as their pins may conflict with fedet's. One that is not installed is reported as missing. BlazeFL can have
an interpreter of its own with torch, numpy and tqdm: it asks for Python 3.13, and is made for builds without the global lock,
where it trains clients in threads; elsewhere it gets processes. Each system's versions are printed below the table.
A job is a fresh program from start to end; its rounds after the first count as steady state.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from common import hardware, show, spread, table, workload, write
from drive import CLIENTS, IMAGES, ROUND, SYSTEMS

from fedet import config, experiment
from fedet.storage.run_folder import cache_folder

HERE = Path(__file__).resolve().parent
NEEDS = {"flower": ["flwr", "ray"], "pfl": ["pfl"], "fedlab": ["fedlab"], "blazefl": ["torch", "numpy", "tqdm"]}
CHECKOUTS = ("pfllib", "blazefl")
CALM = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--python", default=sys.executable, help="where the peers are installed")
    parser.add_argument("--pfllib", help="a checkout of PFLlib")
    parser.add_argument("--blazefl", help="a checkout of BlazeFL")
    parser.add_argument("--blazefl-python", help="what BlazeFL runs under, if not --python")
    parser.add_argument("--only", help="some of " + ",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a job is ended")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "fedet-benchmarks", help="runs, decoded data")
    parser.add_argument("--json")
    args = parser.parse_args()
    machine, options = hardware(), prepare(args)
    chosen = [name for name in SYSTEMS if not args.only or name in args.only.split(",")]
    missing = {name: why for name in chosen if (why := reason(name, args))}
    jobs = {name: [] for name in chosen if name not in missing}
    for _ in range(args.repeats):
        for name in jobs:
            if name in missing:
                continue
            try:
                jobs[name].append(job(name, interpreter(name, args), args.rounds, options, args.limit))
                print(f"{name}: {jobs[name][-1]['job']['wall']:.1f} s", file=sys.stderr, flush=True)
            except Failed as error:
                missing[name] = str(error)
    results = {name: condense(found) for name, found in jobs.items() if found}
    under = {name: versions(interpreter(name, args)) for name in results}
    report(results, missing, under)
    found = {"hardware": machine, "rounds": args.rounds, "versions": under, "results": results, "missing": missing}
    write(args.json, found)


def interpreter(name, args):
    """What a system runs under."""
    if name in ("fedet", "bare"):
        return sys.executable
    return args.blazefl_python or args.python if name == "blazefl" else args.python


def reason(name, args):
    """Why a system can't be measured, or None."""
    if name in CHECKOUTS and not getattr(args, name):
        return f"give a checkout with --{name}"
    python = interpreter(name, args)
    code = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    done = subprocess.run([python, "-c", code, *NEEDS.get(name, [])], capture_output=True, check=False)
    return f"needs {' and '.join(NEEDS[name])} under {Path(python).name}" if done.returncode else None


def versions(python):
    """Those that a time depends on."""
    code = """
import importlib.metadata, platform, sysconfig
free = ", free-threading" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(f"Python {platform.python_version()}{free}, torch {importlib.metadata.version('torch')}")
"""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def prepare(args):
    """Write W1's partition to files for all systems: fedet's own clients, their images normalised."""
    source = workload("w1", "fedavg", args.rounds, args.data_dir)
    built = experiment.build(config.load(source), cache_folder(args.out))
    parts = [built.data.client(k).rows for k in range(CLIENTS)]
    assert {len(rows) for rows in parts} == {IMAGES}
    folder = args.out / "w1"
    folder.mkdir(parents=True, exist_ok=True)
    rows = torch.cat(parts)
    images, labels = built.data.dataset.batch(rows).numpy(), built.data.dataset.labels[rows].numpy()
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    (folder / "config.json").write_text(json.dumps(source))
    if args.pfllib:
        _files_for_pfllib(folder, images, labels)
    options = {"config": str(folder / "config.json"), "out": str(args.out), "files": str(folder / "system")}
    checkouts = {name: str(Path(path).resolve()) for name in CHECKOUTS if (path := getattr(args, name))}
    return options | checkouts | {"folder": str(folder)}


def _files_for_pfllib(folder, images, labels):
    (folder / "system").mkdir(exist_ok=True)
    for part, count in (("train", IMAGES), ("test", 1)):
        (folder / "dataset" / "w1" / part).mkdir(parents=True, exist_ok=True)
        for k in range(CLIENTS):
            start = k * IMAGES
            data = {"x": images[start : start + count], "y": labels[start : start + count]}
            np.savez(folder / "dataset" / "w1" / part / f"{k}.npz", data=data)


class Failed(Exception):
    """A job that did not finish its rounds."""


def job(name, python, rounds, options, limit):
    """One program from start to end: its wall and processor seconds, and when its rounds ended."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import drive; drive.main(*sys.argv[2:])"
    command = [python, "-W", "ignore", "-c", code, str(HERE), name, options["folder"], str(rounds), json.dumps(options)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | CALM | {"PYTHONPATH": paths}
        )
        family, alarm = Family(process.pid), threading.Timer(limit, process.kill)
        alarm.start()
        ends = [time.perf_counter() for line in process.stdout if line.strip() == ROUND]
        code = process.wait()
        alarm.cancel()
        wall = time.perf_counter() - start
        if code or len(ends) < rounds:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
            raise Failed(f"ended with {code} after {len(ends)} rounds and {wall:.0f} s: {last[:200]}")
    return {
        "job": {"wall": wall, "cpu": family.seconds()},
        "first": ends[0] - start,
        "steady": np.diff(ends).tolist(),
    }


class Family:
    """Processor time of a program and all that it starts, sampled five times a second while it runs."""

    def __init__(self, pid):
        self.seen = {}
        self.root = psutil.Process(pid)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self):
        while self.root.is_running() and self.root.status() != psutil.STATUS_ZOMBIE:
            try:
                for process in [self.root, *self.root.children(recursive=True)]:
                    self.seen[process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:
                pass
            time.sleep(0.2)

    def seconds(self):
        """The sum; what a process did in its last fifth of a second is not counted."""
        self.thread.join()
        return sum(self.seen.values())


def condense(jobs):
    """Spreads over the jobs, and over all rounds but each job's first."""
    return {
        "steady": spread([seconds for j in jobs for seconds in j["steady"]]),
        "job": spread([j["job"]["wall"] for j in jobs]),
        "job_cpu": spread([j["job"]["cpu"] for j in jobs]),
        "first_round": spread([j["first"] for j in jobs]),
    }


def report(results, missing, under):
    """A table with each system's time in units of fedet's."""
    ours = results.get("fedet")

    def times(r, key):
        return f"{r[key]['median'] / ours[key]['median']:.2f}" if ours else ""

    rows = [
        [name, show(r["steady"]), times(r, "steady"), show(r["job"]), times(r, "job"), show(r["job_cpu"]), times(r, "job_cpu")]
        for name, r in results.items()
    ]
    table(["system", "round s", "/ fedet", "job s", "/ fedet", "job cpu s", "/ fedet"], rows)
    for name, found in under.items():
        print(f"{name}: {found}")
    for name, why in missing.items():
        print(f"{name}: no figures ({why})")


if __name__ == "__main__":
    main()
