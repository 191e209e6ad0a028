"""A worker process of a pool: builds the experiment once, then does clients' work and predictions as it is told.

It reads one JSON line per job from standard input and answers with one on standard output; tensors travel through shared
buffers. When its parent is gone, input ends, and so does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedet import runtime


def main() -> None:
    """Serve until input ends; with a control line, make copies of this process before."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's code prints must not mix with the answers

    with runtime.no_garbage_collection(freeze=True):
        import torch

        from fedet import experiment, train  # noqa: F401  # what every worker needs, before there are others
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        _make_copies(socket.socket(fileno=int(sys.argv[1])), answers.fileno())
    setup = sys.stdin.readline()
    if setup:  # else the parent has changed its mind
        _serve(json.loads(setup), answers)


def _make_copies(control: socket.socket, answers: int) -> None:
    """For each pair of ends that is handed over, a process that goes on from here with them as input and output."""
    with control:
        while ends := socket.recv_fds(control, 1, 2)[1]:
            alone = len(os.listdir("/proc/self/task")) == 1  # a copy has no other threads, but whatever locks they held
            if not os.fork():
                control.close()
                os.dup2(ends[0], 0)
                os.dup2(ends[1], answers)
                for end in ends:
                    os.close(end)
                os.write(answers, f"{os.getpid()}\n".encode())
                if not alone:
                    os.dup2(answers, 1)
                    os.execv(sys.executable, [sys.executable, "-m", "fedet.workers.worker"])
                np.random.seed()
                return
            for end in ends:
                os.close(end)


def _serve(setup: dict[str, Any], answers: TextIO) -> None:
    from fedet import config
    from fedet import experiment as experiments
    from fedet.workers.buffers import SharedBuffer

    jobs = sys.stdin
    experiment = experiments.build(config.Config.model_validate(setup["config"]), Path(setup["cache"]))
    folder = Path(setup["folder"])
    inbox, outbox, public = (SharedBuffer(path) for path in (folder / "in", folder / "out", folder.parent / "view"))

    def tell(answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)

    def attempt(work: Callable[..., dict[str, Any]], *given: Any) -> bool:
        """Tell what comes of it; what is raised is reported in the parent, where someone can see it."""
        try:
            tell(work(experiment, *given, outbox))
        except Exception as error:
            tell({"error": [type(error).__name__, f"{error}"]})
            return False
        return True

    tell({"ready": True})
    for line in jobs:
        job = json.loads(line)
        if "predict" in job:
            if "tensors" in job:  # else it is the model that was asked last
                model = _builder(experiment, job["predict"], inbox.read(job["tensors"], copy=False)["model"])
            attempt(_predict, model, job) if "part" in job else attempt(_predict_public, model, job, public)
            continue
        sent: dict[str, Any] = {}
        if attempt(_run_client, job, inbox, sent) and job["predict_after"]:
            model = _builder(experiment, experiment.clients[job["client"]].arch, sent)
            while (line := jobs.readline()) and (asked := json.loads(line))["public"]:
                attempt(_predict_public, model, asked, public)
    _clean_up(folder)


def _clean_up(folder: Path) -> None:
    """A parent that was killed leaves its buffers in memory: whoever sees that it is gone removes them."""
    from fedet.workers.buffers import remove_folder

    remove_folder(folder)
    with contextlib.suppress(OSError):
        if not any(path.is_dir() for path in folder.parent.iterdir()):  # the last of the workers
            remove_folder(folder.parent)


def _run_client(experiment: Any, job: dict[str, Any], inbox: Any, sent: dict[str, Any], outbox: Any) -> dict[str, Any]:
    """A client's work; the weights that it sends stay in `sent`, for predictions."""
    from fedet.core import Payload

    tensors = inbox.read(job["tensors"], copy=False)  # the next message comes after the answer to this one
    down = Payload({name: tensors[f"down/{name}"] for name in job["down"]}, job["scalars"])
    client = experiment.client(job["client"], job["round"], {name: tensors[f"state/{name}"] for name in job["state"]})
    up = experiment.method.local(down, client)
    groups = {f"up/{name}": group for name, group in up.tensors.items()}
    groups |= {f"state/{name}": group for name, group in client.state.items()}
    written = outbox.write(groups)
    sent.update(up.tensors.get("model", {}))
    return {"tensors": written, "up": list(up.tensors), "scalars": dict(up.scalars), "state": list(client.state)}


def _builder(experiment: Any, arch: str, weights: Any) -> Callable[[], Any]:
    """Builds the model when it is first asked for, and not again for the next chunk."""
    return cache(lambda: experiment.env.build(arch, weights))


def _predict_public(experiment: Any, model: Callable[[], Any], job: dict[str, Any], public: Any, outbox: Any) -> dict[str, Any]:
    """A model's logits on some rows of the public inputs, as this round sees them."""
    from fedet.data import Inputs

    return _logits(model, Inputs(public.read(job["public"], copy=False)["view"]["all"]), job, outbox)


def _predict(experiment: Any, model: Callable[[], Any], job: dict[str, Any], outbox: Any) -> dict[str, Any]:
    """A model's logits on some rows of the test or validation examples."""
    return _logits(model, experiment.data.test if job["part"] == "test" else experiment.data.val, job, outbox)


def _logits(model: Callable[[], Any], data: Any, job: dict[str, Any], outbox: Any) -> dict[str, Any]:
    import torch

    from fedet import train

    return {"tensors": outbox.write({"logits": {"all": train.predict(model(), data, torch.arange(*job["rows"]))}})}


if __name__ == "__main__":
    main()
