"""The main program of a pool's worker process: builds the experiment once, then runs clients and predictions.

It reads one JSON line per job from standard input and answers with one on standard output; tensors are passed through
shared buffers. It exits at the end of input, so also when its parent dies.
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

from fedet import runtime, tracebacks


def main() -> None:
    """Serve jobs until the end of input; with a control socket as argument, first fork copies of this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the user's code must not mix with the answers

    with runtime.no_garbage_collection(freeze=True):
        import torch

        from fedet import experiment, train  # noqa: F401  # imported once, before the forks
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        _fork_copies(socket.socket(fileno=int(sys.argv[1])), answers.fileno())
    setup = sys.stdin.readline()
    if setup:  # otherwise the parent no longer needs this worker
        _serve(json.loads(setup), answers)


def _fork_copies(control: socket.socket, answers: int) -> None:
    """Fork a worker for each pair of file descriptors received, which become its input and output."""
    with control:
        while fds := socket.recv_fds(control, 1, 2)[1]:
            single_threaded = len(os.listdir("/proc/self/task")) == 1  # a fork copies locks held by other threads
            if not os.fork():
                control.close()
                os.dup2(fds[0], 0)
                os.dup2(fds[1], answers)
                for fd in fds:
                    os.close(fd)
                os.write(answers, f"{os.getpid()}\n".encode())
                if not single_threaded:
                    os.dup2(answers, 1)
                    os.execv(sys.executable, [sys.executable, "-m", "fedet.workers.worker"])
                np.random.seed()
                return
            for fd in fds:
                os.close(fd)


def _serve(setup: dict[str, Any], answers: TextIO) -> None:
    from fedet import config
    from fedet import experiment as experiments
    from fedet.workers.buffers import SharedBuffer

    jobs = sys.stdin

    def send(answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)

    try:
        experiment = experiments.build(config.Config.model_validate(setup["config"]), Path(setup["cache"]))
    except Exception as error:  # such as code that can be imported only in the parent
        send({"error": tracebacks.to_message(error)})
        return
    folder = Path(setup["folder"])
    inbox, outbox, public = (SharedBuffer(path) for path in (folder / "in", folder / "out", folder.parent / "view"))

    def attempt(work: Callable[..., dict[str, Any]], *arguments: Any) -> bool:
        """Send the result or the error to the parent; returns whether there was no error."""
        try:
            send(work(experiment, *arguments, outbox))
        except Exception as error:
            send({"error": tracebacks.to_message(error)})
            return False
        return True

    send({"ready": True})
    for line in jobs:
        job = json.loads(line)
        if "predict" in job:
            if "tensors" in job:  # otherwise it is the model of the last request
                model = _builder(experiment, job["predict"], inbox.read(job["tensors"], copy=False)["model"])
            attempt(_predict, model, job) if "part" in job else attempt(_predict_public, model, job, public)
            continue
        sent: dict[str, Any] = {}
        if attempt(_run_client, job, inbox, sent) and job["predict_after"]:
            model = _builder(experiment, experiment.clients[job["client"]].arch, sent)
            while (line := jobs.readline()) and (request := json.loads(line))["public"]:
                attempt(_predict_public, model, request, public)
    _clean_up(folder)


def _clean_up(folder: Path) -> None:
    """Remove the buffers that a killed parent left in memory."""
    from fedet.workers.buffers import remove_folder

    remove_folder(folder)
    with contextlib.suppress(OSError):
        if not any(path.is_dir() for path in folder.parent.iterdir()):  # this is the last worker
            remove_folder(folder.parent)


def _run_client(experiment: Any, job: dict[str, Any], inbox: Any, sent: dict[str, Any], outbox: Any) -> dict[str, Any]:
    """Run a client; the weights in its reply are kept in `sent` for predictions."""
    from fedet.core import Payload

    tensors = inbox.read(job["tensors"], copy=False)  # the buffer is not overwritten before the answer
    down = Payload({name: tensors[f"down/{name}"] for name in job["down"]}, job["scalars"])
    client = experiment.client(job["client"], job["round"], {name: tensors[f"state/{name}"] for name in job["state"]})
    up = experiment.local(down, client)
    groups = {f"up/{name}": group for name, group in up.tensors.items()}
    groups |= {f"state/{name}": group for name, group in client.state.items()}
    written = outbox.write(groups)
    sent.update(up.tensors.get("model", {}))
    return {"tensors": written, "up": list(up.tensors), "scalars": dict(up.scalars), "state": list(client.state)}


def _builder(experiment: Any, arch: str, weights: Any) -> Callable[[], Any]:
    """A function that builds the model at its first call only."""
    return cache(lambda: experiment.env.build(arch, weights))


def _predict_public(experiment: Any, model: Callable[[], Any], job: dict[str, Any], public: Any, outbox: Any) -> dict[str, Any]:
    """A model's logits on some rows of this round's public inputs."""
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
