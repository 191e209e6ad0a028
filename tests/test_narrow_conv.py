"""Convolutions with few channels, with and without a pool: the results, gradients, names and counts of torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedet.models import build, count_macs
from fedet.models.kernels import narrow_conv
from fedet.models.kernels.narrow_conv import NarrowConv2d, PooledConv, Window, applies, window


def results(function, x, conv, g):
    """Output and gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], g)]


@pytest.fixture(params=[8, 16], ids=["8 lanes", "16 lanes"], autouse=True)
def lanes(request, monkeypatch):
    monkeypatch.setattr(narrow_conv, "LANES", request.param)
    return request.param


def both(conv, x, seed=0):
    def plain(x):
        return F.relu(F.max_pool2d(conv(x), 2, ceil_mode=True))

    g = torch.randn(plain(x).shape, generator=torch.Generator().manual_seed(seed))
    return results(plain, x, conv, g), results(PooledConv(conv, nn.Identity()), x, conv, g)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    height=st.integers(16, 24),
    width=st.integers(16, 24),
    kernel=st.sampled_from([1, 3, 5]),
    padding=st.integers(0, 2),
    inputs=st.sampled_from([1, 3, 4]),
    outputs=st.sampled_from([1, 6, 8, 9]),
    batch=st.integers(1, 3),
    last=st.booleans(),
)
def test_equals_a_convolution_a_pool_and_a_relu(height, width, kernel, padding, inputs, outputs, batch, last):
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, kernel, padding=padding)
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(batch, inputs, height, width).contiguous(memory_format=layout)
    expected, found = both(conv.to(memory_format=layout), x)
    assert [t.shape for t in expected] == [t.shape for t in found]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(expected, found, strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    height=st.integers(5, 14),
    width=st.integers(5, 14),
    kernel=st.sampled_from([1, 3, (3, 5), 5]),
    inputs=st.sampled_from([1, 6, 9]),
    bias=st.booleans(),
    last=st.booleans(),
)
def test_a_narrow_convolution_equals_a_convolution(height, width, kernel, inputs, bias, last):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    conv = NarrowConv2d(inputs, 16, kernel, bias=bias).to(memory_format=layout)
    x = torch.randn(3, inputs, height, width).contiguous(memory_format=layout)
    g = torch.randn_like(conv(x))
    expected = results(lambda x: F.conv2d(x, conv.weight, conv.bias), x, conv, g)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(expected, results(conv, x, conv, g), strict=True))


def test_the_window_depends_on_the_lanes_of_the_cpu():
    assert window(6, (5, 5), 8) == Window(2, 2)
    assert window(6, (5, 5), 16) == Window(1, 2)


def test_of_equals_the_first_gets_the_gradient():
    conv = nn.Conv2d(1, 2, 1)
    nn.init.ones_(conv.weight)
    nn.init.ones_(conv.bias)
    x = torch.zeros(1, 1, 16, 16)  # four equals everywhere
    x[:, :, 0, 1], x[:, :, 1, 0] = 1.0, 1.0  # two equals across
    x[:, :, 3, 2], x[:, :, 3, 3] = 2.0, 2.0
    expected, found = both(conv, x)
    assert all(torch.equal(a, b) for a, b in zip(expected[:2], found[:2], strict=True))
    assert (found[1] != 0).sum() == 64  # one of each window


def test_nan_is_passed_on():
    x = torch.zeros(1, 3, 32, 32)
    x[0, 0, 5, 5] = torch.nan
    assert PooledConv(nn.Conv2d(3, 6, 5), nn.Identity())(x).isnan().any()


@pytest.mark.parametrize(
    ("side", "weight", "padding", "expected"),
    [
        ((32, 32), (6, 3, 5, 5), 0, True),
        ((28, 28), (6, 1, 5, 5), 0, True),
        ((8, 8), (6, 1, 5, 5), 2, False),
        ((31, 32), (6, 3, 5, 5), 0, False),
        ((32, 32), (12, 3, 5, 5), 0, False),
    ],
)
def test_when_it_applies(side, weight, padding, expected):
    assert applies(side, weight, padding) is expected


def test_the_cnn_counts_and_names_as_before():
    model = build("cnn")
    assert [name for name, _ in model.named_parameters()][:4] == [
        f"body.convs.{place}.0.{kind}" for place in (0, 3) for kind in ("weight", "bias")
    ]
    assert count_macs(model.body.convs[0], (3, 32, 32)) == 6 * 28 * 28 * 75
    assert isinstance(build("cnn", norm="group").body.convs[0], PooledConv)
