"""Whether Fed-ET gives less weight to clients whose generalisation bound (Theorem 1) is larger.

python benchmarks/bound.py --data-dir DIR --json FILE
"""

import argparse
import tempfile

from common import hardware, table, write

import fedet
from fedet.study import bound

RUN = {"method": "fedet", "data.alpha": 0.1, "run.workers": 0, "run.threads": 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="fashion-desk")
    parser.add_argument("--rounds", type=int, default=None, help="rounds before the judged cohorts (default: the preset's)")
    parser.add_argument("--cohorts", type=int, default=5, help="cohorts that are judged")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data-dir")
    parser.add_argument("--json")
    args = parser.parse_args()
    rounds, rows = {} if args.rounds is None else {"rounds": args.rounds}, []
    for seed in map(int, args.seeds.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            result = fedet.run(args.preset, seed=seed, out=scratch, data_dir=args.data_dir, progress=False, **rounds, **RUN)
            found = bound.of_run(result.run_dir, args.cohorts)
        for term, known in found.correlations().items():
            rho, p = known or (float("nan"), float("nan"))
            rows.append(
                [
                    seed,
                    len(found.clients),
                    "the whole bound" if term == "total" else term.replace("_", " "),
                    f"{rho:+.2f}",
                    f"{p:.3f}",
                ]
            )
    table(["seed", "clients", "weight against", "Spearman's rho", "p"], rows)
    write(args.json, {"hardware": hardware(), "preset": args.preset})


if __name__ == "__main__":
    main()
