"""Client work on several cores: persistent worker processes of one thread each, the same bits as in one process."""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import Allocator, Exchange, Payload, Weights
from fedet.engine.exchange import Failure, Replies
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.runtime import spawn_module
from fedet.storage.client_store import ClientStore
from fedet.workers import buffers, fork_server
from fedet.workers.buffers import Header, SharedBuffer
from fedet.workers.process import ChildProcess, Process, ProcessDied

T = TypeVar("T")
Answer = tuple[Payload, dict[str, Any]]
"""What a client sends, and what it keeps."""


class Crashed(FedetError):
    """A job took its worker down, and a second one too."""


class Question:
    """The public inputs about which one client's model is asked, piece by piece, by its own worker and by idle ones."""

    def __init__(self, client: int, arch: str, view: Future[Header], ask_for_help: Callable[[Question, int], None]) -> None:
        self.client, self.arch, self._view, self._ask_for_help = client, arch, view, ask_for_help
        self.model: Payload | None = None
        self._left: collections.deque[range] = collections.deque()
        self._found: dict[int, Tensor] = {}

    def begin(self, model: Payload) -> None:
        """The model is there; a worker that had to train it anew brings the same and finds what is left."""
        rows = self._view.result()["view"]["all"][1][0]
        if self.model is None:
            self._left.extend(range(start, min(start + train.PIECE, rows)) for start in range(0, rows, train.PIECE))
            self.model = model
            self._ask_for_help(self, len(self._left) - 1)

    def one_more(self, ask: Callable[[Header, range], Tensor]) -> bool:
        """Have a piece answered, if one is left."""
        try:
            rows = self._left.popleft()
        except IndexError:
            return False
        try:
            self._found[rows.start] = ask(self._view.result(), rows)
        except BaseException:
            self._left.appendleft(rows)  # for whoever comes next
            raise
        return True

    def help(self, worker: Worker) -> None:
        """A piece, by a worker that has nothing else to do."""
        assert self.model is not None
        weights = self.model.tensors["model"]
        self.one_more(lambda view, rows: worker.said_of(self.arch, weights, view, rows))

    def answer(self) -> Tensor | None:
        """All of it in order, if all of it is there."""
        complete = self.model is not None and not self._left
        return torch.cat([self._found[start] for start in sorted(self._found)]) if complete else None


class Worker(ChildProcess):
    """One process and its mailboxes."""

    def __init__(self, process: Process, experiment: Experiment, cache: Path, scratch: Path) -> None:
        self.mail = Path(tempfile.mkdtemp(dir=scratch))
        self.inbox, self.outbox = SharedBuffer(self.mail / "in"), SharedBuffer(self.mail / "out")
        super().__init__(process)
        self.send({"config": experiment.config.model_dump(mode="json"), "cache": str(cache), "mail": str(self.mail)})
        self.started = False
        self._model: Weights | None = None

    def play(
        self, client: int, number: int, down: Payload, state: Mapping[str, Any], question: Question | None = None
    ) -> Answer:
        """One client's work, then what its model says of the inputs it is asked about; raises what its code raised."""
        groups = {f"down/{name}": group for name, group in down.tensors.items()}
        groups |= {f"state/{name}": group for name, group in state.items()}
        job = {"client": client, "round": number, "down": list(down.tensors), "state": list(state)}
        answer = self._ask(job | {"scalars": dict(down.scalars), "asked": question is not None}, groups)
        if "error" in answer:
            raise FedetError(f"client {client}, round {number}: {': '.join(answer['error'])}")
        mail = self.outbox.read(answer["mail"])
        up = Payload({name: mail[f"up/{name}"] for name in answer["up"]}, answer["scalars"])
        if question:
            try:
                question.begin(up)
                while question.one_more(self._said):
                    pass
            finally:
                self.send({"view": None})  # it waits for rows until there are no more
        return up, {name: mail[f"state/{name}"] for name in answer["state"]}

    def _said(self, view: Header, rows: range) -> Tensor:
        """What the model that was just trained says of some rows of the view."""
        self.send({"view": view, "rows": [rows.start, rows.stop]})
        return self._logits(self.receive())

    def said_of(self, arch: str, weights: Weights, view: Header, rows: range) -> Tensor:
        """What a model that was trained elsewhere says of them."""
        job = {"predict": arch, "view": view, "rows": [rows.start, rows.stop]}
        return self._ask_model(job, weights)

    def predict(self, arch: str, weights: Weights, part: str, rows: range) -> Tensor:
        """A model's logits on some rows of a part of the data."""
        return self._ask_model({"predict": arch, "part": part, "rows": [rows.start, rows.stop]}, weights)

    def _ask_model(self, job: Mapping[str, Any], weights: Weights) -> Tensor:
        """The model is sent unless it is the one that was asked last."""
        if weights is self._model:
            self.send(job)
            return self._logits(self.receive())
        answer = self._ask(job, {"model": weights})
        self._model = weights
        return self._logits(answer)

    def _logits(self, answer: Mapping[str, Any]) -> Tensor:
        if "error" in answer:
            raise FedetError(": ".join(answer["error"]))
        return self.outbox.read(answer["mail"])["logits"]["all"]

    def _ask(self, job: Mapping[str, Any], groups: Mapping[str, Weights]) -> dict[str, Any]:
        if not self.started:
            self.receive()
            self.started = True
        self._model = None
        self.send({**job, "mail": self.inbox.write(groups)})
        return self.receive()

    def stop(self) -> None:
        """End the process and remove its mail."""
        super().stop()
        self.inbox.close()
        self.outbox.close()
        buffers.remove_folder(self.mail)


