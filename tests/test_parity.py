"""However clients are reached, the bits are the same; workers may die."""

import gc
import os
import signal
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch
from lab import Spy, chosen

import fedet
from fedet import check, config, experiment, runtime, train
from fedet.core import ClientTask, Payload
from fedet.engine import session
from fedet.errors import FedetError, Interrupted
from fedet.storage.metrics import read
from fedet.workers.buffers import SharedBuffer
from fedet.workers.pool import Pool
from fedet.workers.prefetch import PredictionTask
from fedet.workers.process import ProcessDied
from fedet.workers.remote import Worker


def small(method, **changes):
    short = check.quick(config.method_class(method))
    return config.load(check.SMALL, {"method.name": method, **short, **changes})


def timeless(result):
    """What a run says and leaves, but for how long it took."""
    metrics = [{key: value for key, value in entry.items() if key != "seconds"} for entry in result.metrics]
    return metrics, (result.run_dir / "best" / "model.safetensors").read_bytes()


def test_pools_of_any_size_give_the_same_run(tmp_path):
    runs = [session.run_config(small("fedet", **{"run.workers": n, "run.rounds": 2}), tmp_path / str(n)) for n in (0, 1, 3)]
    for other in runs[1:]:
        assert timeless(runs[0]) == timeless(other)


@pytest.mark.parametrize("method", ["fedet", pytest.param("feddf", marks=pytest.mark.slow)])
def test_workers_ask_the_models_and_this_process_never_does(tmp_path, monkeypatch, method):
    serial = session.run_config(small(method, **{"run.rounds": 3}), tmp_path / "serial")
    monkeypatch.setattr(train, "predict", lambda *_: pytest.fail("a model was asked in the parent"))
    pooled = session.run_config(small(method, **{"run.rounds": 3, "run.workers": 2}), tmp_path / "pool")
    assert timeless(serial) == timeless(pooled)


def test_a_round_is_evaluated_while_the_next_ones_clients_train(tmp_path, monkeypatch):
    order = []
    real = Worker.run_client, Worker.predict
    monkeypatch.setattr(Worker, "run_client", lambda self, k, n, *a: (order.append(("play", n)), real[0](self, k, n, *a))[1])
    monkeypatch.setattr(Worker, "predict", lambda self, *a: (order.append(("predict", 0)), real[1](self, *a))[1])
    logged = []
    session.run_config(
        small("fedavg", **{"run.rounds": 3, "run.workers": 1}),
        tmp_path,
        callbacks=fedet.Callbacks(round=lambda e: logged.append(len(order))),
    )
    assert order == [*[("play", 1)] * 3, ("predict", 0), *[("play", 2)] * 3, ("predict", 0), *[("play", 3)] * 3, ("predict", 0)]
    assert logged == [7, 11, 12]  # the first round was written down when the second one's clients had answered


@pytest.mark.parametrize(
    "rule", [{"run.patience": 1, "data.val_fraction": 0.2}, pytest.param({"run.target_accuracy": 0.01}, marks=pytest.mark.slow)]
)
def test_a_rule_that_needs_the_accuracy_stops_a_pool_where_it_stops_one_process(tmp_path, rule):
    runs = [
        session.run_config(small("fedavg", **{"run.rounds": 9, "run.workers": n}, **rule), tmp_path / str(n)) for n in (0, 2)
    ]
    assert timeless(runs[0]) == timeless(runs[1])
    assert len(runs[0].metrics) < 9


