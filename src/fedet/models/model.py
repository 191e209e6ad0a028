"""A model: a body of any architecture, and a head of the same shape in all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedet.models.split import Extractor, Split
from fedet.models.vision import Body, he_normal

LAST_LAYER_STD = 0.02
"""Standard deviation of the classifier's initial weights, the same for all models because their heads start equal.

Measured on CIFAR-10 (50 images, seeds 0-2, at least 8 seeds for cnn and resnet8), the largest |loss - log 10| at the start of
cnn / resnet8 / resnet18 / vgg19 is 0.12 / 0.05 / 0.00 / 0.01 with 0.02, and 0.89 / 0.17 / 0.02 / 0.01 with 0.05: half of
the CNNs then start far from uniform predictions. After 60 steps of SGD (rate 0.1, batch 16, seeds 0 and 1) the loss
of 500 of the 1,000 training images is 2.19 and 2.12 for resnet8, 2.26 and 2.28 for resnet18; with 0.01 one resnet18 is at 4.03.
"""


class Head(nn.Module):
    """The representation layers and the classifier, of one shape in every model so that they can be averaged and copied."""

    def __init__(self, feature_width: int, representation_width: int, num_classes: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(feature_width, feature_width)
        self.l2 = nn.Linear(feature_width, representation_width)
        self.l3 = nn.Linear(representation_width, num_classes)
        he_normal(self)
        if not self.l3.weight.is_meta:
            nn.init.normal_(self.l3.weight, std=LAST_LAYER_STD)

    def represent(self, features: Tensor) -> Tensor:
        """The vector before the classifier, which contrastive methods compare."""
        representation: Tensor = self.l2(F.relu(self.l1(features)))
        return representation

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.l3(self.represent(features))
        return logits


class Model(nn.Module):
    """A body, an adapter that maps its features to the common width, and the head.

    `spec` is plain data; `build(**model.spec)` builds a model that this one's weights can be loaded into.
    """

    spec: dict[str, Any]

    def __init__(
        self, body: nn.Module, body_width: int, *, num_classes: int, feature_width: int = 512, representation_width: int = 128
    ) -> None:
        super().__init__()
        self.spec = {}
        self.body = body
        self.adapter: nn.Module = nn.Identity()
        if body_width != feature_width:
            self.adapter = nn.Sequential(nn.Linear(body_width, feature_width), nn.ReLU())
            he_normal(self.adapter)
        self.head = Head(feature_width, representation_width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The head's input: `feature_width` numbers per example, whatever the body."""
        features: Tensor = self.adapter(self.body(x).flatten(1))
        return features

    def representation(self, x: Tensor) -> Tensor:
        """The vector before the classifier."""
        return self.head.represent(self.features(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(x))
        return logits

    @property
    def device(self) -> torch.device:
        """The device of the weights, where inputs must be."""
        return self.head.l3.weight.device

    def num_params(self) -> int:
        """The number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


Net = Model | Split | Extractor
"""Whatever `train.fit` can train and `train.predict` can run."""


def channels_last(model: nn.Module) -> bool:
    """Whether the model converts its input images to the channels-last layout, so that data may come in it."""
    return isinstance(model, Model) and isinstance(model.body, Body) and model.body.channels_last
