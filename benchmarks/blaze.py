"""BlazeFL's two parallel trainers with W1's client, its FedAvg server and its loop of rounds; used by `drive.py`.

Threads where the interpreter has no global lock (the mode BlazeFL recommends), otherwise processes.
"""

import importlib
import sys
import threading

import plain
import torch
import torch.multiprocessing as mp
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgUplinkPackage
from blazefl.core import ProcessPoolClientTrainer, SHMHandle, ThreadPoolClientTrainer, deserialize_model, serialize_model
from drive import BATCH, CLIENTS, COHORT, IMAGES, done, examples, kept_model, of_client, torch_passes

WORKERS = 2


class Net:
    """What BlazeFL asks for a model by name."""

    def select_model(self, model_name):
        """The only one."""
        return plain.cnn()


class Threads(ThreadPoolClientTrainer):
    """Clients in threads of this process, which read the server's weights where they are."""

    def __init__(self, folder):
        self.num_parallels, self.device, self.cache, self.stop_event = WORKERS, "cpu", [], threading.Event()
        self.folder = folder

    def worker(self, cid, device, payload, stop_event):
        """Train one client with a module of its own, as threads can't share one."""
        weights = trained(plain.cnn(), payload.model_parameters, self.folder, cid)
        return FedAvgUplinkPackage(cid, weights, IMAGES)


class Processes(ProcessPoolClientTrainer):
    """Clients in processes that BlazeFL starts for each round; weights both ways through shared memory."""

    def __init__(self, folder):
        # A fork has torch imported; spawned processes, which only CUDA needs, would import it again in each round.
        mp.set_start_method("fork")
        self.num_parallels, self.device, self.cache, self.stop_event = WORKERS, "cpu", [], mp.Manager().Event()
        self.folder = folder
        self.empty = serialize_model(kept_model())
        # What forked processes need not repeat in each round: map the files, import what torch.optim does at its first step.
        examples(folder)
        importlib.import_module("torch._dynamo")

    def prepare_uplink_package_buffer(self):
        """Where a client's answer goes."""
        return FedAvgUplinkPackage(-1, self.empty.clone(), 0)

    def get_client_config(self, cid):
        """What a process is told of its client."""
        return self.folder, cid

    @staticmethod
    def worker(config, payload, device, stop_event, *, shm_buffer=None):
        """Train one client with the module that the process has."""
        shm_buffer.model_parameters.copy_(trained(kept_model(), payload.model_parameters, *config))
        return FedAvgUplinkPackage(config[1], SHMHandle(), IMAGES)


def trained(model, weights, folder, cid):
    """A client's new weights as one vector."""
    torch.set_num_threads(1)
    deserialize_model(model, weights)
    torch_passes(model, *of_client(folder, cid))
    return serialize_model(model)


def run(folder, rounds):
    """All rounds, as in BlazeFL's examples but without their evaluation."""
    torch.set_num_threads(1)
    trainer = Processes(folder) if getattr(sys, "_is_gil_enabled", lambda: True)() else Threads(folder)
    server = FedAvgBaseServerHandler(Net(), "cnn", None, rounds, CLIENTS, COHORT / CLIENTS, "cpu", BATCH, seed=0)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.cache:
            server.load(package)
        trainer.cache.clear()
        done()
    return server.model
