"""All kernels together: constants that survive a prediction before the first training, and the switch back to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedet import train
from fedet.config import ModelSpec
from fedet.errors import ConfigError
from fedet.models import ModelCache, build, kernels
from fedet.models.kernels import narrow_conv, small_map_conv, switch, winograd
from fedet.models.kernels.narrow_conv import PooledConv
from fedet.models.vision import Residual

MODELS = [
    ("cnn", (1, 8, 8), {}),
    ("cnn", (3, 32, 32), {}),
    ("resnet8", (3, 32, 32), {"width": 0.125}),
    ("resnet8", (3, 32, 32), {"width": 0.125, "stem": "imagenet"}),
    ("resnet8", (3, 32, 32), {"stem": "imagenet"}),
    ("resnet18", (3, 16, 16), {"width": 0.125}),
    ("resnet18", (3, 32, 32), {"width": 0.125, "stem": "imagenet"}),
    ("resnet18", (3, 8, 8), {"width": 1.0}),
    ("vgg19", (1, 8, 8), {"width": 0.125}),
    ("vgg19", (3, 32, 32), {"width": 0.25}),
]
each_model = pytest.mark.parametrize(("name", "shape", "variant"), MODELS)


@pytest.fixture(autouse=True)
def _cold_caches_and_default_switch(monkeypatch):
    monkeypatch.delenv(switch.VARIABLE, raising=False)
    monkeypatch.setattr(switch, "_chosen", None)
    for module in (narrow_conv, small_map_conv, winograd):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


class Images:
    def __init__(self, shape, n=8):
        g = torch.Generator().manual_seed(0)
        self.x, self.labels = torch.randn(n, *shape, generator=g), torch.arange(n) % 10

    def __len__(self):
        return len(self.x)

    def inputs(self, index):
        return self.x[index]

    def batch(self, index):
        return self.x[index], self.labels[index]


def small(name, shape, variant):
    return build(name, input_shape=shape, feature_width=16, representation_width=8, **variant)


def opened(model):
    """The model with residual branches that are not zero, which would hide what is in them."""
    for block in model.modules():
        if isinstance(block, Residual):
            nn.init.normal_(block.second[0].weight, std=0.02)
    return model


@each_model
def test_a_model_can_be_trained_after_a_prediction(name, shape, variant):
    """A server may evaluate an architecture before its first client trains it."""
    model, data = small(name, shape, variant), Images(shape)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    logits = train.predict(model, data)
    assert not logits.is_inference()
    train.fit(model, data, train.Training(lr=0.01, batch=4, steps=2), seed=0)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@each_model
def test_a_prediction_first_changes_no_bit_of_the_training(name, shape, variant):
    data, found = Images(shape), []
    for predict_first in (True, False):
        model = small(name, shape, variant)
        if predict_first:
            train.predict(model, data)
        train.fit(model, data, train.Training(lr=0.01, batch=4, steps=2), seed=0)
        found.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in found), strict=True))


def test_constants_first_made_in_inference_mode_are_ordinary_tensors():
    with torch.inference_mode(), torch.device("meta"):
        indices, _ = small_map_conv.kernel_indices((2, 2), (3, 3), 1, 1)
        plan = winograd.plan(8, 2, torch.float32)
    ranges = [matrix for r in (*plan.rows, *plan.columns) for matrix in (r.input_transform, r.output_transform)]
    for tensor in (indices, plan.filter_transform, *ranges):
        assert not tensor.is_inference()
        assert tensor.is_cpu


def test_weights_first_loaded_in_inference_mode_can_be_trained():
    specs = {"cnn": ModelSpec(name="cnn")}
    cache = ModelCache(specs, num_classes=10, input_shape=(1, 8, 8), feature_width=16, representation_width=8, seed=0)
    with torch.inference_mode():
        model = cache.load("cnn", cache.initial("cnn"))
    assert not any(tensor.is_inference() for tensor in [*cache.initial("cnn").values(), *model.parameters()])
    train.fit(model, Images((1, 8, 8)), train.Training(lr=0.01, batch=4, steps=1), seed=0)


# The switch


class PoolThenReLU(nn.Sequential):
    def forward(self, x):
        return F.relu(F.max_pool2d(super().forward(x), 2, ceil_mode=True))


def plain(model):
    """The same model with `nn.Conv2d` throughout."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.__class__ = nn.Conv2d
        elif isinstance(layer, PooledConv):
            layer.__class__ = PoolThenReLU
    return model


def results(model, data):
    logits = model(data.x)
    F.cross_entropy(logits, data.labels).backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


KERNELS = [
    (winograd._Winograd, "apply"),
    (small_map_conv._Blocks, "apply"),
    (small_map_conv, "_dense"),
    (small_map_conv, "algorithm"),
    (narrow_conv._Pooled, "apply"),
    (narrow_conv._Narrow, "apply"),
]


def watch(monkeypatch):
    """The names of the kernels that are called from now on."""
    used = set()
    for owner, name in KERNELS:
        real = getattr(owner, name)
        label = f"{owner.__name__}.{name}"
        monkeypatch.setattr(owner, name, lambda *a, real=real, label=label: used.add(label) or real(*a))
    return used


@pytest.mark.parametrize("how", ["variable", "function"])
@each_model
def test_with_torchs_kernels_every_family_computes_what_plain_convolutions_do(name, shape, variant, how, monkeypatch):
    used = watch(monkeypatch)
    if how == "variable":
        monkeypatch.setenv(switch.VARIABLE, "torch")
    else:
        kernels.use("torch")
    data = Images(shape)
    model, reference = (opened(small(name, shape, variant)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    found, expected = results(model, data), results(plain(reference), data)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not used


def test_without_the_switch_every_kernel_is_used_by_some_family(monkeypatch):
    used = watch(monkeypatch)
    for model in MODELS:
        results(small(*model), Images(model[1]))
    assert used == {f"{owner.__name__}.{name}" for owner, name in KERNELS}


def test_the_switch_can_be_set_back(monkeypatch):
    kernels.use("torch")
    assert not kernels.enabled()
    kernels.use("fedet")
    assert kernels.enabled()


def test_an_unknown_choice_is_refused_when_a_model_is_built(monkeypatch):
    monkeypatch.setenv(switch.VARIABLE, "mkl")
    with pytest.raises(ConfigError, match="FEDET_KERNELS=mkl is not available: set it to fedet or torch"):
        build("cnn", input_shape=(1, 8, 8))
    with pytest.raises(ConfigError, match="'mkl' are not available: use fedet or torch"):
        kernels.use("mkl")
