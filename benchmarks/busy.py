"""Where a run's time goes: a sampled profile of all its processes, and how busy the cores are.

pip install py-spy
python benchmarks/busy.py --data-dir DIR
python benchmarks/busy.py digits --rounds 30 --json busy.json

The first two rounds don't count. In the first half of the others cores are watched: they are busy for as long as the system
charges time to the run's processes. In the second half stacks are sampled, 100 a second. One column has the shares of
samples in which a Python thread was running, the other those of the cores' time: a student's step runs on all threads that
the run has for it, of which a sample sees one. Processes are not stopped for a sample; stacks that were torn by that, and
don't reach back to a program's or a thread's beginning, are left out.
"""

import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from common import Clock, hardware, table, write

import fedet
from fedet import Callbacks

WARM = 2
STUDENT = "student's steps"
BEGINNING = r"<module> \(|\b_bootstrap \("
KINDS = (
    ("clients' training", r"\b_run_client \(.*\bfit \("),
    ("teachers' predictions", r"\b_predict_public \(.*\bpredict \("),
    ("evaluation", r"\b_predict \(.*\bpredict \("),
    (STUDENT, r"\b_distil \(.*\bfit \("),
)


def kind_of(stack):
    """Which of the four kinds of work a stack, outermost frame first, belongs to."""
    return next((name for name, pattern in KINDS if re.search(pattern, stack)), "everything else")


def place_of(stack):
    """The last three functions of the package that are in a stack, innermost first."""
    frames = re.findall(r"(?:^|;)([^;]*?) \(fedet/([^;]*?):\d+\)", stack)
    return " < ".join(f"{function} ({file})" for function, file in frames[:-4:-1]) or stack.split(";")[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="cifar10-desk")
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--data-dir")
    parser.add_argument("--json")
    args = parser.parse_args()
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if spy is None:
        sys.exit("this needs py-spy: pip install py-spy")
    machine, found = hardware(), {}
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "stacks.txt"
        command = [spy, "record", "--pid", str(os.getpid()), "--subprocesses", "--nonblocking", "--format", "raw"]
        command += ["--duration", "3600", "--output", str(raw)]

        def after_round(entry):
            if entry["round"] == WARM:
                found["clock"] = Clock()
            elif entry["round"] == (WARM + args.rounds) // 2:
                found["time"] = found["clock"].read()
                found["spy"] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            elif entry["round"] == args.rounds - 1:
                found["spy"].send_signal(signal.SIGINT)
                found["said"] = found["spy"].communicate()[1].decode()

        callbacks = Callbacks(round=after_round)
        done = fedet.run(args.config, rounds=args.rounds, data_dir=args.data_dir, out=scratch, callbacks=callbacks)
        threads = tomllib.loads((done.run_dir / "config.toml").read_text(encoding="utf-8"))["run"]["threads"]
        if not raw.is_file():
            sys.exit(f"py-spy wrote nothing: {found['said'].strip()}")
        lines = [line.rpartition(" ")[::2] for line in raw.read_text(encoding="utf-8").splitlines()]
    counts, rest, torn = collections.Counter(), collections.Counter(), 0
    for stack, count in lines:
        if not re.search(BEGINNING, stack):
            torn += int(count)
            continue
        counts[kind_of(stack)] += int(count)
        if kind_of(stack) == "everything else":
            rest[place_of(stack)] += int(count)
    print(f"{torn / (torn + sum(counts.values())):.1%} of the stacks were torn")
    report(args, machine, counts, rest, found["time"], threads)


def report(args, machine, counts, rest, time, threads):
    """Shares of samples and of the cores' time, the largest of what is left, and how busy the cores were."""
    total, busy = sum(counts.values()), time["cpu"] / time["wall"] / os.cpu_count()
    cores = {name: count * (threads if name == STUDENT else 1) for name, count in counts.items()}
    all_cores = sum(cores.values())
    rows = [[name, f"{count / total:.1%}", f"{cores[name] / all_cores:.1%}"] for name, count in counts.most_common()]
    table(["what", "of samples", "of the cores' time"], rows)
    print(f"\n{os.cpu_count()} cores busy {busy:.1%} of {time['wall']:.1f} s; the largest of everything else:")
    for stack, count in rest.most_common(12):
        print(f"  {count / total:.2%}  {stack}")
    shares = {name: round(count / total, 4) for name, count in counts.items()}
    of_cores = {name: round(count / all_cores, 4) for name, count in cores.items()}
    write(args.json, {"hardware": machine, "shares": shares, "of_cores": of_cores, "busy": round(busy, 4), "seconds": time})


if __name__ == "__main__":
    main()
