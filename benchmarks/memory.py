"""Peak memory of a run, workers included, and growth of the main process.

python benchmarks/memory.py digits --rounds 1000
python benchmarks/memory.py cifar10-paper --rounds 2 --data-dir DIR
"""

import argparse
import json
import tempfile
import time

import psutil
from common import Peak

import fedet
from fedet import Callbacks
from fedet.config.sources import parse_assignment


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="digits")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--after", type=int, default=50, help="growth is measured from this round on")
    parser.add_argument("--data-dir")
    parser.add_argument("--set", action="append", default=[], help="a.b=c")
    parser.add_argument("--out", help="keep the run in this folder (by default it is deleted)")
    args = parser.parse_args()
    changes = dict(parse_assignment(text) for text in args.set)
    process, resident, seconds = psutil.Process(), [], []
    begin, peak = time.perf_counter(), Peak()

    def note(entry):
        resident.append(process.memory_info().rss)
        seconds.append(entry["seconds"])

    with tempfile.TemporaryDirectory() as scratch:
        fedet.run(
            args.config,
            rounds=args.rounds,
            data_dir=args.data_dir,
            out=args.out or scratch,
            callbacks=Callbacks(round=note),
            **changes,
        )
    start = resident[min(args.after, len(resident)) - 1]
    print(
        json.dumps(
            {
                "config": args.config,
                "rounds": len(resident),
                "seconds": round(time.perf_counter() - begin, 1),
                "seconds_per_round": [{k: round(v, 1) for k, v in s.items()} for s in seconds[:3]],
                "resident_mb": {
                    f"round {i}": resident[i - 1] >> 20 for i in (1, args.after, len(resident)) if i <= len(resident)
                },
                "growth_after": round(resident[-1] / start - 1, 4),
                "peak_mb_with_workers": peak.stop(),
            }
        )
    )


if __name__ == "__main__":
    main()
