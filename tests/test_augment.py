"""The public transform: each operation by hand, against colorsys, from the seed, and image by image."""

from __future__ import annotations

import colorsys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedet.config import AugmentConfig
from fedet.data import augment


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 16, channels: int = 3, size: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=seeded(seed))


def colour(*rgb: float) -> Tensor:
    return torch.tensor(rgb)[None, :, None, None]


def one(value: float) -> Tensor:
    return torch.tensor([value])


OFF = {"crop": 0, "flip": False, "color": 0.0, "gray": 0.0}


def transformed(x: Tensor, cfg: AugmentConfig, generator: torch.Generator) -> Tensor:
    return augment.transform(x, cfg, augment.draw(len(x), cfg, generator))


def drawn(n: int, **asked: float) -> augment.Draws:
    return augment.draw(n, AugmentConfig(**OFF | asked), seeded())


colours = st.tuples(*[st.integers(0, 255).map(lambda v: v / 255)] * 3)


@given(rgb=colours)
def test_the_hue_is_that_of_colorsys(rgb: tuple[float, float, float]) -> None:
    h, s, v = colorsys.rgb_to_hsv(*rgb)
    angle, spread, value = (t.item() for t in augment._hue_spread_value(colour(*rgb)))
    assert (angle % 1, spread, value) == pytest.approx((h, s * v, v), abs=1e-5)


@given(rgb=colours, shift=st.floats(-0.2, 0.2))
def test_hue_is_that_of_colorsys(rgb: tuple[float, float, float], shift: float) -> None:
    h, s, v = colorsys.rgb_to_hsv(*rgb)
    expected = colorsys.hsv_to_rgb((h + shift) % 1, s, v)
    assert augment.hue(colour(*rgb), one(shift)).flatten().tolist() == pytest.approx(expected, abs=1e-4)


def test_a_third_of_a_turn_makes_red_green() -> None:
    assert augment.hue(colour(1.0, 0, 0), one(1 / 3)).flatten().tolist() == pytest.approx([0, 1, 0], abs=1e-6)


def test_gray_stays_gray_under_hue_and_saturation() -> None:
    gray = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).expand(-1, 3, -1, -1)
    assert torch.allclose(augment.hue(gray, one(0.17)), gray, atol=1e-6)
    assert torch.allclose(augment.saturation(gray, one(1.8)), gray, atol=2e-4)


@pytest.mark.parametrize("operation", [augment.brightness, augment.contrast, augment.saturation])
def test_factor_one_changes_nothing(operation: object) -> None:
    x = images() / 255
    assert torch.allclose(operation(x, torch.ones(16)), x, atol=1e-6)  # type: ignore[operator]
    assert torch.allclose(augment.hue(x, torch.zeros(16)), x, atol=1e-5)


def test_brightness_by_hand() -> None:
    assert augment.brightness(colour(0.1, 0.5, 0.9), one(1.5)).flatten().tolist() == pytest.approx([0.15, 0.75, 1.0])


def test_contrast_by_hand() -> None:
    x = torch.tensor([0.2, 0.6]).reshape(1, 1, 1, 2)
    assert augment.contrast(x, one(0.5)).flatten().tolist() == pytest.approx([0.3, 0.5])
    red = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]).reshape(1, 3, 1, 2)  # mean gray .2989 / 2
    assert augment.contrast(red, one(0.0)).flatten().tolist() == pytest.approx([0.14945] * 6)


def test_saturation_by_hand() -> None:
    luma = 0.2989 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    assert augment.saturation(colour(0.2, 0.4, 0.6), one(0.0)).flatten().tolist() == pytest.approx([luma] * 3)
    half = [luma + 0.5 * (v - luma) for v in (0.2, 0.4, 0.6)]
    assert augment.saturation(colour(0.2, 0.4, 0.6), one(0.5)).flatten().tolist() == pytest.approx(half)


def test_grayscale_weights_and_probability() -> None:
    x = colour(0.2, 0.4, 0.6).expand(4000, -1, -1, -1)
    out = augment.grayscale(x.clone(), drawn(4000, gray=0.2).gray)
    gray = (out[:, 0] == out[:, 1]).flatten()
    assert gray.float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert out[gray][0].flatten().tolist() == pytest.approx([0.36298] * 3)
    assert torch.equal(out[~gray], x[~gray])


def test_crop_by_hand() -> None:
    x = torch.arange(1.0, 10).reshape(1, 1, 3, 3).repeat(3, 2, 1, 1)
    out = augment.crop(x, 1, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    assert out[0, 0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 4, 5]]
    assert out[1, 1].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert out[2, 1].tolist() == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]


def test_random_crop_takes_every_place_equally() -> None:
    x = torch.arange(1.0, 10).reshape(1, 1, 3, 3).expand(9000, -1, -1, -1)
    corner = drawn(9000, crop=1).corner
    centre = augment.crop(x, 1, corner[:, 0], corner[:, 1])[:, 0, 1, 1].long()
    counts = torch.bincount(centre, minlength=10)[1:]
    assert counts.sum() == 9000
    assert (counts - 1000).abs().max() < 150


