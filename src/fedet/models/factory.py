"""Models by name: a family in some variant, a text model, or a body of the user's own; and what each of them costs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedet.config import plugins
from fedet.config.sources import nearest
from fedet.core import seed_of
from fedet.errors import ConfigError
from fedet.models import text
from fedet.models.model import Model
from fedet.models.split import CHANNELS, SPLIT, Extractor, Split
from fedet.models.vision import CNN, VGG19, Body, Norm, ResNet8, ResNet18, Shape, Stem

FAMILIES: dict[str, type[Body]] = {"cnn": CNN, "resnet8": ResNet8, "resnet18": ResNet18, "vgg19": VGG19}

PLAIN = {"width": 1.0, "stem": "cifar", "norm": "none", "conv_bias": True}
"""What only the image families can vary, as it stands when nobody has."""


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
    with seeded(seed):
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
    with seeded(seed_of(rest["seed"], "stem")):
        model = Split(Extractor(channels), inner)
    model.spec = {**inner.spec, "name": name, "input_shape": [channels, height, width]}
    return cast(Model, model)  # all that is asked of a model but head and features


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
def seeded(seed: int) -> Iterator[None]:
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
