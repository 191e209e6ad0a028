"""Image bodies: a batch of images in, one feature vector per image out.

None has batch normalisation, so that there are no running statistics to average between clients. The initialisation
(`he_normal` and zeroed residual branches) keeps the start of training stable instead.

Pools come before the ReLU that the papers put first: the results and gradients are the same to the bit, and the ReLU has a
quarter of the pixels to process.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedet.errors import ConfigError
from fedet.models.kernels import planes
from fedet.models.kernels.narrow_conv import NarrowConv2d, PooledConv
from fedet.models.kernels.small_map_conv import SmallMapConv2d
from fedet.models.kernels.winograd import WinogradConv2d

Shape = tuple[int, ...]
Stem = Literal["cifar", "imagenet"]
Norm = Literal["none", "group"]


class Body(nn.Module):
    """The part before adapter and head; its output has `width` numbers per image.

    All bodies take the same arguments; `stem` and `conv_bias` affect the ResNets only.
    """

    width: int
    channels_last: ClassVar[bool] = True

    def images(self, batch: Tensor) -> Tensor:
        """The batch in the layout of the weights: channels last, in which convolutions are faster on a CPU.

        The layout changes the order of summation and thereby the last bits, so it is the same everywhere.
        """
        return batch if planes() else batch.contiguous(memory_format=torch.channels_last)


class CNN(Body):
    """LeNet's two convolutions with a deeper stack of linear layers."""

    channels_last = False  # its first layer is faster on planes

    def __init__(
        self, input_shape: Shape, width: float = 1.0, stem: Stem = "cifar", norm: Norm = "none", conv_bias: bool = True
    ) -> None:
        super().__init__()
        channels, height, side = _image(input_shape)
        padding = 0 if min(height, side) >= 16 else 2  # on smaller images two 5x5 convolutions without padding leave nothing
        first, second, *hidden = (_scaled(n, width) for n in (6, 16, 120, 100, 84, 50))
        self.convs = nn.Sequential(  # PooledConv has its own pool and ReLU; identities keep the positions that name weights
            PooledConv(*_conv(channels, first, 5, norm, padding=padding)), nn.Identity(), nn.Identity(),
            _conv(first, second, 5, norm, padding=padding, kind=NarrowConv2d), _halve(), nn.ReLU(),
        )  # fmt: skip
        flat = second * _side_after(height, padding) * _side_after(side, padding)
        self.linears = _mlp(flat, *hidden)
        self.width = hidden[-1]
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        features: Tensor = self.linears(self.convs(images).flatten(1))
        return features


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, bias: bool, kind: type[nn.Conv2d]) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, 3, norm, stride=stride, bias=bias, kind=kind)
        self.second = _conv(outputs, outputs, 3, norm, bias=bias, kind=kind)
        same = stride == 1 and inputs == outputs
        self.stride = stride
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, 1, norm, bias=bias, kind=kind)

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut plus the branch."""
        # A strided 1x1 convolution equals one without stride on every other pixel; the backward pass of the former crashes
        # torch 2.13 for channels last, 8 channels and 56 pixels or more.
        short = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(short))

    def close_branch(self) -> None:
        """Start as the shortcut alone: branches without normalisation would double the variance with every block."""
        last = next(layer for layer in reversed(self.second) if isinstance(layer, nn.Conv2d | nn.GroupNorm))
        nn.init.zeros_(last.weight)


class ResNet(Body):
    """Four stages of residual blocks; from stage to stage the channels double and height and width are halved."""

    blocks_per_stage: ClassVar[int]

    def __init__(
        self, input_shape: Shape, width: float = 1.0, stem: Stem = "cifar", norm: Norm = "none", conv_bias: bool = True
    ) -> None:
        super().__init__()
        channels, *_ = _image(input_shape)
        widths = [_scaled(n, width) for n in (64, 128, 256, 512)]
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        pool = [nn.MaxPool2d(3, stride=2, padding=1)] if stem == "imagenet" else []
        self.stem = nn.Sequential(_conv(channels, widths[0], kernel, norm, stride=stride, bias=conv_bias), *pool, nn.ReLU())
        # After the CIFAR stem the maps of a 32-pixel image never get so small that padding matters.
        kind = SmallMapConv2d if stem == "imagenet" else WinogradConv2d
        blocks = []
        inputs = widths[0]
        for stage, outputs in enumerate(widths):
            for block in range(self.blocks_per_stage):
                blocks.append(Residual(inputs, outputs, 2 if stage and not block else 1, norm, conv_bias, kind))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.width = widths[-1]
        he_normal(self)
        for residual in blocks:
            residual.close_branch()

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        return _global_average(self.blocks(self.stem(self.images(images))))


class ResNet8(ResNet):
    """One block per stage."""

    blocks_per_stage = 1


class ResNet18(ResNet):
    """Two blocks per stage."""

    blocks_per_stage = 2


class VGG19(Body):
    """Sixteen 3x3 convolutions in five groups, a pool after each, then two linear layers."""

    groups: ClassVar[tuple[tuple[int, int], ...]] = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))

    def __init__(
        self, input_shape: Shape, width: float = 1.0, stem: Stem = "cifar", norm: Norm = "none", conv_bias: bool = True
    ) -> None:
        super().__init__()
        inputs, *_ = _image(input_shape)
        layers: list[nn.Module] = []
        for count, outputs in ((count, _scaled(n, width)) for count, n in self.groups):
            for _ in range(count):
                layers += [_conv(inputs, outputs, 3, norm, kind=SmallMapConv2d), nn.ReLU()]
                inputs = outputs
            layers.insert(-1, _halve())
        self.convs = nn.Sequential(*layers)
        self.linears = _mlp(inputs, inputs, inputs)
        self.width = inputs
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        features: Tensor = self.linears(_global_average(self.convs(self.images(images))))
        return features


def he_normal(module: nn.Module) -> None:
    """Initialise every convolution and linear layer with He's normal (fan in) and zero biases.

    It preserves the second moment from layer to layer of a ReLU network. PyTorch's default divides it by six in each layer,
    which leaves a gradient of 1e-9 for the first convolution of VGG19.
    """
    for layer in module.modules():
        # Drawing values on the meta device would import torch's compiler, which takes seconds.
        if isinstance(layer, nn.Conv2d | nn.Linear) and not layer.weight.is_meta:
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(
            f"image models need inputs of shape (channels, height, width), not inputs of shape {tuple(shape)}: use 'mlp' or a "
            "model of your own for tables (docs/guide/tabular.md), a text model for texts"
        )
    channels, height, width = shape
    return channels, height, width


def _scaled(count: int, width: float) -> int:
    return max(1, round(count * width))


def _conv(
    inputs: int,
    outputs: int,
    kernel: int,
    norm: Norm,
    *,
    stride: int = 1,
    padding: int | None = None,
    bias: bool = True,
    kind: type[nn.Conv2d] = nn.Conv2d,
) -> nn.Sequential:
    padding = kernel // 2 if padding is None else padding
    conv = kind(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)
    return nn.Sequential(conv, nn.GroupNorm(_groups(outputs), outputs) if norm == "group" else nn.Identity())


def _groups(channels: int) -> int:
    """The largest number of groups, up to 32, that divides the channels into groups of four or more.

    On a map of one pixel the normalisation of a single channel would always give zero.
    """
    return next(n for n in range(max(1, min(32, channels // 4)), 0, -1) if channels % n == 0)


def _mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(2, ceil_mode=True)  # rounding up, so that a side of one pixel stays


def _side_after(side: int, padding: int) -> int:
    """The height or width of the map after two 5x5 convolutions, each followed by a pool."""
    for _ in range(2):
        side = -(-(side - 4 + 2 * padding) // 2)
    return side


def _global_average(maps: Tensor) -> Tensor:
    return maps.mean(dim=(2, 3))  # the backward pass of the adaptive pool is not deterministic on a GPU
