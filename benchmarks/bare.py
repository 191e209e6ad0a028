"""The bare loop: federated averaging with nothing around it. Two processes of one thread, plain PyTorch, shared memory."""

import os

import plain
import torch
import torch.multiprocessing as mp


class Bare:
    """Persistent processes that train clients on normalised images in shared memory; the parent averages."""

    def __init__(self, name, images, labels, rows, settings, processes=2):
        self.clients, self.cohort = len(rows), 10
        vector = plain.flat(plain.MODELS[name]())
        self.weights, self.answers = vector.share_memory_(), torch.empty(self.cohort, len(vector)).share_memory_()
        shared = (images.share_memory_(), labels.share_memory_(), [r.share_memory_() for r in rows])
        self.params, context = len(vector), mp.get_context("spawn")
        before = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        os.environ |= dict.fromkeys(before, "1")  # before torch starts there
        self.pipes, self.processes = [], []
        for _ in range(processes):
            here, there = context.Pipe()
            worker = context.Process(
                target=serve, args=(there, name, settings, self.weights, self.answers, *shared), daemon=True
            )
            worker.start()
            self.pipes.append(here)
            self.processes.append(worker)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
        for pipe in self.pipes:
            pipe.recv()

    def round(self, generator):
        """Train ten random clients; their average replaces the weights."""
        chosen = torch.randperm(self.clients, generator=generator)[: self.cohort].tolist()
        for i, pipe in enumerate(self.pipes):
            pipe.send([(place, k) for place, k in enumerate(chosen) if place % len(self.pipes) == i])
        for pipe in self.pipes:
            pipe.recv()
        torch.mean(self.answers, 0, out=self.weights)

    def close(self):
        """End the processes."""
        for process in self.processes:
            process.terminate()
            process.join()


def serve(pipe, name, settings, weights, answers, images, labels, rows):
    """One process: train the clients it is sent from the shared weights and store their new weights."""
    torch.set_num_threads(1)
    model = plain.MODELS[name]()
    pipe.send("ready")
    while True:
        for place, client in pipe.recv():
            torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
            mine, optimiser = rows[client], torch.optim.SGD(model.parameters(), lr=settings["lr"])
            order = torch.empty(0, dtype=torch.int64)
            for _ in range(settings["steps"]):
                if len(order) < settings["batch"]:
                    order = mine[torch.randperm(len(mine))]
                index, order = order[: settings["batch"]], order[settings["batch"] :]
                plain.step(model, optimiser, images[index], labels[index])
            answers[place] = plain.flat(model)
        pipe.send("done")
