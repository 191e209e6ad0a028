"""Time a round on texts as it is, and with every text padded to `max_length`: python benchmarks/padding.py [CONFIG] [METHOD].

Needs FEDET_DATA with the folder text/. One process, one thread; both rounds give the same model up to rounding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from fedet import config, engine, experiment, train, transport
from fedet.models.text import TextBody
from fedet.state import ClientStore

MAX_LENGTH = 256


def seconds(source: str, method: str, cache: Path) -> dict[str, float]:
    asked = {"method.name": method, "data.text.max_length": MAX_LENGTH, "run.threads": 1, "run.eval_every": 1}
    ready = experiment.build(config.load(source, asked), cache)
    snapshot = engine.Snapshot(ready.method.init(ready.env))
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(2):  # the first builds modules and warms up
            entry, _, snapshot = engine.play(ready, ClientStore(Path(scratch)), snapshot, transport.in_process)
    return entry["seconds"]


def pad_everything() -> None:
    TextBody.forward = lambda self, ids: self.read(ids.to(torch.int64), self.lengths(ids))
    train._by_length = lambda model, data, rows: None


def main() -> None:
    source, method = ([*sys.argv[1:], "text-desk", "fedet"] if len(sys.argv) < 3 else sys.argv[1:])[:2]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        cut = seconds(source, method, Path(cache))
        pad_everything()
        padded = seconds(source, method, Path(cache))
    print(f"{source}, {method}, a round on one thread, seconds")
    for part in ("clients", "server", "evaluate", "round"):
        ratio = padded[part] / cut[part] if cut[part] > 0 else float("nan")
        print(f"{part:>9}  cut {cut[part]:7.2f}  padded to {MAX_LENGTH} {padded[part]:7.2f}  ratio {ratio:5.2f}")


if __name__ == "__main__":
    main()
