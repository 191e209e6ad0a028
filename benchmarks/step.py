"""One training step of fedet's models and of the same layers in plain PyTorch, alternating.

python benchmarks/step.py
python benchmarks/step.py --models resnet18,vgg19 --threads 2 --repeats 9 --json step.json

Plain is contiguous, `nn.Conv2d` throughout, ReLU before pool, `torch.optim.SGD`. Batches are in memory, normalised.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import plain
import torch
from common import hardware, ratio, show, summary, table, write

from fedet import train
from fedet.models import build

SMALL = {"width": 0.125, "feature_width": 128, "representation_width": 64}


def of(features):
    """Options of a plain model for those of fedet's."""
    return {"features": features["feature_width"], "representation": features["representation_width"]} | (
        {"width": features["width"]} if "width" in features else {}
    )


MODELS = {
    "resnet18": (64, lambda: build("resnet18", stem="imagenet"), lambda: plain.resnet18()),
    "resnet8": (64, lambda: build("resnet8", stem="imagenet"), lambda: plain.resnet18(blocks=1)),
    "vgg19": (64, lambda: build("vgg19"), lambda: plain.vgg19()),
    "cnn": (64, lambda: build("cnn", feature_width=50, representation_width=92), lambda: plain.cnn()),
    "resnet18-desk": (32, lambda: build("resnet18", stem="imagenet", **SMALL), lambda: plain.resnet18(**of(SMALL))),
    "resnet8-desk": (32, lambda: build("resnet8", stem="imagenet", **SMALL), lambda: plain.resnet18(blocks=1, **of(SMALL))),
    "vgg19-desk": (32, lambda: build("vgg19", **SMALL), lambda: plain.vgg19(**of(SMALL))),
}
"""Batch, fedet's model, the plain one."""


class Batch:
    """The data of a step: always the same batch."""

    def __init__(self, size):
        self.x, self.y = torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))

    def __len__(self):
        return len(self.y)

    def batch(self, index):
        """These rows."""
        return self.x.index_select(0, index), self.y.index_select(0, index)


def timed(work):
    """Wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


@cache
def stepper(name, side, threads):
    """A function that takes n steps; made once in each process."""
    torch.set_num_threads(threads)
    size, ours, theirs = MODELS[name]
    data = Batch(size)
    if side == "fedet":
        mine = ours()
        return lambda n: train.fit(mine, data, train.Training(lr=0.001, batch=size, steps=n), seed=0)
    other = theirs()
    optimiser = torch.optim.SGD(other.parameters(), lr=0.001)

    def steps(n):
        for _ in range(n):
            index = torch.randperm(size)
            plain.step(other, optimiser, data.x[index], data.y[index])

    return steps


def block(name, side, threads, n):
    """Seconds per step of n steps."""
    steps = stepper(name, side, threads)
    return {kind: seconds / n for kind, seconds in timed(lambda: steps(n)).items()}


def measure(name, threads, repeats):
    """Alternate blocks of steps, each side in a process of its own: fedet's process settings must not affect plain PyTorch."""
    size, ours, theirs = MODELS[name]
    assert sum(p.numel() for p in ours().parameters()) == plain.size(theirs()), "the same layers"
    one = {"max_workers": 1, "mp_context": get_context("spawn")}
    with ProcessPoolExecutor(**one) as a, ProcessPoolExecutor(**one) as b:
        sides, found = {"fedet": a, "plain": b}, {"fedet": [], "plain": []}
        for side, pool in sides.items():
            pool.submit(block, name, side, threads, 2).result()
        once = b.submit(block, name, "plain", threads, 1).result()["wall"]
        n = max(1, min(50, int(0.4 / once)))
        for _ in range(repeats):
            for side, pool in sides.items():
                found[side].append(pool.submit(block, name, side, threads, n).result())
    mine, other = summary(found["fedet"]), summary(found["plain"])
    ratios = {"wall": ratio(mine, other), "cpu": ratio(mine, other, "cpu")}
    return {"model": name, "batch": size, "fedet": mine, "plain": other, "ratio": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    machine = hardware()
    results = [measure(name, args.threads, args.repeats) for name in args.models.split(",")]
    rows = [
        [r["model"], r["batch"], show(r["fedet"]["wall"]), show(r["plain"]["wall"]), r["ratio"]["wall"], r["ratio"]["cpu"]]
        for r in results
    ]
    table(["model", "batch", "fedet s", "plain s", "ratio", "cpu ratio"], rows)
    write(args.json, {"threads": args.threads, "hardware": machine, "results": results})


if __name__ == "__main__":
    main()