class Pool:
    """Workers that are started once, take one job after the other from one queue, and are repaired when one dies."""

    def __init__(self, experiment: Experiment, cache: Path, size: int) -> None:
        self.scratch = buffers.create_folder()
        self._experiment, self._cache = experiment, cache
        self._view = SharedBuffer(self.scratch / "view")
        self._question: Callable[[Allocator], Tensor] | None = None
        self._foreseen: dict[int, Tensor] = {}
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Worker], Any], str] | None] = queue.SimpleQueue()
        self._closed = False
        self.workers = [self._worker(process) for process in fork_server.start_workers(size)]
        self._threads = [threading.Thread(target=self._serve, args=(place,), daemon=True) for place in range(size)]
        for thread in self._threads:
            thread.start()

    def _worker(self, process: Process) -> Worker:
        try:
            return Worker(process, self._experiment, self._cache, self.scratch)
        except ProcessDied:  # before it could be told what to do
            ChildProcess(process).stop()
            return Worker(spawn_module(fork_server.WORKER), self._experiment, self._cache, self.scratch)

    def connect(self, experiment: Experiment, store: ClientStore, number: int) -> Exchange:
        """The exchange of one round: the longest jobs first, so that no worker idles at its end."""

        def exchange(requests: Mapping[int, Payload]) -> Mapping[int, Payload]:
            drawn, self._question = self._question, None
            view: Future[Header] = Future()
            help_given: list[Future[None]] = []
            questions: dict[int, Question | None] = {}
            done = itertools.count(1)  # each number once, whichever thread it is that tells it

            def help_for(question: Question, pieces: int) -> None:
                what = f"predictions of client {question.client} in round {number}"
                help_given.extend(self._submit(question.help, what) for _ in range(pieces))

            def play(k: int) -> Future[Answer]:
                down, state = requests[k], store.get(k)
                question = questions[k] = Question(k, experiment.clients[k].arch, view, help_for) if drawn else None
                return self._submit(
                    lambda worker: worker.play(k, number, down, state, question), f"client {k} in round {number}"
                )

            def tell(_: object) -> None:
                experiment.env.progress("clients", next(done), len(requests))

            order = sorted(requests, key=lambda k: _effort(experiment, k), reverse=True)
            futures = {k: play(k) for k in order}
            for future in futures.values():
                future.add_done_callback(tell)
            try:
                if drawn:  # here while the clients train, so not on more threads than there are cores
                    with runtime.limit_threads(1):
                        view.set_result(self._view.write({"view": {"all": drawn(self._view.allocate)}}))
                answers, crashed = _gather(futures)
                for given in help_given:
                    with contextlib.suppress(Crashed):  # what is missing then is asked for later
                        given.result()
            except BaseException as error:
                if not view.done():
                    view.set_exception(FedetError("the public inputs could not be drawn"))
                for future in futures.values():
                    future.cancel()
                for given in help_given:
                    given.cancel()
                if isinstance(error, KeyboardInterrupt):
                    self.close()  # ends the jobs under way; the run is over or will be resumed with a new pool
                raise
            for k, (_, state) in answers.items():
                store.stage(k, state)
            found = {k: question.answer() for k in answers if (question := questions[k])}
            self._foreseen = {k: logits for k, logits in found.items() if logits is not None}
            return Replies({k: up for k, (up, _) in answers.items()}, crashed)

        return exchange

    def foresee(self, inputs: Callable[[Allocator], Tensor]) -> None:
        """Ask the models of the next exchange about these inputs, each right after its training."""
        self._question, self._foreseen = inputs, {}

    def foreseen(self) -> Mapping[int, Tensor]:
        """What they said."""
        return self._foreseen

    def predict(self, arch: str, weights: Weights, part: Literal["test", "val"]) -> Callable[[], Tensor]:
        """Begin to compute a model's logits on a part of the data, before whatever is asked for later; workers share it."""
        data = self._experiment.data.test if part == "test" else self._experiment.data.val
        assert data is not None

        def ask(rows: range) -> Future[Tensor]:
            return self._submit(lambda worker: worker.predict(arch, weights, part, rows), f"the evaluation of {arch}")

        starts = range(0, len(data), train.PIECE)
        futures = [ask(range(start, min(start + train.PIECE, len(data)))) for start in starts]

        def wait() -> Tensor:
            with contextlib.suppress(CancelledError):
                return torch.cat([future.result() for future in futures])
            with runtime.limit_threads(1):  # the pool was closed before it came to this
                return train.predict(self._experiment.env.build(arch, weights), data)

        return wait

    def _submit(self, job: Callable[[Worker], T], what: str) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._jobs.put((future, job, what))
        return future

    def _serve(self, place: int) -> None:
        # Copying a model here on two threads would start a second team of OpenMP's: more threads than cores, on which all of
        # them stop spinning between operators, and the server's own training takes twice as long.
        torch.get_num_threads()  # a thread's first question makes it take over the process's number
        torch.set_num_threads(1)
        while (order := self._jobs.get()) is not None:
            future, job, what = order
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._attempt(place, job, what))
                except BaseException as error:
                    future.set_exception(error)

    def _attempt(self, place: int, job: Callable[[Worker], T], what: str) -> T:
        """One job; a worker that dies is replaced and the job, a pure function, done again once."""
        for attempt in (1, 2):
            try:
                return job(self.workers[place])
            except ProcessDied:
                self.workers[place].stop()
                if self._closed:
                    raise CancelledError from None
                self.workers[place] = self._worker(spawn_module(fork_server.WORKER))
                if attempt == 2:
                    raise Crashed(
                        f"the worker of {what} died twice: is there enough memory? Lower run.workers and resume"
                    ) from None
        raise AssertionError

    def close(self) -> None:
        """End all workers; what was not begun is cancelled."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while order := self._jobs.get_nowait():
                order[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread, worker in zip(self._threads, self.workers, strict=True):
            worker.stop()
            thread.join()
        for worker in self.workers:  # one may have been replaced meanwhile
            worker.stop()
        self._view.close()
        buffers.remove_folder(self.scratch)


def _gather(futures: Mapping[int, Future[Answer]]) -> tuple[dict[int, Answer], list[Failure]]:
    """The answers in ascending id, and who took down its worker each time; if nobody answered so, that is an error."""
    answers, failures = {}, []
    for k in sorted(futures):
        try:
            answers[k] = futures[k].result()
        except Crashed as error:
            failures.append(Failure(k, "crashed", str(error)))
            if len(failures) == len(futures):
                raise
    return answers, failures


def _effort(experiment: Experiment, client: int) -> tuple[int, int]:
    info, env = experiment.clients[client], experiment.env
    arch = info.arch if experiment.method.traits.heterogeneous else env.large
    return env.model_cache.num_params(arch), info.num_examples


@contextlib.contextmanager
def process_pool(experiment: Experiment, cache: Path, size: int) -> Iterator[Pool]:
    """A pool for the time of a run."""
    pool = Pool(experiment, cache, size)
    try:
        yield pool
    finally:
        pool.close()
