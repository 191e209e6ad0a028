"""Client work on several cores: persistent worker processes of one thread each, the same bits as in one process."""

from __future__ import annotations

import contextlib
import queue
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedet.child import Child, Died
from fedet.core import Exchange, Payload
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.mailbox import Mailbox
from fedet.state import ClientStore

Answer = tuple[Payload, dict[str, Any]]


class Worker(Child):
    """One process and its mailboxes."""

    def __init__(self, experiment: Experiment, cache: Path, scratch: Path) -> None:
        self.mail = Path(tempfile.mkdtemp(dir=scratch))
        self.inbox, self.outbox = Mailbox(self.mail / "in"), Mailbox(self.mail / "out")
        super().__init__("fedet.worker")
        self.say({"config": experiment.config.model_dump(mode="json"), "cache": str(cache), "mail": str(self.mail)})
        self.started = False

    def play(self, client: int, number: int, down: Payload, state: Mapping[str, Any]) -> Answer:
        """One client's work; raises what the client's code raised, or `Died`."""
        if not self.started:
            self.hear()
            self.started = True
        groups = {f"down/{name}": group for name, group in down.tensors.items()}
        groups |= {f"state/{name}": group for name, group in state.items()}
        job = {"client": client, "round": number, "down": list(down.tensors), "state": list(state)}
        self.say(job | {"mail": self.inbox.write(groups), "scalars": dict(down.scalars)})
        answer = self.hear()
        if "error" in answer:
            raise FedetError(f"client {client}, round {number}: {': '.join(answer['error'])}")
        mail = self.outbox.read(answer["mail"])
        up = Payload({name: mail[f"up/{name}"] for name in answer["up"]}, answer["scalars"])
        return up, {name: mail[f"state/{name}"] for name in answer["state"]}

    def stop(self) -> None:
        """End the process and remove its mail."""
        super().stop()
        self.inbox.close()
        self.outbox.close()
        shutil.rmtree(self.mail, ignore_errors=True)


class Pool:
    """Workers that are started once and repaired when one dies."""

    def __init__(self, experiment: Experiment, cache: Path, size: int) -> None:
        memory = Path("/dev/shm")
        self.scratch = Path(tempfile.mkdtemp(prefix="fedet-", dir=memory if memory.is_dir() else None))
        self._experiment, self._cache = experiment, cache
        self.workers = [self._worker() for _ in range(size)]

    def _worker(self) -> Worker:
        return Worker(self._experiment, self._cache, self.scratch)

    def connect(self, experiment: Experiment, store: ClientStore, number: int) -> Exchange:
        """The exchange of one round: the longest jobs first, so that no worker idles at its end."""

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            states = {k: store.get(k) for k in requests}
            jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
            for k in sorted(requests, key=lambda k: _effort(experiment, k), reverse=True):
                jobs.put(k)
            answers: dict[int, Answer] = {}
            errors: list[BaseException] = []

            def serve(place: int) -> None:
                while not errors:
                    try:
                        k = jobs.get_nowait()
                    except queue.Empty:
                        return
                    try:
                        answers[k] = self._play(place, k, number, requests[k], states[k])
                        experiment.env.progress("clients", len(answers), len(requests))
                    except BaseException as error:
                        errors.append(error)

            threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(len(self.workers))]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self.close()  # ends the jobs under way; the run is over or will be resumed with a new pool
                raise
            if errors:
                raise errors[0]
            for k, (_, state) in sorted(answers.items()):
                store.stage(k, state)
            return {k: up for k, (up, _) in sorted(answers.items())}

        return exchange

    def _play(self, place: int, client: int, number: int, down: Payload, state: Mapping[str, Any]) -> Answer:
        """One job; a worker that dies is replaced and the job, a pure function, done again once."""
        for attempt in (1, 2):
            try:
                return self.workers[place].play(client, number, down, state)
            except Died:
                code = self.workers[place].process.poll()
                self.workers[place].stop()
                self.workers[place] = self._worker()
                if attempt == 2:
                    raise FedetError(
                        f"the worker of client {client} died twice in round {number} (exit code {code}): "
                        "is there enough memory? Lower run.workers and resume"
                    ) from None
        raise AssertionError

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _effort(experiment: Experiment, client: int) -> tuple[int, int]:
    info, env = experiment.clients[client], experiment.env
    arch = info.arch if experiment.method.traits.heterogeneous else env.large
    return env.modules.num_params(arch), info.num_examples


@contextlib.contextmanager
def process_pool(experiment: Experiment, cache: Path, size: int) -> Iterator[Pool]:
    """A pool for the time of a run."""
    pool = Pool(experiment, cache, size)
    try:
        yield pool
    finally:
        pool.close()
