"""Models: a body of any architecture, and a head that is the same in all of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedet import plugins
from fedet.core import Weights, head_of, seed_of, weights_of
from fedet.errors import ConfigError
from fedet.layers import nearest
from fedet.models import text
from fedet.models.split import CHANNELS, SPLIT, Extractor, Split
from fedet.models.vision import CNN, VGG19, Body, Norm, ResNet8, ResNet18, Shape, Stem, he_normal

if TYPE_CHECKING:
    from fedet.config import ModelSpec

__all__ = ["FAMILIES", "SPLIT", "Head", "Model", "Modules", "Net", "Split", "build", "channels_last", "count_macs", "describe"]

FAMILIES: dict[str, type[Body]] = {"cnn": CNN, "resnet8": ResNet8, "resnet18": ResNet18, "vgg19": VGG19}

PLAIN = {"width": 1.0, "stem": "cifar", "norm": "none", "conv_bias": True}
"""What only the image families can vary, as it stands when nobody has."""

LAST_LAYER_STD = 0.02
"""One rule for all models, because their heads start equal.

Measured on CIFAR-10 (50 images, seeds 0-2, at least 8 seeds for cnn and resnet8), the largest |loss - log 10| at the start of
cnn / resnet8 / resnet18 / vgg19 is 0.12 / 0.05 / 0.00 / 0.01 with 0.02, and 0.89 / 0.17 / 0.02 / 0.01 with 0.05: half of
the CNNs then start far from uniform predictions. After 60 steps of SGD (rate 0.1, batch 16, seeds 0 and 1) the loss
of 500 of the 1,000 training images is 2.19 and 2.12 for resnet8, 2.26 and 2.28 for resnet18; with 0.01 one resnet18 is at 4.03.
"""


class Head(nn.Module):
    """The representation layer, classifier included: of one shape in every model, so that it can be averaged and copied."""

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
    """A body, the adapter that brings its features to the common width, and the head.

    `spec` is plain data; `build(**model.spec)` makes a model into which this one's weights fit.
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
        """What the head sees: `feature_width` numbers per example, whatever the body."""
        features: Tensor = self.adapter(self.body(x).flatten(1))
        return features

    def representation(self, x: Tensor) -> Tensor:
        """The head's vector before its classifier."""
        return self.head.represent(self.features(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(x))
        return logits

    @property
    def device(self) -> torch.device:
        """Where it lives, and so where its inputs must be."""
        return self.head.l3.weight.device

    def num_params(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters())

    def body_state(self) -> Weights:
        """The part of the state_dict that is this architecture's own, adapter included; not a copy."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("head.")}

    def head_state(self) -> Weights:
        """The part of the state_dict that all architectures share; not a copy."""
        return head_of(self.state_dict())


def build(
    name: str,
    num_classes: int = 10,
    *,
    input_shape: Shape = (3, 32, 32),
    width: float = 1.0,
    stem: Stem = "cifar",
    norm: Norm = "none",
    conv_bias: bool = True,
    feature_width: int = 512,
    representation_width: int = 128,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Model:
    """Make a model of a family, or around a user's `module:callable`, with the initial weights of this seed."""
    if name.startswith(SPLIT):
        rest = {"width": width, "stem": stem, "norm": norm, "conv_bias": conv_bias, "seed": seed, "options": options}
        return _split(name, num_classes, input_shape, **rest, **_widths(feature_width, representation_width))
    shape = tuple(input_shape)
    variant = {"width": width, "stem": stem, "norm": norm, "conv_bias": conv_bias}
    common = {"num_classes": num_classes, **_widths(feature_width, representation_width)}
    _check_variant(variant)
    with _seeded(seed):
        if text.known(name):
            reader = _text_body(name, variant, options, shape)
            model, options = Model(reader, reader.width, **common), reader.options
        elif ":" in name:
            body = _own_body(name, variant, dict(options or {}), {"input_shape": shape, "num_classes": num_classes})
            model = Model(body, _output_width(name, body, shape), **common)
        else:
            body = _family_body(name, variant, options, shape)
            model = Model(body, body.width, **common)
    model.spec = {"name": name, **variant, "options": dict(options or {}), "input_shape": list(shape), **common}
    return model


def _text_body(name: str, variant: Mapping[str, Any], options: Mapping[str, Any] | None, shape: Shape) -> text.TextBody:
    if dict(variant) != PLAIN:
        raise ConfigError(f"width, stem, norm and conv_bias don't reach '{name}': a text model has options such as layers")
    return text.make(name, options or {}, shape)


def _widths(feature_width: int, representation_width: int) -> dict[str, Any]:
    return {"feature_width": feature_width, "representation_width": representation_width}


def _split(name: str, num_classes: int, input_shape: Shape, **rest: Any) -> Model:
    """The named architecture on the features of a stem."""
    channels, height, width = input_shape
    inner = build(name.removeprefix(SPLIT), num_classes, input_shape=(CHANNELS, height, width), **rest)
    with _seeded(seed_of(rest["seed"], "stem")):
        model = Split(Extractor(channels), inner)
    model.spec = {**inner.spec, "name": name, "input_shape": [channels, height, width]}
    return cast(Model, model)  # all that is asked of a model but head and features


Net = Model | Split | Extractor
"""What can be trained or asked for its outputs."""


def channels_last(model: nn.Module) -> bool:
    """Whether the model brings images into this layout itself, so that it may as well be given them so."""
    body = getattr(model, "body", None)
    return isinstance(body, Body) and body.channels_last


class Modules:
    """The architectures of one run: their initial weights, and modules that are reused instead of rebuilt."""

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        *,
        num_classes: int,
        input_shape: Shape,
        feature_width: int,
        representation_width: int,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self._specs = dict(specs)
        self._common: dict[str, Any] = {
            "num_classes": num_classes,
            "input_shape": input_shape,
            "feature_width": feature_width,
            "representation_width": representation_width,
        }
        self._seed = seed
        self._device = torch.device(device)
        self.device = str(device)
        self._initial: dict[str, Weights] = {}
        self._modules: dict[tuple[str, str], Model] = {}
        self._sizes: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The architectures, in the order given."""
        return tuple(self._specs)

    def initial(self, arch: str) -> Weights:
        """The run's initial weights, always the same dict: don't change it. All architectures' heads are equal."""
        if arch not in self._initial:
            common = self._initial_stem() if arch.startswith(SPLIT) else self._initial_head()
            self._initial[arch] = {**weights_of(self._build(arch)), **common}
        return self._initial[arch]

    def load(self, arch: str, weights: Weights, slot: str = "") -> Model:
        """The module of this architecture and slot, ready to train, with a copy of these weights.

        The next call with the same slot changes it; take another slot to hold two at a time.
        """
        model = self._modules.get((arch, slot))
        if model is None:
            model = self._modules[arch, slot] = self._build(arch)
        _copy_into(model, weights, arch)
        model.zero_grad(set_to_none=True)
        return model.requires_grad_(True).train()

    def num_params(self, arch: str) -> int:
        """How many parameters this architecture has, head included."""
        if arch not in self._sizes:
            own = ":" in self._spec(arch).name  # only our own bodies are known to work without memory behind them
            self._sizes[arch] = self._build(arch, "cpu" if own else "meta").num_params()
        return self._sizes[arch]

    def vocab_size(self, arch: str) -> int | None:
        """How many different ids a text model takes; other models have no such number."""
        name = self._spec(arch).name
        if ":" in name and not text.known(name):  # only our own bodies are known to work without memory behind them
            return None
        size: int | None = getattr(self._build(arch, "meta").body, "vocab_size", None)
        return size

    @property
    def split_shape(self) -> Shape:
        """The shape of one example's features behind the stem of a split model."""
        _, height, width = self._common["input_shape"]
        return (CHANNELS, height, width)

    def _spec(self, arch: str) -> ModelSpec:
        if arch.startswith(SPLIT):
            whole = self._spec(arch.removeprefix(SPLIT))
            return whole.model_copy(update={"name": SPLIT + whole.name})
        if arch not in self._specs:
            known = ", ".join(self._specs)
            raise ConfigError(f"no architecture is called '{arch}'{nearest(arch, self._specs)}; this run has: {known}")
        return self._specs[arch]

    def _build(self, arch: str, device: Literal["cpu", "meta"] = "cpu") -> Model:
        # Random numbers come from the CPU whatever the run's device, so that all devices start from equal weights.
        spec = self._spec(arch)
        with torch.device(device):
            model = build(
                spec.name,
                width=spec.width,
                stem=spec.stem,
                norm=spec.norm,
                conv_bias=spec.conv_bias,
                options=spec.options,
                seed=seed_of(self._seed, "init", arch),
                **self._common,
            )
        return model if device == "meta" else model.to(self._device)

    def _initial_head(self) -> Weights:
        sizes = (self._common[key] for key in ("feature_width", "representation_width", "num_classes"))
        with _seeded(seed_of(self._seed, "init", "head")):
            head = Head(*sizes).to(self._device)
        return {f"head.{name}": tensor for name, tensor in weights_of(head).items()}

    def _initial_stem(self) -> Weights:
        with _seeded(seed_of(self._seed, "init", "stem")):
            stem = Extractor(self._common["input_shape"][0]).to(self._device)
        return {f"stem.{name}": tensor for name, tensor in weights_of(stem).items()}


def describe(num_classes: int = 10, input_shape: Shape = (3, 32, 32)) -> list[dict[str, Any]]:
    """Each family's name, parameters, multiply-adds of one forward pass, and the width of its body's features."""
    rows: list[dict[str, Any]] = []
    for name in FAMILIES:
        with torch.device("meta"):  # sizes need no values
            model = build(name, num_classes, input_shape=input_shape)
            macs = count_macs(model, input_shape)
        rows.append({"name": name, "params": model.num_params(), "macs": macs, "width": model.body.width})
    return rows


def count_macs(model: nn.Module, input_shape: Shape) -> int:
    """Multiply-adds of the convolutions and linear layers for one example."""
    total = 0

    def add(layer: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        total += output.numel() * layer.weight[0].numel()  # each output is one product with one row or kernel

    hooks = [layer.register_forward_hook(add) for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    try:
        _dry_run(model, 1, input_shape)
    finally:
        for hook in hooks:
            hook.remove()
    return total


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from this seed, and leave the caller's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs, which the fork doesn't restore
        yield


def _check_variant(variant: Mapping[str, Any]) -> None:
    for key, known in {"stem": ("cifar", "imagenet"), "norm": ("none", "group")}.items():
        if variant[key] not in known:
            raise ConfigError(f"{key} = {variant[key]!r}: it is one of {', '.join(known)}")
    if not 0 < variant["width"] < math.inf:
        raise ConfigError(f"width = {variant['width']}: a model's width is a factor above 0, 1.0 leaves it as it is")


def _family_body(name: str, variant: Mapping[str, Any], options: Mapping[str, Any] | None, shape: Shape) -> Body:
    if name not in FAMILIES:
        names = [*FAMILIES, *text.NAMES]
        known = ", ".join(names)
        raise ConfigError(f"no model is called '{name}'{nearest(name, names)}; known: {known}, hf:PLACE or module:callable")
    if options:
        raise ConfigError(f"'{name}' takes no options ({', '.join(options)}): they are for your own module:callable")
    body = FAMILIES[name](shape, **variant)
    body.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # missing in torch's annotations
    return body


def _own_body(name: str, variant: Mapping[str, Any], options: dict[str, Any], offered: Mapping[str, Any]) -> nn.Module:
    if dict(variant) != PLAIN:
        raise ConfigError(f"width, stem, norm and conv_bias don't reach '{name}': give your own model its settings as options")
    factory = plugins.resolve(name, "model")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(f"'{name}' is no class or function: refer to what makes the module, so that it can be made anew")
    wanted = {key: value for key, value in offered.items() if key in _parameters(factory)}
    try:
        body = factory(**{**wanted, **options})
    except Exception as error:
        raise ConfigError(f"'{name}' could not be called to make a model: {type(error).__name__}: {error}") from error
    if not isinstance(body, nn.Module):
        raise ConfigError(f"'{name}' returned a {type(body).__name__}: a model is a torch.nn.Module")
    return body


def _parameters(factory: Any) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:  # some callables written in C don't tell
        return set()


def _output_width(name: str, body: nn.Module, shape: Shape, dtype: torch.dtype | None = None) -> int:
    try:
        output = _dry_run(body, 2, shape, dtype)
    except Exception as error:
        if len(shape) == 1 and dtype is None:  # it may be one that looks up ids
            return _output_width(name, body, shape, torch.int64)
        raise ConfigError(
            f"'{name}' does not run on a batch of shape {(2, *shape)}, which is the data's: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(output, Tensor):
        raise ConfigError(f"'{name}' returns a {type(output).__name__}: its output must be one tensor (batch, ...)")
    if output.dim() < 2 or output.shape[0] != 2:
        raise ConfigError(
            f"'{name}' turns a batch of shape {(2, *shape)} into {tuple(output.shape)}: "
            "its output must keep the batch as the first of two or more dimensions"
        )
    return output.flatten(1).shape[1]


def _dry_run(module: nn.Module, batch: int, shape: Shape, dtype: torch.dtype | None = None) -> Any:
    """Run on zeros, leaving modes and running statistics as they were."""
    modes = {layer: layer.training for layer in module.modules()}
    device = next((parameter.device for parameter in module.parameters()), None)
    try:
        with torch.no_grad():
            return module.eval()(torch.zeros(batch, *shape, device=device, dtype=dtype))
    finally:
        for layer, training in modes.items():
            layer.training = training


def _copy_into(model: Model, weights: Weights, arch: str) -> None:
    own = model.state_dict()
    wrong = sorted(own.keys() ^ weights.keys()) or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise ConfigError(f"these weights are not of architecture '{arch}': {wrong[0]} and {len(wrong) - 1} more names differ")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
