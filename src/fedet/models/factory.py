"""Models by name: an image family in some variant, a text model, or a body of the user's own; and what each costs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedet.config import objects, plugins
from fedet.config.sources import suggested
from fedet.core import seed_of
from fedet.errors import ConfigError
from fedet.models import kernels, sizes, tabular, text
from fedet.models.model import Head, Model
from fedet.models.split import CHANNELS, SPLIT, Extractor, Split
from fedet.models.vision import CNN, VGG19, Body, Norm, ResNet8, ResNet18, Shape, Stem

FAMILIES: dict[str, type[Body]] = {"cnn": CNN, "resnet8": ResNet8, "resnet18": ResNet18, "vgg19": VGG19}

DEFAULT_VARIANT = {"width": 1.0, "stem": "cifar", "norm": "none", "conv_bias": True}
"""The settings that only image families have, and their defaults."""


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
    """Build a model of a family, or around a user's `module:callable`, with the initial weights of this seed."""
    variant = {"width": width, "stem": stem, "norm": norm, "conv_bias": conv_bias}
    widths = {"feature_width": feature_width, "representation_width": representation_width}
    if name.startswith(SPLIT):
        return _split(name, num_classes, input_shape, **variant, **widths, seed=seed, options=options)
    shape, given, common = tuple(input_shape), dict(options or {}), {"num_classes": num_classes, **widths}
    _check_variant(variant)
    _check_sizes(common, shape)
    kernels.enabled()  # report an invalid FEDET_KERNELS now rather than in the first forward pass
    large = sizes.unusual({**variant, **common}, shape, given)
    sizes.ensure_it_fits(name, large, lambda: Head(**common) if is_own(name) else _make(name, variant, given, shape, common)[0])
    with seeded(seed), sizes.allocating(name, large):
        model, used = _make(name, variant, given, shape, common)
    model.spec = {"name": name, **variant, "options": used, "input_shape": list(shape), **common}
    return model


def is_own(name: str) -> bool:
    """Whether this names a user's `module:callable`."""
    return ":" in name and not text.known(name)


def _make(
    name: str, variant: Mapping[str, Any], options: dict[str, Any], shape: Shape, common: Mapping[str, Any]
) -> tuple[Model, dict[str, Any]]:
    """The model, and the options that build it again."""
    if text.known(name):
        reader = _text_body(name, variant, options, shape)
        return Model(reader, reader.width, **common), reader.options
    if is_own(name):
        own = _own_body(name, variant, options, {"input_shape": shape, "num_classes": common["num_classes"]})
        return Model(own, _output_width(name, own, shape), **common), options
    if name == tabular.NAME:
        mlp = tabular.make(variant, options, shape)
        return Model(mlp, mlp.width, **common), options
    body = _family_body(name, variant, options, shape)
    return Model(body, body.width, **common), options


def _text_body(name: str, variant: Mapping[str, Any], options: Mapping[str, Any], shape: Shape) -> text.TextBody:
    if dict(variant) != DEFAULT_VARIANT:
        raise ConfigError(
            f"width, stem, norm and conv_bias have no effect on '{name}': configure a text model with options such as layers"
        )
    return text.make(name, options, shape)


def _split(name: str, num_classes: int, input_shape: Shape, **rest: Any) -> Model:
    """The named architecture on the features of a stem."""
    channels, height, width = input_shape
    inner = build(name.removeprefix(SPLIT), num_classes, input_shape=(CHANNELS, height, width), **rest)
    with seeded(seed_of(rest["seed"], "stem")):
        model = Split(Extractor(channels), inner)
    model.spec = {**inner.spec, "name": name, "input_shape": [channels, height, width]}
    return cast(Model, model)  # it has all of a model's interface but head and features


