"""Your own data and models: edit them, then refer to them as below. Without a reference this file is not used.

A client's own data, in its node's settings (`own_data = true` in fedet.toml):
    flower-supernode ... --node-config 'client-id=3 arch="cnn" data="task:client_data"'
The file that it reads is made on the client: np.savez(Path.home() / "my-data" / "3.npz", inputs=inputs, labels=labels)
A model, in fedet.toml:
    models.clients = ["cnn", "task:small"]
"""

import math
from pathlib import Path

import numpy as np
from torch import nn


def client_data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, height, width) of uint8, or any floats; labels 0 to classes - 1. They never leave the machine."""
    stored = np.load(Path.home() / "my-data" / f"{client}.npz")
    return stored["inputs"], stored["labels"]


def small(input_shape: tuple[int, ...]) -> nn.Module:
    """Any nn.Module that turns an input into a vector; an adapter and the common head are added."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.ReLU())
