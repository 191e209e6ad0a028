"""A durability campaign: runs that are killed, starved and tampered with must resume to the bits of an undisturbed run.

    python benchmarks/faults.py --kills 100

Every trial is a process forked from this one, so that torch is imported once; where it has workers, these are processes of
their own, as in any run. A kill is `SIGKILL`, at a moment drawn from the seed: at any time, at one of the system calls of which
writing a checkpoint consists, or of a worker. After the trial the number of processes and of files in shared memory that it
left behind is counted. The other faults are done once for each method.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil
import torch
from common import hardware, table, write

from fedet import check, config
from fedet.engine import session
from fedet.engine.callbacks import Callbacks
from fedet.errors import FedetError
from fedet.storage import checkpoint, metrics
from fedet.storage.run_folder import RunFolder
from fedet.workers import buffers

METHODS = ("fedet", "scaffold", "dsfl", "fedgkt")
MARK = "FEDET_FAULTS"
"""In the environment of every process of a trial."""
WRITING = ("replace", "link", "fsync", "unlink", "open")
"""System calls at which a process kills itself; a checkpoint is written by several of each."""
HANG = 600.0
"""Seconds after which a trial that has not ended counts as hanging."""
NOBODY = 65534


class Trials:
    """Runs of one configuration in forked processes, in a folder of their own."""

    def __init__(self, method, root, rounds):
        changes = {"method.name": method, "run.rounds": rounds, **check.quick(config.method_class(method))}
        self.config, self.method, self.root = config.load(check.SMALL, changes), method, root / method
        self.memory = Path(tempfile.mkdtemp(prefix="faults-", dir=buffers.SHARED_MEMORY))
        self.calls = self.root / "calls"
        self.root.mkdir(parents=True)
        session.build(self.config, self.root / ".cache", Callbacks())  # imports what a run needs, before the forks
        began = time.monotonic()
        try:
            self.finish(self.start("whole", 0, lambda: count_calls(self.calls)))
        except AssertionError as error:
            sys.exit(f"the undisturbed run of {method} failed: {error}\n{self.said('whole')}")
        self.seconds = time.monotonic() - began
        self.expected = bits(self.root / "whole")
        self.writes = int(self.calls.read_text())

    def start(self, name, workers, prepare=lambda: None, folder=None):
        """Fork a process that starts the run, or resumes it; returns its id."""
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            os.setsid()
            log = os.open(self.root / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ[MARK] = str(self.memory)
            buffers.SHARED_MEMORY = self.memory
            session.report.write_run = lambda folder: None  # figures take longer than the run
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            prepare()
            session.run_or_resume(self.config, folder or self.root, name, None, None, workers=workers)
            code = 0
        except FedetError as error:
            print(f"fedet: {error}", flush=True)
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def finish(self, pid, expected=(0,)):
        """Wait for a trial; returns its exit code, which must be one of those."""
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                assert code in expected, f"exit code {code} instead of {expected}"
                return code
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError(f"hangs: no end after {HANG:g} s")

    def said(self, name):
        """What a trial said."""
        path = self.root / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def same(self, name):
        """Whether a run ended with the bits of the undisturbed one; otherwise what differs."""
        found = bits(self.root / name)
        return [key for key in self.expected if found.get(key) != self.expected[key]]

    def left(self):
        """Processes and files in shared memory that are still there after a while."""
        end = time.monotonic() + 60
        while time.monotonic() < end and (processes(self.memory) or any(self.memory.iterdir())):
            time.sleep(0.1)
        return len(processes(self.memory)), sum(1 for _ in self.memory.rglob("*"))

    def interrupted(self, name, rng):
        """A run that was killed when it had at least two checkpoints and was not at its end."""
        pid = self.start(name, 0, lambda: die_at(rng.randrange(int(0.6 * self.writes), int(0.85 * self.writes))))
        self.finish(pid, (-signal.SIGKILL,))
        return RunFolder(self.root / name)

    def copy(self, folder, name):
        """A copy of an interrupted run, to be spoilt."""
        return RunFolder(shutil.copytree(folder.path, self.root / name))


def bits(folder):
    """Digests of all that must be equal of two runs: metrics without times, ledger, checkpoint, client states, models."""
    out = {}
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in metrics.read(folder / "metrics.jsonl")]
    out["metrics"] = digest(json.dumps(records, sort_keys=True).encode())
    out["ledger"] = digest((folder / "ledger.jsonl").read_bytes())
    fields, meta = checkpoint.load(folder / "last" / "checkpoint.safetensors")
    fields.pop("seconds")
    out["checkpoint"] = digest(plain(fields))
    for name in sorted(meta["clients"].values()):
        out[name] = digest(plain(checkpoint.load(folder / "clients" / name)[0]))
    for which in ("best", "last"):
        path = folder / which / "model.safetensors"
        if path.is_file():
            out[which] = digest(path.read_bytes())
    return out


def plain(value):
    """Nested data as bytes."""
    if isinstance(value, torch.Tensor):
        return (
            str((value.dtype, tuple(value.shape))).encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(plain, value))
    return repr(value).encode()


def digest(data):
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def processes(memory):
    """The processes of a trial that are running."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(memory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def at_calls(act):
    """Call `act` with a number before each of the system calls that writing consists of."""
    number = 0

    def watched(real):
        def call(*args, **kwargs):
            nonlocal number
            act(number)
            number += 1
            return real(*args, **kwargs)

        return call

    for name in WRITING:
        setattr(os, name, watched(getattr(os, name)))


