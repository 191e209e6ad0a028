"""The models as usually written in PyTorch: contiguous, ReLU before pool, torch's own layers."""

import torch
import torch.nn.functional as F
from torch import nn


def head(features, representation, classes=10):
    """The same shapes as fedet's head."""
    return [
        nn.Linear(features, features),
        nn.ReLU(),
        nn.Linear(features, representation),
        nn.Linear(representation, classes),
    ]


def cnn(features=50, representation=92):
    """Conv 3-6-5, pool, conv 6-16-5, pool, then linear layers."""
    layers = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    for a, b in ((400, 120), (120, 100), (100, 84), (84, 50)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    if features != 50:
        layers += [nn.Linear(50, features), nn.ReLU()]
    return nn.Sequential(*layers, *head(features, representation))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; no normalisation, as in fedet's."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        nn.init.zeros_(self.second.weight)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        """The shortcut plus the branch."""
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet18(features=512, representation=128, width=1.0, blocks=2, stem="imagenet"):
    """ResNet18 (ResNet8 with one block per stage)."""
    widths = [max(1, round(n * width)) for n in (64, 128, 256, 512)]
    large = [nn.Conv2d(3, widths[0], 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers, inputs = large if stem == "imagenet" else [nn.Conv2d(3, widths[0], 3, 1, 1), nn.ReLU()], widths[0]
    for stage, outputs in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if inputs != features:
        layers += [nn.Linear(inputs, features), nn.ReLU()]
    return nn.Sequential(*layers, *head(features, representation))


def vgg19(features=512, representation=128, width=1.0):
    """VGG19's convolutions and two linear layers."""
    layers, inputs = [], 3
    for count, n in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        outputs = max(1, round(n * width))
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, inputs), nn.ReLU()]
    if inputs != features:
        layers += [nn.Linear(inputs, features), nn.ReLU()]
    return nn.Sequential(*layers, *head(features, representation))


MODELS = {"w1": cnn, "resnet18": resnet18}


def size(model):
    """How many parameters."""
    return sum(p.numel() for p in model.parameters())


def step(model, optimiser, x, y):
    """One step of training."""
    optimiser.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimiser.step()


def flat(model):
    """All parameters as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
