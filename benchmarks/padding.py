"""Time a round on texts as it is, and with every text padded to 256 word pieces.

python benchmarks/padding.py [CONFIG] [METHOD]

Needs FEDET_DATA with the folder text/. One process, one thread; seconds are the processor's, so that others' work on the
machine does not count. Both rounds end evaluated, and give the same models up to rounding.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from fedet import config, experiment, train
from fedet.engine import exchange, rounds
from fedet.models.text import TextBody
from fedet.storage.client_store import ClientStore

MAX_LENGTH = 256


def seconds(source: str, method: str, cache: Path) -> float:
    asked = {"method.name": method, "data.text.max_length": MAX_LENGTH, "run.threads": 1, "run.eval_every": 1}
    ready = experiment.build(config.load(source, asked), cache)
    start = rounds.Snapshot(ready.method.init(ready.env))
    for spec in ready.env.model_cache.names:
        ready.env.build(spec, ready.env.initial(spec))  # making modules is no part of a round
    with tempfile.TemporaryDirectory() as scratch:
        began = time.process_time()
        rounds.play(ready, ClientStore(Path(scratch)), start, exchange.in_process)
        return time.process_time() - began


def pad_everything() -> None:
    TextBody.forward = lambda self, ids: self.read(ids.to(torch.int64), self.lengths(ids))
    train._by_length = lambda model, data, rows: None


def main() -> None:
    source, method = (sys.argv[1:] + ["text-desk", "fedet"][len(sys.argv) - 1 :])[:2]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        cut = seconds(source, method, Path(cache))
        print(f"{source}, {method}: a round takes {cut:.1f} s", flush=True)
        pad_everything()
        padded = seconds(source, method, Path(cache))
    print(f"padded to {MAX_LENGTH}: {padded:.1f} s, {padded / cut:.1f} times as long")


if __name__ == "__main__":
    main()
