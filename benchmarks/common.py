"""What the benchmarks share: workloads, the machine, clocks and memory of a process and its children, tables."""

import contextlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

CIFAR = {
    "name": "cifar10",
    "clients": 100,
    "partition": "equal",
    "alpha": 0.1,
    "split": [38400, 21000, 600],  # few test images: the last round of a run is always evaluated
    "public_size": 6000,
}
"""100 clients with exactly 384 images each and a class mix from Dir(0.1)."""
QUIET = {"eval_every": 10**6, "eval_all_every": 10**6, "checkpoint_every": 10**6, "workers": 2, "threads": 2, "cohort": 10}
CNN = {"clients": ["cnn"], "server": {"name": "cnn", "label": "net"}, "feature_width": 50, "representation_width": 92}
RESNET18 = {
    "clients": [{"name": "resnet18", "stem": "imagenet"}],
    "server": {"name": "resnet18", "stem": "imagenet", "label": "net"},
    "feature_width": 512,
    "representation_width": 128,
}
WORKLOADS = {
    "w1": {"data": CIFAR, "models": CNN, "method": {"client": {"lr": 0.05, "batch": 64, "steps": 30}}, "run": QUIET},
    "resnet18": {"data": CIFAR, "models": RESNET18, "method": {"client": {"lr": 0.01, "batch": 64, "steps": 6}}, "run": QUIET},
}
"""W1 of the performance notes (conv 3-6-5, pool, conv 6-16-5, pool, linear 400-120-100-84-50-50-92-10), and one with 11M."""


def workload(name, method, rounds, data_dir=None):
    """The configuration of one of the workloads."""
    plain = json.loads(json.dumps(WORKLOADS[name]))
    plain["method"]["name"] = method
    plain["run"]["rounds"] = rounds
    if data_dir:
        plain["data"]["dir"] = data_dir
    return {"name": name, **plain}


def hardware():
    """What a measurement depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.is_available(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor():
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    return next(line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name"))


def family(apart=()):
    """All descendants of this process but those in `apart`."""
    return [process for process in psutil.Process().children(recursive=True) if process.pid not in apart]


def processor_time(apart=()):
    """Processor seconds of this process and all its descendants so far."""
    ended = psutil.Process().cpu_times()
    total = time.process_time() + ended.children_user + ended.children_system
    for process in family(apart):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += sum(process.cpu_times()[:2])
    return total


class Clock:
    """Wall and processor seconds since it was started."""

    def __init__(self, apart=()):
        self.apart = apart
        self.restart()

    def restart(self):
        """Start again from zero."""
        self.wall, self.cpu = time.perf_counter(), processor_time(self.apart)

    def read(self):
        """Both, so far."""
        return {"wall": time.perf_counter() - self.wall, "cpu": processor_time(self.apart) - self.cpu}


class Peak:
    """Peak memory of this process and all its descendants together, shared memory counted once."""

    def __init__(self, apart=()):
        self.apart, self.most, self.over = apart, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self):
        while not self.over.wait(0.25):
            total = 0
            for process in [psutil.Process(), *family(self.apart)]:
                with contextlib.suppress(psutil.Error):
                    held = process.memory_full_info()
                    total += getattr(held, "pss", held.rss)  # Linux knows each process's share of shared memory
            self.most = max(self.most, total)

    def stop(self):
        """The peak in MB."""
        self.over.set()
        self.thread.join()
        return self.most >> 20


def spread(values):
    """Median and quartiles."""
    values = sorted(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)], "n": len(values)}


def summary(readings):
    """Spread of wall and of processor time."""
    return {kind: spread([r[kind] for r in readings]) for kind in ("wall", "cpu")}


def ratio(one, other, kind="wall"):
    """The quotient of two medians."""
    return round(one[kind]["median"] / other[kind]["median"], 3)


PRINTED = []
"""The tables that this program has printed."""


def table(head, rows):
    """Print aligned columns."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    PRINTED.append({"head": cells[0], "rows": cells[1:]})
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(s):
    """A spread as text."""
    return f"{s['median']:.3f} [{s['quartiles'][0]:.3f}, {s['quartiles'][1]:.3f}]"


def command():
    """How this program was called, without the machine's paths and without `--json FILE`."""
    words, given = ["python", f"benchmarks/{Path(sys.argv[0]).name}"], iter(sys.argv[1:])
    for word in given:
        option, equals, value = word.rpartition("=")
        if word == "--json":
            next(given, None)
        elif option != "--json":
            words.append(f"{option}{equals}DIR" if Path(value).is_absolute() else word)
    return " ".join(words)


def write(path, result):
    """Write the measurements, the tables that were printed and the command to a file, if one is given."""
    if path:
        result = {"command": command(), "tables": PRINTED, **result}
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
