"""However clients are reached, the bits are the same; workers may die."""

import os
import signal

import pytest
import torch

from fedet import api, config, conformance, experiment
from fedet.mailbox import Mailbox
from fedet.methods import METHODS
from fedet.pool import process_pool


def small(method, **changes):
    short = conformance.quick(config.method_class(method))
    return config.load(conformance.SMALL, {"method.name": method, **short, **changes})


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    """A worker costs seconds to start: one per method is enough for all its checks."""
    return tmp_path_factory.mktemp("pool")


@pytest.mark.parametrize("method", [cls.name for cls in METHODS])
def test_a_worker_gives_the_bits_of_this_process(one_worker, method):
    lab = conformance.Lab(method, {}, one_worker)
    serial, entries = lab.play(lab.experiment())
    ready = lab.experiment()
    with process_pool(ready, one_worker / "cache", 1) as pool:
        pooled, others = lab.play(ready, pool.connect)
    assert conformance.same(serial.state, pooled.state)
    assert entries == others


def test_pools_of_any_size_give_the_same_run(tmp_path):
    runs = [api.run_config(small("fedet", **{"run.workers": n}), tmp_path / str(n)) for n in (0, 2, 4)]
    for other in runs[1:]:
        weights = [(r.run_dir / "best" / "model.safetensors").read_bytes() for r in (runs[0], other)]
        assert weights[0] == weights[1]
        timeless = [[{k: v for k, v in e.items() if k != "seconds"} for e in r.metrics] for r in (runs[0], other)]
        assert timeless[0] == timeless[1]


def test_a_killed_worker_is_replaced_and_its_work_done_again(tmp_path):
    lab = conformance.Lab("moon", {}, tmp_path)  # moon keeps client state, which must survive too
    serial, _ = lab.play(lab.experiment())
    ready = lab.experiment()
    with process_pool(ready, tmp_path / "cache", 1) as pool:
        first = pool.workers[0].process.pid

        def murderous(ready, store, number):
            if number == 2:
                os.kill(pool.workers[0].process.pid, signal.SIGKILL)
            return pool.connect(ready, store, number)

        pooled, _ = lab.play(ready, murderous)
        assert pool.workers[0].process.pid != first
    assert conformance.same(serial.state, pooled.state)


def test_no_worker_outlives_its_pool(tmp_path):
    ready = experiment.build(small("fedavg"), tmp_path / "cache")
    with process_pool(ready, tmp_path / "cache", 2) as pool:
        workers, scratch = [w.process for w in pool.workers], pool.scratch
    assert all(process.poll() is not None for process in workers)
    assert not scratch.exists()


def test_workers_whose_parent_is_gone_end_and_clean_up(tmp_path):
    ready = experiment.build(small("fedavg"), tmp_path / "cache")
    with process_pool(ready, tmp_path / "cache", 2) as pool:
        for worker in pool.workers:
            worker.process.stdin.close()  # what the end of the parent looks like from there
        for worker in pool.workers:
            worker.process.wait(timeout=60)
            assert not worker.mail.exists()
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
        api.run_config(small(f"{tmp_path / 'sour.py'}:Sour", **{"run.workers": 1}), tmp_path / "runs")


def test_mailboxes_carry_every_type_and_grow(tmp_path):
    a, b = Mailbox(tmp_path / "m"), Mailbox(tmp_path / "m")
    for size in (3, 100_000, 5):
        sent = {
            "x": {"w": torch.randn(size), "n": torch.arange(size), "flag": torch.tensor([True, False])},
            "y": {"empty": torch.empty(0, 10), "scalar": torch.tensor(3.5, dtype=torch.float64)},
            "z": {"last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)},
        }
        got = b.read(a.write(sent))
        assert conformance.same(got, sent)
    kept = got["x"]["w"].clone()
    a.write({"x": {"w": torch.zeros(5)}})
    assert torch.equal(got["x"]["w"], kept)  # what was read is a copy


def test_a_message_can_be_read_in_place_and_outlives_the_growth_of_its_file(tmp_path):
    a, b = Mailbox(tmp_path / "m"), Mailbox(tmp_path / "m")
    sent = {"x": {"w": torch.randn(5)}}
    seen = b.read(a.write(sent), copy=False)
    assert conformance.same(seen, sent)
    more = {"x": {"w": torch.randn(100_000)}}
    assert conformance.same(b.read(a.write(more), copy=False), more)
    assert seen["x"]["w"].shape == (5,)  # still mapped
    b.close()
