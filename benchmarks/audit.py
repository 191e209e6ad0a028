"""Membership inference with and without DP-SGD, on digits that clients have overfitted on purpose.

python benchmarks/audit.py --json FILE
"""

import argparse
import tempfile

from common import hardware, table, write

import fedet
from fedet.study import audit

OVERFITTED = {"run.cohort": 4, "run.workers": 0, "method.client.steps": 60}
PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 1.0}


def measure(settings, rounds, cohorts, seed):
    """One run and its audit."""
    with tempfile.TemporaryDirectory() as scratch:
        result = fedet.run("digits", rounds=rounds, seed=seed, out=scratch, progress=False, **OVERFITTED | settings)
        return result, audit.of_run(result.run_dir, cohorts)


def row(name, attack):
    """One line of the table."""
    low, high = attack.auc_interval
    first, last = attack.tpr_interval
    auc, tpr = f"{attack.auc:.3f} ({low:.3f} to {high:.3f})", f"{attack.tpr:.1%} ({first:.1%} to {last:.1%})"
    return [name, attack.target, attack.attack, auc, tpr, attack.members]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="rounds before the attacked one")
    parser.add_argument("--cohorts", type=int, default=2, help="cohorts that are attacked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    attacks, costs = [], []
    for name, settings in {"no privacy": {}, "DP-SGD": PRIVATE}.items():
        result, found = measure(settings, args.rounds, args.cohorts, args.seed)
        attacks += [row(name, attack) for attack in found.attacks]
        spent = (result.summary.get("privacy") or {}).get("epsilon", {})
        costs.append([name, f"{result.best_accuracy:.3f}", *(_epsilon(spent, which) for which in ("median", "max"))])
    table(["run", "model", "attack", "AUC (95 %)", "true positives at 1 % false ones (95 %)", "members"], attacks)
    table(["run", "server's accuracy", "epsilon, median client", "largest epsilon"], costs)
    write(args.json, {"hardware": hardware()})


def _epsilon(spent, which):
    return f"{spent[which]:.1f}" if which in spent else "none"


if __name__ == "__main__":
    main()
