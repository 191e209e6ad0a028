"""A wide convolution's weight gradient by tiles: torch's numbers, where it pays, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedet.models import build, winograd
from fedet.models.winograd import TiledConv2d, pays, weight_gradient


@settings(max_examples=60, deadline=None)
@given(
    height=st.sampled_from([2, 4, 6, 10]),
    width=st.sampled_from([2, 4, 8]),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    images=st.integers(1, 7),
    piece=st.sampled_from([1, 3, 64]),
)
def test_the_weight_gradient_is_torchs(height, width, inputs, outputs, images, piece):
    random = torch.Generator().manual_seed(height + 10 * width + 100 * inputs + images)
    x = torch.randn(images, inputs, height, width, generator=random, dtype=torch.float64)
    g = torch.randn(images, outputs, height, width, generator=random, dtype=torch.float64)
    expected = torch.nn.grad.conv2d_weight(x, (outputs, inputs, 3, 3), g, padding=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "PIECE", piece)
        patch.setattr(winograd, "_to_taps", lambda real=winograd._to_taps: real().double())
        found = weight_gradient(x.permute(0, 2, 3, 1).contiguous(), g.permute(0, 2, 3, 1).contiguous())
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "side"), [(128, 256, 8), (256, 256, 4)])
def test_all_gradients_are_a_convolutions(inputs, outputs, side, last, bias):
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    conv = TiledConv2d(inputs, outputs, 3, padding=1, bias=bias).to(memory_format=layout)
    x = torch.randn(3, inputs, side, side).contiguous(memory_format=layout).requires_grad_()
    g = torch.randn(3, outputs, side, side)
    found, expected = (
        [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], g)]
        for y in (conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))
    )
    assert type(conv(x).grad_fn).__name__ == "_TiledBackward"
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("side", "weight", "stride", "so"),
    [
        ((8, 8), (256, 256, 3, 3), (1, 1), True),
        ((4, 4), (512, 256, 3, 3), (1, 1), True),
        ((8, 8), (256, 256, 3, 3), (2, 2), False),
        ((16, 16), (256, 256, 3, 3), (1, 1), False),
        ((7, 8), (256, 256, 3, 3), (1, 1), False),
        ((2, 2), (512, 512, 3, 3), (1, 1), False),
        ((8, 8), (128, 128, 3, 3), (1, 1), False),
        ((8, 8), (256, 256, 1, 1), (1, 1), False),
    ],
)
def test_when_it_is_done_so(side, weight, stride, so):
    assert pays(side, weight, stride, (1, 1)) is so


def test_predictions_and_frozen_weights_take_no_tiles():
    conv = TiledConv2d(256, 256, 3, padding=1)
    x = torch.randn(1, 256, 4, 4)
    with torch.no_grad():
        assert conv(x).grad_fn is None
    conv.weight.requires_grad_(False)
    assert type(conv(x).grad_fn).__name__ == "ConvolutionBackward0"


def test_a_paper_sized_resnet_uses_it_and_a_desk_sized_one_does_not(monkeypatch):
    used = []
    real = winograd.weight_gradient
    monkeypatch.setattr(winograd, "weight_gradient", lambda *a: used.append(1) or real(*a))
    build("resnet8")(torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(used) == 2  # the second convolutions of the last two stages; the first have a stride
    used.clear()
    build("resnet8", width=0.25)(torch.randn(2, 3, 32, 32)).sum().backward()
    assert not used
    assert isinstance(next(m for m in build("resnet8").body.blocks.modules() if isinstance(m, nn.Conv2d)), TiledConv2d)
