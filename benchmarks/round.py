"""Seconds per round of fedet's methods and of the bare loop, alternating round by round in one run.

python benchmarks/round.py --data-dir DIR
python benchmarks/round.py --data-dir DIR --methods fedavg,fedprox,scaffold --rounds 6
python benchmarks/round.py --data-dir DIR --workload resnet18 --rounds 5 --json round.json

Nothing is evaluated. The ratio compares medians; below 1 fedet is faster than plain PyTorch with nothing around it.
"""

import argparse
import tempfile
from pathlib import Path

import plain
import torch
from bare import Bare
from common import WORKLOADS, Clock, hardware, ratio, show, spread, summary, table, workload, write

import fedet
from fedet import Callbacks, config, experiment
from fedet.storage.run_folder import cache_folder

WARM = 2
"""Rounds at the start that don't count."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "fedet-benchmarks", help="runs, decoded data")
    parser.add_argument("--json")
    args = parser.parse_args()
    machine = hardware()
    results = [measure(args.workload, m, args.rounds, args.data_dir, args.out) for m in args.methods.split(",")]
    print_table(results)
    write(args.json, {"workload": args.workload, "hardware": machine, "results": results})


def measure(name, method, rounds, data_dir, out):
    """One method, its rounds interleaved with the bare loop's."""
    source = workload(name, method, rounds + WARM + 1, data_dir)  # the last round is evaluated and left out
    bare = start_bare(name, source, out)
    generator, fedet_times, bare_times = torch.Generator().manual_seed(0), [], []
    begin, clock = Clock(), Clock()

    def after_round(entry):
        fedet_times.append(clock.read())
        clock.restart()
        bare.round(generator)
        bare_times.append(clock.read())
        clock.restart()

    try:
        fedet.run(source, out=out, callbacks=Callbacks(round=after_round))
        total = begin.read()
    finally:
        bare.close()
    ours, theirs = summary(fedet_times[WARM:-1]), summary(bare_times[WARM:-1])
    pairs = [a["wall"] / b["wall"] for a, b in zip(fedet_times[WARM:-1], bare_times[WARM:-1], strict=True)]
    return {
        "method": method,
        "params": bare.params,
        "fedet": ours,
        "bare": theirs,
        "ratio": {"wall": ratio(ours, theirs), "cpu": ratio(ours, theirs, "cpu"), "pairs": spread(pairs)},
        "start_seconds": round(fedet_times[0]["wall"] - ours["wall"]["median"], 2),
        "total_seconds": round(total["wall"], 1),
    }


def start_bare(name, source, out):
    """The bare loop on the same examples that fedet's clients hold."""
    built = experiment.build(config.load(source), cache_folder(out))
    large, parts = built.env.large, [built.data.client(k).rows for k in range(len(built.clients))]
    assert {len(rows) for rows in parts} == {384}, "every client has 384 images"
    dataset = built.data.dataset
    images = torch.cat([dataset.batch(rows) for rows in parts])
    labels = torch.cat([dataset.labels[rows] for rows in parts])
    bare = Bare(name, images, labels, list(torch.arange(len(labels)).split(384)), source["method"]["client"])
    assert bare.params == built.env.model_cache.num_params(large) == plain.size(plain.MODELS[name]())
    return bare


def print_table(results):
    """One line per method."""
    head = ["method", "parameters", "fedet s", "bare s", "fedet cpu s", "bare cpu s", "ratio", "cpu ratio", "start s"]
    rows = [
        [
            r["method"],
            f"{r['params']:,}",
            show(r["fedet"]["wall"]),
            show(r["bare"]["wall"]),
            show(r["fedet"]["cpu"]),
            show(r["bare"]["cpu"]),
            r["ratio"]["wall"],
            r["ratio"]["cpu"],
            r["start_seconds"],
        ]
        for r in results
    ]
    table(head, rows)


if __name__ == "__main__":
    main()
