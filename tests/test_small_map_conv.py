"""Convolutions on small maps: the results, gradients and names of `nn.Conv2d`, without the products with padding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedet.models import build, count_macs, vision
from fedet.models.kernels import small_map_conv
from fedet.models.kernels.small_map_conv import SmallMapConv2d


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def results(conv, function, x, g):
    """Output and gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    wanted = [x, *conv.parameters()]
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, wanted, g)]


def layer(inputs, outputs, kernel, stride, padding, bias, seed=0):
    torch.manual_seed(seed)
    return SmallMapConv2d(inputs, outputs, kernel, stride, padding, bias=bias).to(memory_format=torch.channels_last)


def close(a, b):
    """To rounding, which is that of the largest numbers."""
    sizes = [max(1.0, float(y.abs().max())) for y in b]
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-5 * size) for x, y, size in zip(a, b, sizes, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    kernel=st.sampled_from([1, 2, 3, 5]),
    stride=st.sampled_from([1, 2, 3]),
    padding=st.integers(0, 2),
    inputs=st.sampled_from([1, 3, 40]),
    outputs=st.sampled_from([1, 4, 48]),
    batch=st.integers(1, 3),
    bias=st.booleans(),
    last=st.booleans(),
)
def test_equals_a_convolution(height, width, kernel, stride, padding, inputs, outputs, batch, bias, last):
    if min(height, width) + 2 * padding < kernel:
        return
    conv = layer(inputs, outputs, kernel, stride, padding, bias)
    x = torch.randn(batch, inputs, height, width)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    plain = F.conv2d(x, conv.weight, conv.bias, stride, padding)
    g = torch.randn(plain.shape)
    expected = results(conv, lambda x: F.conv2d(x, conv.weight, conv.bias, stride, padding), x, g)
    assert close(expected, results(conv, conv, x, g))


@pytest.mark.parametrize(
    ("side", "channels", "stride", "expected"),
    [
        (1, (512, 512), 1, "blocks"),
        (2, (256, 512), 2, "blocks"),
        (2, (256, 256), 1, "blocks"),
        (4, (128, 256), 2, "blocks"),
        (4, (128, 128), 1, "default"),
        (8, (64, 64), 1, "default"),
        (1, (64, 64), 1, "dense"),
        (2, (32, 32), 1, "dense"),
        (4, (16, 32), 2, "dense"),
        (8, (8, 8), 1, "default"),
    ],
)
def test_which_algorithm_is_chosen(side, channels, stride, expected):
    inputs, outputs = channels
    assert small_map_conv.algorithm((side, side), (outputs, inputs, 3, 3), stride, 1) == expected
    conv = layer(inputs, outputs, 3, stride, 1, True)
    x = torch.randn(2, inputs, side, side).contiguous(memory_format=torch.channels_last)
    g = torch.randn_like(plain := F.conv2d(x, conv.weight, conv.bias, stride, 1))
    assert conv(x).is_contiguous(memory_format=torch.channels_last)
    assert plain.shape == conv(x).shape
    assert close(results(conv, lambda x: F.conv2d(x, conv.weight, conv.bias, stride, 1), x, g), results(conv, conv, x, g))


def test_a_kernel_that_can_lie_outside_of_the_map_is_left_to_torch():
    assert small_map_conv.algorithm((1, 1), (512, 512, 1, 1), 1, 1) == "default"


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (300, 300)], ids=["dense", "blocks"])
@pytest.mark.parametrize(("side", "stride", "reached"), [(1, 1, 1), (2, 2, 4), (2, 1, 9)])
def test_weights_that_never_overlap_the_map_get_a_zero_gradient(inputs, outputs, side, stride, reached):
    conv = layer(inputs, outputs, 3, stride, 1, False)
    conv(torch.randn(4, inputs, side, side)).square().sum().backward()
    moved = conv.weight.grad.abs().sum(dim=(0, 1)) > 0
    assert int(moved.sum()) == reached
    assert torch.equal(conv.weight.grad[:, :, ~moved], torch.zeros(outputs, inputs, 9 - reached))
    assert conv.weight.grad.stride() == conv.weight.stride()


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize(("name", "stem"), [("resnet8", "imagenet"), ("resnet18", "imagenet"), ("vgg19", "cifar")])
def test_models_are_as_with_plain_convolutions(name, stem, norm, monkeypatch):
    ours = build(name, width=0.25, stem=stem, norm=norm)
    monkeypatch.setattr(vision, "SmallMapConv2d", nn.Conv2d)
    plain = build(name, width=0.25, stem=stem, norm=norm)
    assert any(isinstance(layer, SmallMapConv2d) for layer in ours.modules())
    assert not any(isinstance(layer, SmallMapConv2d) for layer in plain.modules())
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [(k, v.shape) for k, v in plain.state_dict().items()]
    assert count_macs(ours, (3, 32, 32)) == count_macs(plain, (3, 32, 32))
    for block in ours.modules():  # closed branches would hide what is behind them
        if isinstance(block, vision.Residual):
            nn.init.normal_(block.second[0].weight, std=0.02)
    plain.load_state_dict(ours.state_dict())
    x, y = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.arange(8)  # in single precision a ReLU may switch
    found = []
    for model in (ours.double(), plain.double()):
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["resnet18", "vgg19"])
def test_the_same_bits_every_time(name):
    model = build(name, width=0.25, stem="imagenet" if name == "resnet18" else "cifar")
    x = torch.randn(8, 3, 32, 32)
    first, second = (torch.autograd.grad(model(x).square().sum(), list(model.parameters())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.inference_mode():
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(3, stride=2, padding=1)])
def test_pooling_before_relu_changes_no_bit(pool):
    conv = layer(3, 8, 3, 1, 1, True)
    x = torch.randn(4, 3, 15, 15).round(decimals=1)  # with many ties
    g = torch.randn(4, 8, 8, 8)
    before = results(conv, lambda x: pool(F.relu(conv(x))), x, g)
    after = results(conv, lambda x: F.relu(pool(conv(x))), x, g)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
