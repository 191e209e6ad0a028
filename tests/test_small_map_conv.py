"""Live taps: a convolution's numbers, gradients and names, without the products with padding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedet import train
from fedet.models import build, count_macs, vision
from fedet.models.kernels import small_map_conv
from fedet.models.kernels.small_map_conv import LiveConv2d


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
    return LiveConv2d(inputs, outputs, kernel, stride, padding, bias=bias).to(memory_format=torch.channels_last)


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
    ("side", "channels", "stride", "way"),
    [
        (1, (512, 512), 1, "blocks"),
        (2, (256, 512), 2, "blocks"),
        (2, (256, 256), 1, "blocks"),
        (4, (128, 256), 2, "blocks"),
        (4, (128, 128), 1, "plain"),
        (8, (64, 64), 1, "plain"),
        (1, (64, 64), 1, "table"),
        (2, (32, 32), 1, "table"),
        (4, (16, 32), 2, "table"),
        (8, (8, 8), 1, "plain"),
    ],
)
def test_which_way_is_taken(side, channels, stride, way):
    inputs, outputs = channels
    assert small_map_conv.way((side, side), (outputs, inputs, 3, 3), stride, 1) == way
    conv = layer(inputs, outputs, 3, stride, 1, True)
    x = torch.randn(2, inputs, side, side).contiguous(memory_format=torch.channels_last)
    g = torch.randn_like(plain := F.conv2d(x, conv.weight, conv.bias, stride, 1))
    assert conv(x).is_contiguous(memory_format=torch.channels_last)
    assert plain.shape == conv(x).shape
    assert close(results(conv, lambda x: F.conv2d(x, conv.weight, conv.bias, stride, 1), x, g), results(conv, conv, x, g))


def test_a_kernel_that_may_see_padding_only_is_left_to_torch():
    assert small_map_conv.way((1, 1), (512, 512, 1, 1), 1, 1) == "plain"


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (300, 300)], ids=["table", "blocks"])
@pytest.mark.parametrize(("side", "stride", "live"), [(1, 1, 1), (2, 2, 4), (2, 1, 9)])
def test_dead_taps_get_the_gradient_zero(inputs, outputs, side, stride, live):
    conv = layer(inputs, outputs, 3, stride, 1, False)
    conv(torch.randn(4, inputs, side, side)).square().sum().backward()
    moved = conv.weight.grad.abs().sum(dim=(0, 1)) > 0
    assert int(moved.sum()) == live
    assert torch.equal(conv.weight.grad[:, :, ~moved], torch.zeros(outputs, inputs, 9 - live))
    assert conv.weight.grad.stride() == conv.weight.stride()


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize(("name", "stem"), [("resnet8", "imagenet"), ("resnet18", "imagenet"), ("vgg19", "cifar")])
def test_models_are_as_with_plain_convolutions(name, stem, norm, monkeypatch):
    live = build(name, width=0.25, stem=stem, norm=norm)
    monkeypatch.setattr(vision, "LiveConv2d", nn.Conv2d)
    plain = build(name, width=0.25, stem=stem, norm=norm)
    assert any(isinstance(layer, LiveConv2d) for layer in live.modules())
    assert not any(isinstance(layer, LiveConv2d) for layer in plain.modules())
    assert [(k, v.shape) for k, v in live.state_dict().items()] == [(k, v.shape) for k, v in plain.state_dict().items()]
    assert count_macs(live, (3, 32, 32)) == count_macs(plain, (3, 32, 32))
    for block in live.modules():  # closed branches would hide what is behind them
        if isinstance(block, vision.Residual):
            nn.init.normal_(block.second[0].weight, std=0.02)
    plain.load_state_dict(live.state_dict())
    x, y = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.arange(8)  # in single precision a ReLU may turn out otherwise
    found = []
    for model in (live.double(), plain.double()):
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


class Images:
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(16, 3, 32, 32, generator=g), torch.arange(16) % 10

    def __len__(self):
        return 16

    def batch(self, index):
        return self.x[index], self.y[index]


def near_the_start(model, data, index):
    """A loss that speaks of the weights, too, as FedProx's does."""
    return train.cross_entropy(model, data, index) + sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("loss", [train.cross_entropy, near_the_start])
@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"clip": 0.1}, {"weight_decay": 0.1}, {"optimiser": "adam"}])
def test_dead_taps_are_left_alone_without_changing_the_training(loss, how, monkeypatch):
    """Weights after some steps are those of training whole weights: to the bit, but for what sums over weights and taps."""
    found, lent, real = [], [], small_map_conv.Lender.taps
    for borrow in (lambda self, *where: lent.append(1) or real(self, *where), lambda self, *where: None):
        monkeypatch.setattr(small_map_conv.Lender, "taps", borrow)
        model = build("resnet8", width=0.7, stem="imagenet")
        train.fit(model, Images(), train.Training(lr=0.01, batch=8, steps=3, **how), seed=0, loss=loss)
        found.append(model.state_dict())
        assert all(layer.lender is None for layer in model.modules() if isinstance(layer, LiveConv2d))
    assert bool(lent) is ("weight_decay" not in how and "optimiser" not in how)
    same = torch.equal if loss is train.cross_entropy and "clip" not in how else lambda a, b: torch.allclose(a, b, atol=1e-6)
    assert all(same(a, b) for a, b in zip(*(state.values() for state in found), strict=True))


def test_on_maps_of_another_size_the_whole_weight_is_trained():
    conv = layer(300, 300, 3, 1, 1, False)
    trained = []
    with small_map_conv.lent(conv, trained) as lender:
        (conv(torch.randn(2, 300, 1, 1)).sum() + conv(torch.randn(2, 300, 2, 2)).sum()).backward()
        assert len(trained) == 1
        alone = conv.weight.grad.clone(), trained[0].grad
        lender.settle()
    assert trained[0].grad is None
    assert torch.equal(conv.weight.grad[:, :, 1, 1], alone[0][:, :, 1, 1] + alone[1][:, 0, 0])
    assert torch.equal(conv.weight.grad[:, :, 0], alone[0][:, :, 0])
