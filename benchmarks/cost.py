"""Processor seconds of a round, method by method, in turn: what Fed-ET+ costs beside Fed-ET.

python benchmarks/cost.py --data-dir DIR
python benchmarks/cost.py digits --methods fedet,fedet-plus,fedavg --blocks 5 --json FILE

Every block has some rounds of each method, one method after the other, so that what else the machine does meets all of them.
One core, no worker processes; nothing is evaluated in the rounds that count.
"""

import argparse
import tempfile

from common import Clock, hardware, show, spread, table, write

import fedet
from fedet import Callbacks

WARM = 2
"""Rounds at the start of a block that don't count."""
ALONE = {
    "run.workers": 0,
    "run.threads": 1,
    "run.eval_every": 10**6,
    "run.eval_all_every": 10**6,
    "run.checkpoint_every": 10**6,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="fashion-desk")
    parser.add_argument("--methods", default="fedet,fedet-plus")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a block that count")
    parser.add_argument("--data-dir")
    parser.add_argument("--json")
    args = parser.parse_args()
    machine, methods = hardware(), args.methods.split(",")
    found = {method: [] for method in methods}
    for block in range(args.blocks):
        for method in methods:
            found[method] += block_of(args.preset, method, block, args.rounds, args.data_dir)
    base = spread(found[methods[0]])["median"]
    rows = [[m, show(s := spread(found[m])), s["n"], f"{s['median'] / base:.2f}"] for m in methods]
    table(["method", "processor seconds of a round [quartiles]", "rounds", f"of {methods[0]}"], rows)
    write(args.json, {"hardware": machine, "preset": args.preset})


def block_of(preset, method, seed, rounds, data_dir):
    """Processor seconds of each round that counts."""
    seconds, clock = [], Clock()

    def after_round(entry):
        seconds.append(clock.read()["cpu"])
        clock.restart()

    with tempfile.TemporaryDirectory() as scratch:
        total = WARM + rounds + 1  # the last round is evaluated and left out
        settings = {"data.alpha": 0.1, **ALONE}
        fedet.run(
            preset, method=method, seed=seed, rounds=total, out=scratch, data_dir=data_dir, progress=False,
            callbacks=Callbacks(round=after_round), **settings,
        )  # fmt: skip
    return seconds[WARM:-1]


if __name__ == "__main__":
    main()