@pytest.fixture
def heeds_interrupts():
    """A program that a shell starts in the background has SIGINT ignored, and its tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_pool_loses_no_finished_round(tmp_path):
    whole = session.run_config(small("moon", **{"run.rounds": 5}), tmp_path / "whole")

    def stop(stage, done, total):
        if stage == "clients" and done == 2 and len(told) >= 2 and not stopped:
            stopped.append(len(told))
            os.kill(os.getpid(), signal.SIGINT)

    told, stopped = [], []
    with pytest.raises(Interrupted):
        session.run_config(
            small("moon", **{"run.rounds": 5, "run.workers": 2}),
            tmp_path / "cut",
            callbacks=fedet.Callbacks(round=told.append, stage=stop),
        )
    (folder,) = (p for p in (tmp_path / "cut").iterdir() if p.name != ".cache")
    assert stopped[0] <= len(read(folder / "metrics.jsonl")) < 5  # one more may have been evaluated meanwhile
    assert timeless(session.resume(folder)) == timeless(whole)


def test_a_round_without_evaluation_is_told_at_its_end(tmp_path):
    told, seen = [], []

    def stage(name, done, total):
        if name == "clients":
            seen.append((len(told), done))

    changes = {"run.rounds": 4, "run.eval_every": 4, "run.workers": 2}
    result = session.run_config(small("fedavg", **changes), tmp_path, callbacks=fedet.Callbacks(round=told.append, stage=stage))
    cohort = len(result.metrics[0]["cohort"])
    # Each client is counted once, and none before the round before it was told.
    assert sorted(seen) == [(before, done) for before in range(4) for done in range(1, cohort + 1)]


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no signals")
def test_a_killed_worker_is_replaced_and_its_work_done_again(tmp_path):
    lab = check.Lab("moon", {}, tmp_path)  # moon keeps client state, which must survive too
    serial, _ = lab.run(lab.experiment())
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 1)) as pool:
        first = pool.workers[0].process.pid

        def kill_one(number):
            if number == 2:
                os.kill(pool.workers[0].process.pid, signal.SIGKILL)

        pooled, _ = lab.run(ready, Spy(pool, kill_one))
        assert pool.workers[0].process.pid != first
    assert check.same(serial.state, pooled.state)


MANY = """
import numpy as np


def data():
    random = np.random.default_rng(0)
    return random.integers(0, 256, (6000, 1, 8, 8), dtype=np.uint8), random.integers(0, 10, 6000)
