"""Time a round on texts as it is, and with every text padded to 256 word pieces.

python benchmarks/padding.py
python benchmarks/padding.py text-desk --method fedavg --data-dir DIR

Needs the data folder text/ (FEDET_DATA or --data-dir). One process, one thread; seconds are the processor's, so that other
programs on the machine do not count. Both runs give the same models up to rounding; the round timed is the second.
"""

import argparse
import tempfile
import time

import torch

import fedet
from fedet import Callbacks, train
from fedet.models.text import TextBody

MAX_LENGTH = 256
ONE_PROCESS = {"run.workers": 0, "run.threads": 1, "run.eval_every": 1, "run.checkpoint_every": 10**6}


def seconds(config, method, data_dir):
    """Processor seconds of the second round, evaluation included; in the first, models are made."""
    ends = []
    with tempfile.TemporaryDirectory() as scratch:
        fedet.run(
            config,
            method=method,
            rounds=3,  # the last round of a run evaluates and writes more than the others
            data_dir=data_dir,
            out=scratch,
            callbacks=Callbacks(round=lambda entry: ends.append(time.process_time())),
            **ONE_PROCESS | {"data.text.max_length": MAX_LENGTH},
        )
    return ends[1] - ends[0]


def pad_everything():
    TextBody.forward = lambda self, ids: self.read(ids.to(torch.int64), self.lengths(ids))
    train._by_length = lambda model, data, rows: None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="text-desk")
    parser.add_argument("--method", default="fedet")
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    trimmed = seconds(args.config, args.method, args.data_dir)
    print(f"{args.config}, {args.method}: a round takes {trimmed:.1f} s", flush=True)
    pad_everything()
    padded = seconds(args.config, args.method, args.data_dir)
    print(f"padded to {MAX_LENGTH}: {padded:.1f} s, {padded / trimmed:.1f} times as long")


if __name__ == "__main__":
    main()