def count_calls(path):
    """Write down how many of these calls there are in an undisturbed run."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    at_calls(lambda number: os.pwrite(descriptor, str(number + 1).encode(), 0))


def die_at(moment):
    """Kill this process at one of the calls."""
    at_calls(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == moment else None)


def kill_once(trials, name, workers, kind, rng):
    """Start or resume a run and kill it; returns whether it was killed before it ended."""
    if kind == "writing":
        moment = rng.randrange(trials.writes)
        return trials.finish(trials.start(name, workers, lambda: die_at(moment)), (0, -signal.SIGKILL)) != 0
    pid = trials.start(name, workers)
    wait = rng.random() * trials.seconds * (3 if workers else 1)
    if kind == "worker":
        end = time.monotonic() + HANG
        while time.monotonic() < end and not (found := [p for p in processes(trials.memory) if p.pid != pid]):
            time.sleep(0.05)
        time.sleep(wait)
        with contextlib.suppress(psutil.Error, IndexError):
            rng.choice([p for p in processes(trials.memory) if p.pid != pid] or found).kill()
        trials.finish(pid)
        return True
    time.sleep(wait)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return trials.finish(pid, (0, -signal.SIGKILL)) != 0


def kills(all_trials, number, seed, until):
    """Kill so many runs; every one must resume to the bits of the undisturbed run."""
    rows, done = [], 0
    while done < number and time.monotonic() < until:
        rng = random.Random(f"{seed}/{done}")
        trials, workers = all_trials[done % len(all_trials)], 2 * (done // len(all_trials) % 2)
        kind = rng.choice(("moment", "writing", "worker") if workers else ("moment", "writing", "writing"))
        name = f"kill-{done}"
        try:
            hit = kill_once(trials, name, workers, kind, rng)
            if kind != "worker" and rng.random() < 0.3:  # the resumed run is killed, too
                kill_once(trials, name, workers, "moment", rng)
            trials.finish(trials.start(name, workers))
            problem = ", ".join(trials.same(name)) or None
        except (AssertionError, FedetError, OSError) as error:
            hit, problem = True, f"{error}; {trials.said(name)[-300:]}"
        left = trials.left()
        rows.append({"method": trials.method, "workers": workers, "kind": kind, "hit": hit, "problem": problem, "left": left})
        if not problem:
            shutil.rmtree(trials.root / name)
        done += 1
    return rows


def full_disk(trials, folder, rng):
    """No file may become larger than half a checkpoint: what a full disk and a quota do, without either."""
    most = folder.checkpoint.stat().st_size // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    code = trials.finish(trials.start(folder.path.name, 0, limit), (1,))
    return f"exit code {code}: {last_line(trials, folder)}"


def no_permission(trials, folder, rng):
    """The folder can't be written to."""
    if os.getuid() == 0:
        for path in (trials.root, *trials.root.parents):
            if path.stat().st_uid == 0 and path != Path("/") and not path.stat().st_mode & 1:
                path.chmod(path.stat().st_mode | 0o755)
    for path in (folder.path, *folder.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def as_nobody():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    code = trials.finish(trials.start(folder.path.name, 0, as_nobody), (1,))
    for path in (folder.path, *folder.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return f"exit code {code}: {last_line(trials, folder)}"


def terminated(trials, folder, rng):
    """SIGTERM in the middle."""
    pid = trials.start(folder.path.name, 0)
    time.sleep(rng.random() * trials.seconds / 2)
    os.kill(pid, signal.SIGTERM)
    return f"exit code {trials.finish(pid, (0, 130))}"


def second_process(trials, folder, rng):
    """Another process resumes the same folder while one does."""
    first = trials.start(folder.path.name, 0, lambda: time.sleep(0.2))
    codes = []
    while not codes or (1 not in codes and len(codes) < 5 and psutil.pid_exists(first)):
        codes.append(trials.finish(trials.start(folder.path.name, 0), (0, 1, 99)))
    trials.finish(first, (0, 1))
    return f"exit codes {codes}"


def torn(trials, folder, rng):
    """The newest checkpoint is cut off."""
    os.truncate(folder.checkpoint, rng.randrange(folder.checkpoint.stat().st_size))
    return "the one before is used"


def tampered(trials, folder, rng):
    """One bit of the newest checkpoint is turned."""
    data = bytearray(folder.checkpoint.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    folder.checkpoint.write_bytes(bytes(data))
    return "the one before is used"


def last_line(trials, folder):
    return (trials.said(folder.path.name).strip().splitlines() or [""])[-1][:100]


FAULTS = (full_disk, no_permission, terminated, second_process, torn, tampered)


def faults(trials, rng):
    """Each other fault once, in a copy of an interrupted run, which is then resumed."""
    rows, interrupted = [], trials.interrupted("interrupted", rng)
    for fault in FAULTS:
        folder = trials.copy(interrupted, fault.__name__)
        name, what, problem = fault.__name__, "", None
        try:
            what = fault(trials, folder, rng)
            trials.finish(trials.start(name, 0))
            said = trials.said(name)
            problem = ", ".join(trials.same(name)) or ("Traceback" in said and said[-500:]) or None
            if fault in (torn, tampered):
                warned = json.loads((folder.path / "result.json").read_text())["warnings"]
                problem = problem or (None if any("checkpoint before it" in text for text in warned) else "nothing was said")
        except (AssertionError, FedetError, OSError) as error:
            problem = f"{error}; {trials.said(name)[-300:]}"
        rows.append({"method": trials.method, "fault": name, "what": what, "problem": problem, "left": trials.left()})
    return rows + [deleted(trials, interrupted, path) for path in files_of(interrupted)]


def files_of(folder):
    """One file of each kind that a run consists of."""
    names = ["metrics.jsonl", "ledger.jsonl", "env.json", "split.npz", "result.json", "config.toml", "best/model.safetensors"]
    names += ["last/checkpoint.safetensors", "last/previous-checkpoint.safetensors"]
    listed = sorted(checkpoint.load(folder.checkpoint)[1]["clients"].values())
    names += [f"clients/{name}" for name in listed[:1]]
    return [name for name in names if (folder.path / name).is_file()]


def deleted(trials, interrupted, path):
    """Without one of its files a run resumes to the same bits, or says in a sentence what is missing."""
    name = f"without-{path.replace('/', '-')}"
    folder = trials.copy(interrupted, name)
    (folder.path / path).unlink()
    problem, what = None, ""
    try:
        code = trials.finish(trials.start(name, 0), (0, 1, 2))
        different = trials.same(name) if code == 0 else []
        warned = json.loads((folder.path / "result.json").read_text())["warnings"] if code == 0 else []
        told = [text for text in [*warned, trials.said(name)] if Path(path).stem in text]
        what = "refused in a sentence" if code else f"same bits{', and told' if told else ''}"
        if different:
            what = f"told; {', '.join(different)} differ"
            problem = None if told else f"{', '.join(different)} differ and nothing was said"
        if "Traceback" in trials.said(name) or (code and not told and path != "config.toml"):
            problem = trials.said(name)[-500:] or "nothing was said"
    except (AssertionError, FedetError, OSError) as error:
        problem = f"{error}; {trials.said(name)[-300:]}"
    return {"method": trials.method, "fault": f"without {path}", "what": what, "problem": problem, "left": trials.left()}


def campaign(number, seed, root, methods=METHODS, rounds=6, minutes=None, others=True):
    """All trials; returns the rows of the kills and those of the other faults."""
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * (minutes or 10**6)
    trials = [Trials(method, root, rounds) for method in methods]
    try:
        other = [row for one in trials for row in faults(one, random.Random(f"{seed}/{one.method}"))] if others else []
        return kills(trials, number, seed, until), other
    finally:
        for one in trials:
            shutil.rmtree(one.memory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many runs are killed")
    parser.add_argument("--minutes", type=float, help="stop killing after so many minutes and report how many there were")
    parser.add_argument("--methods", default=",".join(METHODS), help="of which methods")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--no-faults", action="store_true", help="kills only")
    parser.add_argument("--json", help="write the trials to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        killed, other = campaign(
            args.kills, args.seed, Path(root), args.methods.split(","), args.rounds, args.minutes, not args.no_faults
        )
    if other:
        table(("method", "fault", "outcome"), [(r["method"], r["fault"], r["problem"] or r["what"]) for r in other])
    for row in killed:
        if row["problem"]:
            print(f"NOT THE SAME: {row}")
    good, hit = sum(not r["problem"] for r in killed), sum(r["hit"] for r in killed)
    left = [sum(r["left"][k] for r in [*killed, *other]) for k in range(2)]
    print(f"{good} of {len(killed)} kills resumed to the same bits ({hit} hit before the run had ended)")
    print(f"{sum(not r['problem'] for r in other)} of {len(other)} other faults resumed to the same bits or were told")
    print(f"left behind: {left[0]} processes, {left[1]} files in shared memory")
    write(args.json, {"hardware": hardware(), "kills": killed, "faults": other})
    sys.exit(0 if good == len(killed) and not any(r["problem"] for r in other) and left == [0, 0] else 1)


if __name__ == "__main__":
    main()
