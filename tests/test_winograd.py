"""Winograd convolutions: the results of `nn.Conv2d` where they are faster, and not used elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedet.models import build
from fedet.models.kernels import winograd
from fedet.models.kernels.winograd import WinogradConv2d, applies, transforms


def both(x, weight, g):
    """Output and gradients with Winograd's algorithm, and with torch."""
    for y in (winograd._Winograd.apply(x, weight), F.conv2d(x, weight, padding=1)):
        yield [y.detach(), *torch.autograd.grad(y, [x, weight], g)]


def test_six_products_give_four_outputs_of_a_filter_of_three():
    found = torch.einsum("pi,pj,pk->ijk", *transforms())
    expected = torch.zeros(4, 6, 3, dtype=torch.float64)
    for output in range(4):
        for weight in range(3):
            expected[output, output + weight, weight] = 1
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    side=st.sampled_from([4, 8, 12, 16, 20, 32]),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    images=st.integers(1, 5),
    chunk=st.sampled_from([1, 12 * 25, winograd.CHUNK]),
    rows=st.sampled_from([1, 4, 64]),
)
def test_output_and_gradients_are_torchs(side, inputs, outputs, images, chunk, rows):
    random = torch.Generator().manual_seed(side + 100 * inputs + 1000 * outputs + images)
    x = torch.randn(images, inputs, side, side, generator=random, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outputs, inputs, 3, 3, generator=random, dtype=torch.float64, requires_grad=True)
    g = torch.randn(images, outputs, side, side, generator=random, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "CHUNK", chunk)
        patch.setattr(winograd, "ROWS_PER_THREAD", rows)
        for one, other in zip(*both(x, weight, g), strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("channels", "side"), [(64, 8), (128, 4), (256, 8), (128, 16)])
def test_it_rounds_like_a_convolution(channels, side):
    torch.manual_seed(0)
    x = torch.randn(16, channels, side, side).relu().requires_grad_()
    weight = torch.randn(channels, channels, 3, 3, requires_grad=True)
    g = torch.randn(16, channels, side, side)
    found, _ = both(x, weight, g)
    _, exact = both(*(t.detach().double().requires_grad_() for t in (x, weight)), g.double())
    for one, truth in zip(found, exact, strict=True):
        assert float((one - truth).norm() / truth.norm()) < 2e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("images", [3, 5])
def test_a_layer_is_a_convolution(images, last, bias, monkeypatch):
    monkeypatch.setattr(winograd, "CHUNK", 1)
    monkeypatch.setattr(winograd, "ROWS_PER_THREAD", 4)
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    conv = WinogradConv2d(128, 256, 3, padding=1, bias=bias).to(memory_format=layout)
    x = torch.randn(images, 128, 4, 4).contiguous(memory_format=layout).requires_grad_()
    g = torch.randn(images, 256, 4, 4)
    found, expected = (
        [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], g)]
        for y in (conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))
    )
    for one, other in zip(found, expected, strict=True):
        assert not torch.equal(one, other) or one.dim() == 1  # another algorithm was used
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("side", "weight", "stride", "expected"),
    [
        ((8, 8), (64, 64, 3, 3), (1, 1), True),
        ((4, 4), (128, 128, 3, 3), (1, 1), True),
        ((16, 16), (128, 64, 3, 3), (1, 1), True),
        ((8, 8), (256, 256, 3, 3), (2, 2), False),
        ((32, 32), (64, 64, 3, 3), (1, 1), True),
        ((4, 8), (256, 256, 3, 3), (1, 1), False),
        ((6, 6), (256, 256, 3, 3), (1, 1), False),
        ((2, 2), (512, 512, 3, 3), (1, 1), False),
        ((4, 4), (64, 64, 3, 3), (1, 1), False),
        ((16, 16), (128, 32, 3, 3), (1, 1), False),
        ((8, 8), (256, 256, 1, 1), (1, 1), False),
    ],
)
def test_when_it_applies(side, weight, stride, expected):
    assert applies(side, weight, stride, (1, 1)) is expected


@pytest.mark.parametrize("which", ["input", "weight"])
def test_only_the_gradients_that_are_asked_for(which):
    x, weight = torch.randn(2, 64, 8, 8), torch.randn(64, 64, 3, 3)
    asked = (x if which == "input" else weight).requires_grad_()
    found, expected = (
        torch.autograd.grad(y.square().sum(), asked)[0]
        for y in (winograd._Winograd.apply(x, weight), F.conv2d(x, weight, padding=1))
    )
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("images", "dtype"), [(0, torch.float32), (2, torch.bfloat16)], ids=["no image", "bfloat16"])
def test_what_is_left_to_torch(images, dtype):
    conv = WinogradConv2d(64, 64, 3, padding=1).to(dtype)
    x = torch.randn(images, 64, 8, 8, dtype=dtype)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))


def test_a_paper_sized_resnet_uses_it_and_a_desk_sized_one_does_not(monkeypatch):
    used = []
    real = winograd._Winograd.apply
    monkeypatch.setattr(winograd._Winograd, "apply", lambda *a: used.append(1) or real(*a))
    build("resnet8")(torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(used) == 5  # both convolutions of the first stage and the second ones of the others, which have no stride
    used.clear()
    build("resnet8", width=0.125)(torch.randn(2, 3, 32, 32)).sum().backward()
    assert not used
    assert isinstance(next(m for m in build("resnet8").body.blocks.modules() if isinstance(m, nn.Conv2d)), WinogradConv2d)