"""


def test_workers_share_a_large_evaluation(tmp_path):
    (tmp_path / "many.py").write_text(MANY, encoding="utf-8")
    many = {"data.name": f"{tmp_path / 'many.py'}:data", "data.split": [500, 300, 5200]}
    ready = experiment.build(small("fedavg", **many), tmp_path / "cache")
    arch, asked = ready.env.large, []
    weights = ready.env.initial(arch)
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        for worker in pool.workers:
            real = worker.predict
            worker.predict = lambda *a, real=real: (asked.append(len(a[3])), real(*a))[1]
        shared = pool.predict(arch, weights, "test")()
    assert sorted(asked) == [1200, 2000, 2000]
    with runtime.limit_threads(1):
        assert torch.equal(shared, train.predict(ready.env.build(arch, weights), ready.data.test))


def test_a_model_is_sent_to_a_worker_once_and_never_taken_for_another(tmp_path):
    (tmp_path / "many.py").write_text(MANY, encoding="utf-8")
    many = {"data.name": f"{tmp_path / 'many.py'}:data", "data.split": [500, 300, 5200]}
    ready = experiment.build(small("fedavg", **many), tmp_path / "cache")
    arch, sent = ready.env.large, []
    one = ready.env.initial(arch)
    other = {name: tensor + 0.1 for name, tensor in one.items()}
    with closing(Pool(ready, tmp_path / "cache", 1)) as pool:
        real = pool.workers[0].inbox.write
        pool.workers[0].inbox.write = lambda groups: sent.append(next(iter(groups))) or real(groups)
        found = [pool.predict(arch, weights, "test")() for weights in (one, other, one)]
        request = Payload({"model": one})
        played = pool.send(1, {0: ClientTask(request, {}, request)}).replies
        found.append(pool.predict(arch, one, "test")())
    assert played
    assert sent == ["model", "model", "model", "down/model", "model"]  # three pieces each
    with runtime.limit_threads(1):
        for logits, weights in zip(found, (one, other, one, one), strict=True):
            assert torch.equal(logits, train.predict(ready.env.build(arch, weights), ready.data.test))


def test_what_is_made_in_a_shared_buffer_is_not_copied_into_it(tmp_path, monkeypatch):
    here, there = SharedBuffer(tmp_path / "view"), SharedBuffer(tmp_path / "view")
    view = here.allocate((3, 5)).copy_(torch.arange(15.0).view(3, 5))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied"))
    assert torch.equal(there.read(here.write({"view": {"all": view}}))["view"]["all"], view)


def test_idle_workers_help_with_the_predictions_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "CHUNK", 2000)
    (tmp_path / "many.py").write_text(MANY, encoding="utf-8")
    many = {"data.name": f"{tmp_path / 'many.py'}:data", "data.split": [400, 5200, 400], "run.rounds": 2, "run.cohort": 1}
    steps = {"method.server.steps": 400, "method.server.batch": 13, "run.threads": 1}
    helped, real = [], Worker.predict_public
    monkeypatch.setattr(Worker, "predict_public", lambda self, *a: helped.append(a[3]) or real(self, *a))
    runs = [session.run_config(small("fedet", **many, **steps, **{"run.workers": n}), tmp_path / str(n)) for n in (0, 2)]
    assert helped  # one client, three pieces, two workers
    assert timeless(runs[0]) == timeless(runs[1])


def test_a_chunk_whose_worker_dies_is_left_for_whoever_comes_next():
    view = Future()
    view.set_result({"view": {"all": ["float32", [train.CHUNK + 1, 1], 0]}})
    asked, said = [], []
    task = PredictionTask(0, "cnn", view, lambda task, chunks: asked.append(chunks))
    task.start(Payload({"model": {}}))
    assert asked == [1]  # its own worker does one of the two

    def die(view, rows):
        raise ProcessDied

    with pytest.raises(ProcessDied):
        task.next_chunk(die)
    assert task.result() is None
    task.start(Payload({"model": {}}))  # trained anew by another worker: no piece is asked for twice
    while task.next_chunk(lambda view, rows: said.append(rows) or torch.full((len(rows), 2), float(rows.start))):
        pass
    assert said == [range(train.CHUNK), range(train.CHUNK, train.CHUNK + 1)]
    assert task.result()[:, 0].tolist() == [0.0] * train.CHUNK + [float(train.CHUNK)]


def test_threads_that_serve_workers_leave_the_cores_to_the_server(tmp_path):
    ready = experiment.build(small("fedavg"), tmp_path / "cache")
    with runtime.limit_threads(2), closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        with runtime.limit_threads(1):
            pass  # setting the number again must not reach threads that ask for it later
        assert [pool.submit(lambda _: torch.get_num_threads(), "a look").result() for _ in range(6)] == [1] * 6
        assert torch.get_num_threads() == 2


DEADLY = """
import os
from dataclasses import dataclass
from fedet.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Deadly(FedAvg):
    deadly: int = -1

    def local(self, down, client):
        if client.id == self.deadly or self.deadly < 0:
            os.kill(os.getpid(), 9)
        return super().local(down, client)