def test_flip_mirrors_half() -> None:
    x = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 1, 2).expand(4000, -1, -1, -1)
    out = transformed(x, AugmentConfig(**OFF | {"flip": True}), seeded())
    assert set(map(tuple, out[:, 0, 0].tolist())) == {(-1, 1), (1, -1)}
    assert (out[:, 0, 0, 0] == 1).float().mean().item() == pytest.approx(0.5, abs=0.04)


def test_jitter_touches_its_share_of_images() -> None:
    x = (images(2000, size=4) / 255).float()
    changed = (augment.color_jitter(x.clone(), drawn(2000, color=1.0, color_prob=0.8)) != x).flatten(1).any(dim=1)
    assert changed.float().mean().item() == pytest.approx(0.8, abs=0.04)


def test_jitter_factors_have_the_papers_range(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    for name in ("brightness", "contrast", "saturation", "hue"):
        monkeypatch.setattr(augment, name, lambda x, f, name=name: (seen.setdefault(name, []).append(f), x)[1])
    augment.color_jitter(torch.rand(20000, 3, 1, 1), drawn(20000, color=1.0, color_prob=1.0))
    ranges = {"brightness": (0.2, 1.8), "contrast": (0.2, 1.8), "saturation": (0.2, 1.8), "hue": (-0.2, 0.2)}
    for name, (low, high) in ranges.items():
        factors = torch.cat(seen[name])
        assert len(factors) == 20000, name
        assert low <= factors.min() < low + 0.01
        assert high - 0.01 < factors.max() <= high
        assert factors.mean().item() == pytest.approx((low + high) / 2, abs=0.02)


def test_each_image_has_an_order_of_operations_of_its_own() -> None:
    draws = drawn(20000, color=1.0, color_prob=1.0)
    assert torch.equal(draws.order.sort(dim=1).values, torch.arange(4).expand(20000, 4))
    for step in range(4):
        assert torch.bincount(draws.order[:, step]).tolist() == pytest.approx([5000] * 4, abs=300)
    x = torch.rand(50, 3, 4, 4)
    few = draws.select(torch.arange(50))
    by_hand = x.clone()
    operations = (augment.brightness, augment.contrast, augment.saturation, augment.hue)
    for i in range(50):
        for number in few.order[i].tolist():
            by_hand[i : i + 1] = operations[number](by_hand[i : i + 1], few.factors[i : i + 1, number])
    assert torch.allclose(augment.color_jitter(x, few), by_hand, atol=1e-6)


def test_strong_jitter_never_has_negative_factors() -> None:
    x = torch.full((500, 3, 2, 2), 0.5)
    out = augment.color_jitter(x, drawn(500, color=5.0, color_prob=1.0))
    assert ((out >= 0) & (out <= 1)).all()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    channels=st.sampled_from([1, 2, 3]),
    strength=st.floats(0, 2),
    crop=st.integers(0, 5),
)
def test_output_is_normalised_float_in_range(seed: int, channels: int, strength: float, crop: int) -> None:
    out = transformed(images(9, channels, seed=seed), AugmentConfig(crop=crop, color=strength), seeded(seed))
    assert out.dtype == torch.float32
    assert out.shape == (9, channels, 8, 8)
    assert out.min() >= -1 - 1e-5
    assert out.max() <= 1 + 1e-5


def test_without_any_operation_it_only_normalises() -> None:
    off = AugmentConfig(**OFF)
    x = images()
    assert torch.equal(transformed(x, off, seeded()), (x.float() / 255 - 0.5) / 0.5)


def test_the_seed_decides() -> None:
    x = images()
    first, again, other = (transformed(x, AugmentConfig(), seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    x, y = images(), images(seed=9)
    mixed = torch.cat([x[:8], y[8:]])
    first, second = (transformed(batch, AugmentConfig(), seeded(4)) for batch in (x, mixed))
    assert torch.equal(first[:8], second[:8])
    assert not torch.equal(first[8:], second[8:])


def test_images_have_random_numbers_of_their_own() -> None:
    same = images(1).expand(12, -1, -1, -1)
    out = transformed(same, AugmentConfig(), seeded())
    assert len({tuple(image.flatten().tolist()) for image in out}) == 12


def test_one_channel_is_jittered_without_colour() -> None:
    x = images(channels=1)
    out = transformed(x, AugmentConfig(crop=0, flip=False, color_prob=1), seeded())
    assert out.shape == x.shape
    assert not torch.allclose(out, (x.float() / 255 - 0.5) / 0.5)


def test_saturation_hue_and_gray_leave_one_channel_alone() -> None:
    x = images(channels=1)
    draws = augment.draw(len(x), AugmentConfig(**OFF | {"color": 1.0, "color_prob": 1.0, "gray": 1.0}), seeded())
    draws.factors[:, :2] = 1  # brightness and contrast unchanged
    out = augment.transform(x, AugmentConfig(**OFF), draws)
    assert torch.allclose(out, augment.normalise(x.float() / 255), atol=1e-6)


def test_one_channel_is_cropped_and_flipped_like_three() -> None:
    x, cfg = images(channels=1), AugmentConfig(color=0, gray=0)
    assert torch.equal(transformed(x, cfg, seeded()).expand(-1, 3, -1, -1), transformed(x.expand(-1, 3, -1, -1), cfg, seeded()))
