"""Run clients and predictions in persistent worker processes of one thread each, bit-identical to one process."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedet import runtime, train
from fedet.core import Allocator, ClientInfo, ClientTask, Delivery, Failure, Weights
from fedet.errors import FedetError
from fedet.experiment import Experiment
from fedet.workers import buffers, fork_server
from fedet.workers.buffers import Header, SharedBuffer
from fedet.workers.prefetch import PredictionTask, Prefetch
from fedet.workers.process import ChildProcess, Process, ProcessDied
from fedet.workers.remote import Answer, Worker

T = TypeVar("T")


class Crashed(FedetError):
    """Two workers in a row died during the same job."""


class Pool:
    """A transport and predictor: workers that share one queue of jobs and are replaced when they die."""

    def __init__(self, experiment: Experiment, cache: Path, size: int) -> None:
        self.scratch = buffers.create_folder()
        self._experiment, self._cache = experiment, cache
        self._public = SharedBuffer(self.scratch / "view")
        self._prefetch: Prefetch | None = None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Worker], Any], str] | None] = queue.SimpleQueue()
        self._closed = False
        self.replacements: list[str] = []
        """A sentence on each worker that died and was replaced."""
        self.workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        try:
            for process in fork_server.start_workers(size):
                self.workers.append(self._start_worker(process))
        except BaseException:
            self.close()
            raise
        self._threads = [threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(size)]
        for thread in self._threads:
            thread.start()

    def start_round(self, number: int) -> Sequence[ClientInfo]:
        """All clients are always available."""
        return self._experiment.clients

    def send(self, number: int, tasks: Mapping[int, ClientTask]) -> Delivery:
        """Run the clients, longest job first so that no worker idles at the end, and the prefetch of their predictions."""
        prefetch = self._prefetch if self._prefetch and self._prefetch.number == number and not self._prefetch.sent else None
        exchange = _Exchange(self, number, tasks, prefetch)
        try:
            answers, failures = exchange.run()
        except BaseException as error:
            exchange.cancel()
            if isinstance(error, KeyboardInterrupt):
                self.close()  # stops running jobs; a resumed run starts a new pool
            raise
        replies = {k: up for k, (up, _) in answers.items()}
        return Delivery(replies, {k: state for k, (_, state) in answers.items()}, failures)

    def prefetch(self, number: int, rows: Tensor, inputs: Callable[[Allocator], Tensor]) -> None:
        """Predict these inputs with the models of this round's next replies, each right after its training."""
        self._prefetch = Prefetch(number, rows, inputs)

    def prefetched(self, number: int, rows: Tensor, arch: str, weights: Weights) -> Tensor | None:
        """The prefetched logits for exactly these weights and rows, or None."""
        return self._prefetch.take(number, rows, arch, weights) if self._prefetch else None

    def predict(self, arch: str, weights: Weights, part: Literal["test", "val"]) -> Callable[[], Tensor]:
        """Start computing a model's logits on a part of the data, divided among the workers."""
        data = self._experiment.data.test if part == "test" else self._experiment.data.val
        assert data is not None

        def submit(rows: range) -> Future[Tensor]:
            return self.submit(lambda worker: worker.predict(arch, weights, part, rows), f"the evaluation of {arch}")

        starts = range(0, len(data), train.CHUNK)
        futures = [submit(range(start, min(start + train.CHUNK, len(data)))) for start in starts]

        def wait() -> Tensor:
            with contextlib.suppress(CancelledError):
                return torch.cat([future.result() for future in futures])
            with runtime.limit_threads(1):  # the pool was closed before the jobs ran
                return train.predict(self._experiment.env.build(arch, weights), data)

        return wait

    def submit(self, job: Callable[[Worker], T], name: str) -> Future[T]:
        """Queue a job for the next free worker."""
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._jobs.put((future, job, name))
        return future

    def close(self) -> None:
        """Stop all workers and cancel queued jobs."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while item := self._jobs.get_nowait():
                item[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for index, thread in enumerate(self._threads):
            while thread.is_alive():  # it may be replacing its worker
                self.workers[index].stop()
                thread.join(0.1)
        for worker in self.workers:
            worker.stop()
        self._public.close()
        buffers.remove_folder(self.scratch)

    def _start_worker(self, process: Process) -> Worker:
        """The worker in this process, or in a new process if this one has died."""
        try:
            return Worker(process, self._experiment, self._cache, self.scratch)
        except ProcessDied:
            ChildProcess(process).stop()
            return Worker(runtime.spawn_module(fork_server.WORKER), self._experiment, self._cache, self.scratch)

    def _serve(self, index: int) -> None:
        # Copying a model here on two threads would start a second OpenMP team. With more threads than cores, OpenMP threads no
        # longer spin between operators, and the server's own training takes twice as long.
        torch.get_num_threads()  # the first call in a thread sets its number to the process's, so it must come first
        torch.set_num_threads(1)
        while (item := self._jobs.get()) is not None:
            future, job, name = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._attempt(index, job, name))
                except BaseException as error:
                    future.set_exception(error)

    def _attempt(self, index: int, job: Callable[[Worker], T], name: str) -> T:
        """Run a job; if the worker dies, replace it and retry once, which is safe because jobs are pure functions."""
        for attempt in range(2):
            try:
                result = job(self.workers[index])
                if attempt:
                    self.replacements.append(
                        f"the worker process for {name} died and was replaced, which changes no result; if it died for lack of "
                        "memory, lower run.workers"
                    )
                return result
            except ProcessDied:
                self.workers[index].stop()
                if self._closed:
                    raise CancelledError from None
                self.workers[index] = self._start_worker(runtime.spawn_module(fork_server.WORKER))
        raise Crashed(f"the worker for {name} died twice: is there enough memory? Lower run.workers and resume")


class _Exchange:
    """The jobs of one call of `Pool.send`."""

    def __init__(self, pool: Pool, number: int, tasks: Mapping[int, ClientTask], prefetch: Prefetch | None) -> None:
        self.pool, self.number, self.tasks, self.prefetch = pool, number, tasks, prefetch
        self._clients: dict[int, Future[Answer]] = {}
        self._assists: list[Future[None]] = []
        self._public: Future[Header] = Future()
        """The header of the public inputs in shared memory, once they are computed."""

    def run(self) -> tuple[dict[int, Answer], list[Failure]]:
        """The answers by ascending client id, and failures for clients whose workers died."""
        if self.prefetch:
            self.prefetch.sent = True
        progress, done, total = self.pool._experiment.env.progress, itertools.count(1), len(self.tasks)
        predictions: dict[int, PredictionTask] = {}
        for k in sorted(self.tasks, key=self._cost, reverse=True):
            if self.prefetch:
                predictions[k] = PredictionTask(k, self._arch(k), self._public, self._assist)
            self._clients[k] = self._submit(k, predictions.get(k))
        # Called in several threads; the counter reports each number once. A future keeps its callbacks: one that referred to
        # this exchange would keep the round's messages in memory until the next full garbage collection.
        for future in self._clients.values():
            future.add_done_callback(lambda _: progress("clients", next(done), total))
        if self.prefetch:
            self._compute_public(self.prefetch)
        answers, failures = self._gather()
        for assist in self._assists:
            with contextlib.suppress(Crashed):  # missing predictions are computed when they are needed
                assist.result()
        if self.prefetch:
            for k in answers:
                self.prefetch.put(self._arch(k), answers[k][0], predictions[k].result())
        return answers, failures

    def cancel(self) -> None:
        """Cancel the remaining jobs."""
        if not self._public.done():  # threads that wait for it would hang
            self._public.set_exception(FedetError("the public inputs could not be computed"))
        for client in self._clients.values():
            client.cancel()
        for assist in self._assists:
            assist.cancel()

    def _submit(self, k: int, prediction: PredictionTask | None) -> Future[Answer]:
        task = self.tasks[k]
        return self.pool.submit(
            lambda worker: worker.run_client(k, self.number, task.request, task.state, prediction),
            f"client {k} in round {self.number}",
        )

    def _assist(self, prediction: PredictionTask, chunks: int) -> None:
        """Queue this many chunks for idle workers."""
        name = f"predictions of client {prediction.client} in round {self.number}"
        self._assists.extend(self.pool.submit(prediction.assist, name) for _ in range(chunks))

    def _compute_public(self, prefetch: Prefetch) -> None:
        """Compute the public inputs in shared memory, on one thread because the clients are training."""
        with runtime.limit_threads(1):
            inputs = prefetch.inputs(self.pool._public.allocate)
            self._public.set_result(self.pool._public.write({"view": {"all": inputs}}))

    def _gather(self) -> tuple[dict[int, Answer], list[Failure]]:
        answers, failures = {}, []
        for k in sorted(self._clients):
            try:
                answers[k] = self._clients[k].result()
            except Crashed as error:
                failures.append(Failure(k, "crashed", str(error)))
                if len(failures) == len(self._clients):
                    raise
        return answers, failures

    def _arch(self, client: int) -> str:
        return self.pool._experiment.clients[client].arch

    def _cost(self, client: int) -> tuple[int, int]:
        experiment = self.pool._experiment
        arch = self._arch(client) if experiment.method.traits.heterogeneous else experiment.env.large
        return experiment.env.model_cache.num_params(arch), experiment.clients[client].num_examples
