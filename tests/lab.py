"""Small worlds in which methods can be computed by hand."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from fedet import train
from fedet.core import Client, ClientInfo, Env, Round
from fedet.engine import rounds
from fedet.engine.exchange import InProcess


class Scalar(nn.Module):
    """A model that is one number, f(x) = a/2 (x - b)^2 being its loss."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    @property
    def device(self):
        return self.x.device


class Linear(nn.Module):
    """Softmax regression without bias."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    @property
    def device(self):
        return self.w.device

    def forward(self, x):
        return x @ self.w.T


@dataclass
class Curve:
    """The data of a client whose loss is a parabola."""

    a: float
    b: float

    def __len__(self):
        return 1


@dataclass
class Table:
    """Inputs and labels held as they are."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self):
        return len(self.x)

    def inputs(self, index):
        return self.x[index]

    def batch(self, index):
        return self.x[index], self.y[index]


class OneKind:
    """Stands in for ModelCache where there is one architecture."""

    def __init__(self, make):
        self.make = make

    def initial(self, arch):
        return {name: tensor.clone() for name, tensor in self.make().state_dict().items()}

    def load(self, arch, weights, slot=""):
        model = self.make()
        model.load_state_dict(weights)
        return model


def parabola(model, data, index):
    return data.a / 2 * ((model.x - data.b) ** 2).sum()


def on_parabolas(monkeypatch):
    """Replace cross-entropy by the parabolas for the rest of a test."""
    monkeypatch.setattr(train, "cross_entropy", parabola)


def federation(method, make, data, sizes=None):
    """An Env and a function that plays a round with the given participants."""
    modules = OneKind(make)
    env = Env(modules, ("only",), "only", 2, 0, len(data))
    infos = [ClientInfo(k, "only", (sizes or [len(d) for d in data])[k]) for k in range(len(data))]
    kept = {k: {} for k in range(len(data))}

    def play(state, number, members=None):
        members = range(len(data)) if members is None else members

        def exchange(requests):
            replies = {}
            for k, down in sorted(requests.items()):
                client = Client(k, "only", "only", data[k], 1000 * number + k, number, modules, kept[k])
                replies[k] = method.local(down, client)
            return replies

        return method.round(state, Round(number, [infos[k] for k in members], exchange, number), env)

    return env, play, kept


class Altered(InProcess):
    """Clients whose replies are changed on the way: `change(client, reply)` gives what arrives."""

    def __init__(self, experiment, change):
        super().__init__(experiment)
        self.change = change

    def send(self, number, tasks):
        delivery = super().send(number, tasks)
        return replace(delivery, replies={k: self.change(k, up) for k, up in delivery.replies.items()})


class Spy:
    """A transport that remembers each exchange's requests and replies, and whose `before` is called with each round."""

    def __init__(self, transport, before=lambda number: None):
        self.transport, self.before, self.seen = transport, before, []

    def start_round(self, number):
        self.before(number)
        return self.transport.start_round(number)

    def send(self, number, tasks):
        delivery = self.transport.send(number, tasks)
        self.seen.append(({k: task.request for k, task in tasks.items()}, delivery.replies))
        return delivery


def chosen(experiment, number):
    """The clients of a round."""
    return rounds.select(experiment, experiment.clients, number)[0]
