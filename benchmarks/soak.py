"""A soak: hours of rounds with drop-outs, bad updates, attackers and killed workers; memory and open files must stay flat.

python benchmarks/soak.py --minutes 120
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from common import hardware, table, write

from fedet import config
from fedet.core import Payload
from fedet.engine import loop, session
from fedet.engine.callbacks import Callbacks
from fedet.experiment import with_fixed_threads
from fedet.storage import checkpoint
from fedet.storage.run_folder import RunFolder
from fedet.workers.pool import Pool

SMALL = {
    "base": "digits",
    "models": {"server": {"name": "cnn", "width": 2.0}},
    "method": {"client": {"steps": 4}, "server": {"steps": 8}},
}
LEARNED = 0.5
"""Test accuracy that a run of some minutes exceeds; chance is 0.1."""
SAMPLE = 1.0
"""Seconds between two readings of memory and open files."""


class Spoiling:
    """A transport on which some replies arrive with numbers that are not finite."""

    def __init__(self, transport, share, seed):
        self.transport, self.share, self.rng, self.spoilt = transport, share, random.Random(seed), 0

    def start_round(self, number):
        """The clients that are available."""
        return self.transport.start_round(number)

    def send(self, number, tasks):
        """Deliver the tasks, and spoil some of the replies."""
        delivery = self.transport.send(number, tasks)
        replies = {k: self._spoil(up) if self.rng.random() < self.share else up for k, up in delivery.replies.items()}
        return replace(delivery, replies=replies)

    def _spoil(self, up):
        self.spoilt += 1
        groups = {
            name: {key: torch.full_like(t, torch.nan) if t.is_floating_point() else t for key, t in group.items()}
            for name, group in up.tensors.items()
        }
        return Payload(groups, up.scalars)


def own_memory(process):
    """Bytes of a process without the files that it maps: how much of these counts as its own depends on other programs."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:
            fields = {words[0]: int(words[1]) for words in map(str.split, file) if words[-1] == "kB"}
        return (fields["Pss_Anon:"] + fields["Pss_Shmem:"]) << 10
    except (OSError, KeyError):  # not Linux, or an old kernel
        return process.memory_full_info().uss


class Watch:
    """Reads memory and open files of this process and its workers, and kills a worker every so often."""

    def __init__(self, pool, every):
        self.pool, self.every, self.readings, self.killed, self.over = pool, every, [], 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self):
        rng, began, next_kill = random.Random(0), time.monotonic(), time.monotonic() + self.every
        while not self.over.wait(SAMPLE):
            pids = [os.getpid(), *(worker.process.pid for worker in self.pool.workers)]
            with contextlib.suppress(psutil.Error, OSError):  # one is being replaced
                members = [psutil.Process(pid) for pid in pids]
                memory = [own_memory(member) for member in members]
                seen = sum(memory) >> 20, memory[0] >> 20, members[0].num_fds()
                self.readings.append((time.monotonic() - began, *seen))
            if time.monotonic() > next_kill:
                next_kill += self.every
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids[1:]), signal.SIGKILL)
                    self.killed += 1

    def stop(self):
        """Stop reading."""
        self.over.set()
        self.thread.join()

    def quarters(self):
        """Median memory in MB, that of this process, and open files in each quarter of the time."""
        length = max(1, len(self.readings) // 4)
        parts = [self.readings[start : start + length] for start in range(0, 4 * length, length)]
        return [tuple(statistics.median(r[column] for r in part) for column in (1, 2, 3)) for part in parts if part]


def settings(args):
    """The configuration: as many rounds as there is time for."""
    changes = {
        "method.name": args.method,
        "run.rounds": 10**6,
        "run.budget_seconds": 60 * args.minutes,
        "run.dropout": 0.2,
        "run.workers": args.workers,
        "run.eval_stored_every": 0,
        "run.robust": "on",  # without defences the attackers hold the model at chance, and most rounds are lost
        "run.attack": {"kind": args.attack, "share": 0.1},
    }
    return with_fixed_threads(config.load(SMALL, changes))


def soak(args, root):
    """Run for so many minutes, and return what was seen."""
    cfg = settings(args)
    experiment = session.build(cfg, root / "cache", Callbacks())
    folder, finished = RunFolder.new(root / "runs", cfg), []
    with folder.locked(), contextlib.closing(Pool(experiment, root / "cache", args.workers)) as pool:
        folder.begin(experiment, "soak")
        transport, watch = Spoiling(pool, 0.05, cfg.run.seed), Watch(pool, 60 * args.kill_every)
        pooled = replace(experiment, env=replace(experiment.env, predictor=pool))
        loop.run(pooled, folder, transport, lambda entry: finished.append(entry["round"]))
        watch.stop()
        replaced = len(pool.replacements)
    records = folder.metrics()
    return {
        "rounds": len(records),
        "lost_rounds": sum(record["lost"] for record in records),
        "missing_rounds": len(set(finished) ^ {record["round"] for record in records}),
        "checkpoint": checkpoint.load(folder.checkpoint)[0]["round"],
        "failures": sum(len(record["failures"]) for record in records),
        "spoilt": transport.spoilt,
        "workers_killed": watch.killed,
        "workers_replaced": replaced,
        "quarters": watch.quarters(),
        "best_accuracy": round(max(record.get("accuracy", 0.0) for record in records), 4),
    }


def problems(seen):
    """What must not be."""
    quarters = seen["quarters"]
    if seen["missing_rounds"] or seen["checkpoint"] != seen["rounds"]:
        yield "a finished round was lost"
    if seen["lost_rounds"] > 0.01 * seen["rounds"]:
        yield f"{seen['lost_rounds']} of {seen['rounds']} rounds had no usable reply or a state that was not finite"
    if seen["best_accuracy"] < LEARNED:
        yield f"nothing was learned: the best accuracy is {seen['best_accuracy']:.2f}"
    for column, what in enumerate(("memory", "the main process's memory")):
        if quarters[-1][column] > 1.1 * quarters[1][column] + 20:
            yield f"{what} grew from {quarters[1][column]} to {quarters[-1][column]} MB"
    if quarters[-1][2] > quarters[1][2] + 4:
        yield f"open files grew from {quarters[1][2]} to {quarters[-1][2]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="how long")
    parser.add_argument("--kill-every", type=float, default=10, help="minutes between two kills of a worker")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--method", default="fedet", help="the method")
    parser.add_argument("--attack", default="scale", help="what one client in ten does")
    parser.add_argument("--json", help="write what was seen to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        seen = soak(args, Path(root))
    table(
        ("quarter", "memory, MB", "of it the main process, MB", "open files"),
        [(k + 1, *quarter) for k, quarter in enumerate(seen["quarters"])],
    )
    table(("what", "number"), [(key.replace("_", " "), value) for key, value in seen.items() if key != "quarters"])
    found = list(problems(seen))
    print("; ".join(found) or "memory and open files are flat, and no finished round was lost")
    write(args.json, {"hardware": hardware(), "seen": seen})
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
