"""How the cost of a round and memory grow with the number of clients, the cohort, the public data and the model.

python benchmarks/scale.py
python benchmarks/scale.py --only clients --json scale.json

Random images of 8x8 pixels, so that it runs anywhere; every client does the same work however many there are.
A slope is the exponent b of cost = a * x^b, fitted on logarithms: 0 is independent, 1 proportional.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
from common import Clock, hardware, show, summary, table, write

import fedet
from fedet import Callbacks

SWEEPS = {
    "clients": [100, 1_000, 10_000, 100_000],
    "cohort": [5, 10, 20, 40],
    "public": [500, 1_000, 2_000, 4_000],
    "width": [0.25, 0.5, 1.0, 2.0],
}
WARM = 2


def digits(examples=400_000, seed=0):
    """Random images with random labels."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (examples, 1, 8, 8), dtype=np.uint8), random.integers(0, 10, examples)


def config(sweep, value, rounds):
    """The run at one point of a sweep; client work is 5 steps of batch 4, which even a client of four examples can do."""
    public = value if sweep == "public" else 1_000
    method = "fedet" if sweep == "public" else "fedavg"
    width = value if sweep == "width" else 1.0
    return {
        "name": "scale",
        "data": {
            "name": f"{Path(__file__).resolve()}:digits",
            "options": {"examples": 410_000},
            "clients": value if sweep == "clients" else 100,
            "partition": "iid",
            "split": [400_000 - public, public, 10_000],
        },
        "models": {
            "clients": ["cnn"],
            "server": {"name": "cnn", "label": "large"} if sweep != "width" else {"name": "resnet8", "width": width},
            "feature_width": 64,
            "representation_width": 32,
        },
        "method": {"name": method, "client": {"lr": 0.01, "batch": 4 if sweep != "width" else 32, "steps": 5}}
        | ({"server": {"lr": 0.01, "batch": 32, "steps": public // 32}} if sweep == "public" else {}),
        "run": {
            "rounds": rounds,
            "cohort": value if sweep == "cohort" else 10,
            "selection": "uniform",
            "workers": 0,
            "threads": 1,
            "eval_every": 10**6,
            "eval_all_every": 10**6,
            "checkpoint_every": 10**6,
        },
    }


def point(sweep, value, rounds):
    """Run one point in this process and print what it took."""
    times, clock, sizes = [], Clock(), []

    def after_round(entry):
        times.append(clock.read())
        sizes.append(psutil.Process().memory_info().rss)
        clock.restart()

    with tempfile.TemporaryDirectory() as scratch:
        fedet.run(config(sweep, value, rounds + WARM + 1), out=scratch, callbacks=Callbacks(round=after_round))
    print(
        json.dumps(
            {
                "value": value,
                "round": summary(times[WARM:-1]),
                "start_seconds": round(times[0]["wall"], 2),
                "resident_mb": round(sizes[-2] / 2**20, 1),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1),
            }
        )
    )


def slope(points):
    """The exponent of the least-squares line through the logarithms of processor time."""
    x, y = (np.log([p["value"] for p in points]), np.log([p["round"]["cpu"]["median"] for p in points]))
    return round(float(np.polyfit(x, y, 1)[0]), 3)


def sweep(name, rounds):
    """All points of a sweep, each in a process of its own."""
    points = []
    for value in SWEEPS[name]:
        command = [sys.executable, __file__, "--point", json.dumps([name, value, rounds])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        points.append(json.loads(done.stdout.strip().splitlines()[-1]))
    growth = points[-1]["resident_mb"] - points[0]["resident_mb"]
    return {"sweep": name, "points": points, "slope": slope(points), "resident_growth_mb": round(growth, 1)}


def report(result):
    """The points of a sweep, and its slope."""
    rows = [
        [
            f"{p['value']:,}",
            show(p["round"]["wall"]),
            show(p["round"]["cpu"]),
            p["start_seconds"],
            p["resident_mb"],
            p["peak_mb"],
        ]
        for p in result["points"]
    ]
    table([result["sweep"], "round s", "cpu s", "first round s", "resident MB", "peak MB"], rows)
    growth = result["resident_growth_mb"]
    print(f"slope {result['slope']}, resident memory {growth:+} MB from the first to the last\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SWEEPS, action="append")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        point(*json.loads(args.point))
        return
    machine = hardware()
    results = []
    for name in args.only or SWEEPS:
        results.append(sweep(name, args.rounds))
        report(results[-1])
    write(args.json, {"hardware": machine, "results": results})


if __name__ == "__main__":
    main()