"""


def test_a_client_that_takes_down_every_worker_is_set_aside_and_named(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY, encoding="utf-8")
    method, usual = f"{tmp_path / 'deadly.py'}:Deadly", experiment.build(small("fedavg"), tmp_path / "cache")
    victim = chosen(usual, 1)[0].id
    changes = {"method.deadly": victim, "run.workers": 2, "run.rounds": 1}
    (entry,) = session.run_config(small(method, **changes), tmp_path / "runs").metrics
    assert [(f["client"], f["kind"]) for f in entry["failures"]] == [(victim, "crashed")]
    assert "died twice" in entry["failures"][0]["why"]
    assert victim not in entry["replied"]
    assert len(entry["replied"]) == len(entry["cohort"]) - 1
    assert not entry["lost"]


@pytest.mark.slow
def test_a_run_in_which_every_client_takes_down_its_worker_stops(tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY, encoding="utf-8")
    with pytest.raises(FedetError, match="is there enough memory"):
        session.run_config(small(f"{tmp_path / 'deadly.py'}:Deadly", **{"run.workers": 1, "run.cohort": 2}), tmp_path / "runs")


@pytest.mark.parametrize("method", ["fedet", "fedgkt", pytest.param("scaffold", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_round_is_freed_at_once(tmp_path, method, workers):
    """Objects that refer to each other in a circle stay until a full garbage collection, hundreds of rounds later."""
    kept = []

    def look(entry):
        if entry["round"] == 2:  # what happens once has happened
            gc.collect()
            gc.disable()
        if entry["round"] == 5:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kept.extend(type(item).__name__ for item in gc.garbage)

    try:
        session.run_config(
            small(method, **{"run.rounds": 6, "run.workers": workers, "run.robust": "on"}),
            tmp_path,
            callbacks=fedet.Callbacks(round=look),
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {"Tensor", "Parameter", "Payload"} & set(kept)


def test_no_worker_outlives_its_pool(tmp_path):
    ready = experiment.build(small("fedavg"), tmp_path / "cache")
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        workers, scratch = [w.process for w in pool.workers], pool.scratch
    assert all(process.poll() is not None for process in workers)
    assert not scratch.exists()


def test_workers_whose_parent_is_gone_end_and_clean_up(tmp_path):
    ready = experiment.build(small("fedavg"), tmp_path / "cache")
    with closing(Pool(ready, tmp_path / "cache", 2)) as pool:
        for worker in pool.workers:
            worker.process.stdin.close()  # what the end of the parent looks like from there
        for worker in pool.workers:
            worker.process.wait(timeout=60)
            assert not worker.folder.exists()
        assert not pool.scratch.exists()


def test_what_a_client_raises_in_a_worker_is_told(tmp_path):
    (tmp_path / "sour.py").write_text(
        "from fedet.methods.fedavg import FedAvg\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Sour(FedAvg):\n"
        "    def local(self, down, client):\n"
        "        raise ValueError('sour grapes')\n",
        encoding="utf-8",
    )
    with pytest.raises(Exception, match="sour grapes"):
        session.run_config(small(f"{tmp_path / 'sour.py'}:Sour", **{"run.workers": 1}), tmp_path / "runs")


def test_shared_buffers_carry_every_type_and_grow(tmp_path):
    a, b = SharedBuffer(tmp_path / "m"), SharedBuffer(tmp_path / "m")
    for size in (3, 100_000, 5):
        sent = {
            "x": {"w": torch.randn(size), "n": torch.arange(size), "flag": torch.tensor([True, False])},
            "y": {"empty": torch.empty(0, 10), "scalar": torch.tensor(3.5, dtype=torch.float64)},
            "z": {"last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)},
        }
        got = b.read(a.write(sent))
        assert check.same(got, sent)
    kept = got["x"]["w"].clone()
    a.write({"x": {"w": torch.zeros(5)}})
    assert torch.equal(got["x"]["w"], kept)  # what was read is a copy


def test_a_message_can_be_read_in_place_and_outlives_the_growth_of_its_file(tmp_path):
    a, b = SharedBuffer(tmp_path / "m"), SharedBuffer(tmp_path / "m")
    sent = {"x": {"w": torch.randn(5)}}
    seen = b.read(a.write(sent), copy=False)
    assert check.same(seen, sent)
    more = {"x": {"w": torch.randn(100_000)}}
    assert check.same(b.read(a.write(more), copy=False), more)
    assert seen["x"]["w"].shape == (5,)  # still mapped
    b.close()