def describe(num_classes: int = 10, input_shape: Shape = (3, 32, 32)) -> list[dict[str, Any]]:
    """Each family's name, parameters, multiply-adds of one forward pass, and the width of its features."""
    rows: list[dict[str, Any]] = []
    for name in FAMILIES:
        with torch.device("meta"):  # sizes don't need values
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
    """Draw from this seed, and restore the caller's random state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs, for good
        yield


def _check_variant(variant: Mapping[str, Any]) -> None:
    for key, known in {"stem": ("cifar", "imagenet"), "norm": ("none", "group")}.items():
        if variant[key] not in known:
            raise ConfigError(f"{key} = {variant[key]!r} is not available: choose from {', '.join(known)}")
    width = variant["width"]
    if not (isinstance(width, int | float) and 0 < width < math.inf):
        raise ConfigError(f"width = {width!r} must be a number above 0: it scales the model's channels, and 1.0 keeps them")


def _check_sizes(common: Mapping[str, Any], shape: Shape) -> None:
    for key, values in {**{key: (value,) for key, value in common.items()}, "input_shape": shape}.items():
        if any(not isinstance(value, Integral) or value < 1 for value in values):
            given = values if key == "input_shape" else values[0]
            raise ConfigError(
                f"{key} = {given!r} must be {'positive integers' if key == 'input_shape' else 'a positive integer'}"
            )


def _family_body(name: str, variant: Mapping[str, Any], options: Mapping[str, Any], shape: Shape) -> Body:
    if name not in FAMILIES:
        names = [*FAMILIES, tabular.NAME, *text.NAMES]
        known, hint = ", ".join(names), suggested(name, names, "function or class")
        raise ConfigError(f"no model is called '{name}'{hint}; known: {known}, hf:PLACE or module:callable")
    if options:
        raise ConfigError(
            f"'{name}' takes no options ({', '.join(options)}): they are for mlp, text models and your own module:callable"
        )
    body = FAMILIES[name](shape, **variant)
    body.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # missing in torch's annotations
    return body


def _own_body(name: str, variant: Mapping[str, Any], options: dict[str, Any], offered: Mapping[str, Any]) -> nn.Module:
    if dict(variant) != DEFAULT_VARIANT:
        raise ConfigError(f"width, stem, norm and conv_bias have no effect on '{name}': configure your own model with options")
    factory = plugins.resolve(name, "model")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(
            f"'{objects.shown(name)}' is not a class or function: give one that returns a new module with each call"
        )
    wanted = {key: value for key, value in offered.items() if key in _parameters(factory)}
    try:
        body = factory(**{**wanted, **options})
    except Exception as error:
        raise ConfigError(f"'{name}' raised an error when called to build a model: {type(error).__name__}: {error}") from error
    if not isinstance(body, nn.Module):
        raise ConfigError(f"'{name}' returned an object of type {type(body).__name__}: it must return a torch.nn.Module")
    return body


def _parameters(factory: Any) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except ValueError:  # some callables written in C have no signature
        return set()


def _output_width(name: str, body: nn.Module, shape: Shape, dtype: torch.dtype | None = None) -> int:
    try:
        output = _dry_run(body, 2, shape, dtype)
    except Exception as error:
        if len(shape) == 1 and dtype is None:  # it may expect token ids
            return _output_width(name, body, shape, torch.int64)
        raise ConfigError(
            f"'{name}' does not run on a batch of shape {(2, *shape)}, the shape of the data: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(output, Tensor):
        raise ConfigError(f"'{name}' returns a {type(output).__name__}: its output must be one tensor (batch, ...)")
    if output.dim() < 2 or output.shape[0] != 2:
        raise ConfigError(
            f"'{name}' maps a batch of shape {(2, *shape)} to {tuple(output.shape)}: "
            "its output must have two or more dimensions, the batch first"
        )
    if output.dtype != torch.float32:
        raise ConfigError(f"'{name}' returns {str(output.dtype).removeprefix('torch.')}: its output must be float32")
    return output.flatten(1).shape[1]


def _dry_run(module: nn.Module, batch: int, shape: Shape, dtype: torch.dtype | None = None) -> Any:
    """Run on zeros in eval mode, without changing modes or running statistics."""
    modes = {layer: layer.training for layer in module.modules()}
    device = next((parameter.device for parameter in module.parameters()), None)
    try:
        with torch.no_grad():
            return module.eval()(torch.zeros(batch, *shape, device=device, dtype=dtype))
    finally:
        for layer, training in modes.items():
            layer.training = training
