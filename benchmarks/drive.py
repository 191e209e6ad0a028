"""One job on workload W1 by one system, through that system's own public interface; used by `peers.py`.

It prints a line at the end of each round. Nothing is evaluated. The systems must be installed where this runs.
"""

import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

ROUND = "round done"
CLIENTS, COHORT, IMAGES, BATCH, PASSES, RATE = 100, 10, 384, 64, 5, 0.05


def done():
    """Report the end of a round."""
    print(ROUND, flush=True)


@cache
def examples(folder):
    """All clients' normalised images and labels, mapped from files: client k has rows 384 k to 384 (k + 1)."""
    import numpy as np
    import torch

    return tuple(torch.from_numpy(np.load(Path(folder) / f"{name}.npy", mmap_mode="c")) for name in ("images", "labels"))


def of_client(folder, k):
    """One client's share."""
    return tuple(part[k * IMAGES : (k + 1) * IMAGES] for part in examples(folder))


def fedet(folder, rounds, options):
    """The package itself."""
    import fedet
    from fedet import Callbacks

    fedet.run(
        json.loads(Path(options["config"]).read_text()), out=options["out"], callbacks=Callbacks(round=lambda entry: done())
    )


def bare(folder, rounds, options):
    """Two processes of plain PyTorch and nothing else."""
    import torch
    from bare import Bare

    images, labels = examples(folder)
    rows = list(torch.arange(len(labels)).split(IMAGES))
    loop = Bare("w1", images, labels, rows, {"lr": RATE, "batch": BATCH, "steps": PASSES * IMAGES // BATCH})
    for _ in range(rounds):
        loop.round(torch.Generator().manual_seed(random.randrange(1 << 30)))
        done()
    loop.close()


def flower(folder, rounds, options):
    """Flower's simulation on Ray, one processor for each client."""
    import plain
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid, context):
        # A fraction would be taken of the nodes that are there when the first round begins, which may be none.
        strategy = FedAvg(fraction_train=1e-9, min_train_nodes=COHORT, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(plain.cnn().state_dict()), num_rounds=rounds, evaluate_fn=after_round)

    latest = {}

    def after_round(number, arrays):
        weights = arrays.to_torch_state_dict()
        if number:
            assert any((weights[name] != latest[name]).any() for name in weights), "Flower's round trained nobody"
            done()
        latest.update(weights)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, flower_client(folder), CLIENTS, backend_config=resources)


def flower_client(folder):
    """The app that Flower's actors run; the module and the data are kept from client to client."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        import torch

        torch.set_num_threads(1)
        model = kept_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        torch_passes(model, *of_client(folder, int(context.node_config["partition-id"])))
        reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})}
        return Message(content=RecordDict(reply), reply_to=message)

    return app


@cache
def kept_model():
    """One module per process."""
    import plain

    return plain.cnn()


def torch_passes(model, images, labels):
    """The client's work in plain PyTorch."""
    import plain
    import torch

    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(PASSES):
        for index in torch.randperm(IMAGES).split(BATCH):
            plain.step(model, optimiser, images[index], labels[index])


def pfl(folder, rounds, options):
    """Apple's pfl on its simulated backend."""
    import plain
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import to_tensor  # noqa: F401  # registers PyTorch as the framework
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = plain.cnn()

        def forward(self, x):
            return self.net(x)

        def loss(self, x, y, eval=False):
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x, y):
            return {}

    class Report(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            done()
            return False, Metrics()

    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    sampler = get_user_sampler("random", list(range(CLIENTS)))
    data = FederatedDataset(lambda user: Dataset(raw_data=list(of_client(folder, user))), sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=None
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=PASSES, local_learning_rate=RATE, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=BATCH),
        [Report()],
    )


def fedlab(folder, rounds, options):
    """FedLab's standalone pipeline with its serial trainer."""
    without_torchvision()
    import plain
    import torch
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    class Data:
        def get_dataloader(self, k, batch_size):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(*of_client(folder, k)), batch_size=batch_size, shuffle=True
            )

    class Pipeline(StandalonePipeline):
        def evaluate(self):
            done()

    trainer = SGDSerialClientTrainer(plain.cnn(), CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(PASSES, BATCH, RATE)
    Pipeline(SyncServerHandler(plain.cnn(), rounds, COHORT / CLIENTS), trainer).main()


def without_torchvision():
    """Let FedLab be imported without torchvision, which only its data sets use: there is no wheel for every build of torch."""
    from importlib.util import find_spec
    from unittest.mock import MagicMock

    if find_spec("torchvision") is None:
        for name in ("", ".datasets", ".transforms", ".models"):
            sys.modules["torchvision" + name] = MagicMock()


def pfllib(folder, rounds, options):
    """PFLlib's FedAvg server, from a checkout whose path is given; its data files are written first, outside the clock."""
    import plain
    import torch

    sys.path.insert(0, str(Path(options["pfllib"]) / "system"))
    from flcore.servers.serveravg import FedAvg

    os.chdir(options["files"])
    given = SimpleNamespace(
        model=plain.cnn(), device="cpu", dataset="w1", num_classes=10, global_rounds=rounds - 1, local_epochs=PASSES,
        batch_size=BATCH, local_learning_rate=RATE, num_clients=CLIENTS, join_ratio=COHORT / CLIENTS, random_join_ratio=False,
        few_shot=0, algorithm="FedAvg", time_select=False, goal="", time_threthold=1e9, save_folder_name="out", top_cnt=100,
        auto_break=False, eval_gap=10**6, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False,
        dlg_gap=10**6, batch_num_per_client=1, num_new_clients=0, fine_tuning_epoch_new=0, learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
    )  # fmt: skip
    torch.manual_seed(0)

    class Server(FedAvg):
        def evaluate(self, *_, **__):
            self.rs_test_acc.append(0.0)

        def aggregate_parameters(self):
            super().aggregate_parameters()
            done()

        def save_results(self):
            pass

        def save_global_model(self):
            pass

    Server(given, 0).train()


def blazefl(folder, rounds, options):
    """BlazeFL from a checkout whose path is given; its part is a module, as its processes have to import their worker."""
    sys.path.insert(0, str(Path(options["blazefl"]) / "src"))
    import blaze

    blaze.run(folder, rounds)


SYSTEMS = {f.__name__: f for f in (fedet, bare, flower, pfl, fedlab, pfllib, blazefl)}


def main(name, folder, rounds, options):
    """Run the job."""
    SYSTEMS[name](folder, int(rounds), json.loads(options))
