"""Views and mixtures of the public inputs: what they contain, and that they depend on seed and round alone."""

import pytest
import torch

from fedet.config import AugmentConfig
from fedet.data import Public
from fedet.data.mix import MixedViews, draw_pairs, mixed
from fedet.errors import ConfigError

PLAIN = AugmentConfig(crop=0, flip=False, color=0.0, gray=0.0)
SHIFT = AugmentConfig(crop=1, flip=False, color=0.0, gray=0.0)


def images(n=12, size=6):
    return torch.randint(0, 256, (n, 1, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def public(augment=SHIFT, mode="per_round", pool=None, n=12):
    return Public(images(n) if pool is None else pool, torch.arange(n), augment, seed=3, mode=mode)


def everything(views, round=1):
    return views.subset(round, torch.arange(len(views))).inputs(torch.arange(len(views)))


def test_the_first_view_is_the_rounds_own_and_the_others_differ():
    found = everything(MixedViews(public(), 3), round=5).view(3, 12, 1, 6, 6)
    assert torch.equal(found[0], public().view(5).data)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_mixup_is_the_weighted_mean_of_a_pair():
    views = MixedViews(public(PLAIN), 1, "mixup", 1.0)
    found, own = everything(views), public(PLAIN).view(1).data
    pairs = draw_pairs(12, "mixup", 1.0, _seed(1, 0))
    share = pairs.share.view(-1, 1, 1, 1)
    torch.testing.assert_close(found, share * own + (1 - share) * own[pairs.partner])
    assert sorted(pairs.partner.tolist()) == list(range(12))


def test_cutmix_takes_a_rectangle_of_the_partners_share():
    size, n = 20, 300
    pairs = draw_pairs(n, "cutmix", 1.0, 0)
    out = mixed(torch.zeros(n, 2, size, size), torch.ones(n, 2, size, size), pairs, torch.empty(n, 2, size, size))
    assert set(out.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(out[:, 0], out[:, 1])
    area = out[:, 0].mean(dim=(1, 2))
    assert float((area - (1 - pairs.share)).abs().max()) < 2 / size
    covered = out[:, 0].any(dim=2).sum(dim=1) * out[:, 0].any(dim=1).sum(dim=1)
    assert torch.equal(covered, out[:, 0].sum(dim=(1, 2)).long())  # one rectangle each
    assert bool(out[:, 0].any(dim=0).all())  # it can be anywhere


def test_both_kinds_of_mixture_occur():
    kinds = draw_pairs(200, "both", 1.0, 0).rectangle
    assert 60 < int(kinds.sum()) < 140


def test_a_subset_has_the_values_of_the_whole_and_rounds_differ():
    rows = torch.tensor([0, 3, 7, 14, 23])
    whole = everything(MixedViews(public(), 2, "both"))
    assert torch.equal(MixedViews(public(), 2, "both").subset(1, rows).inputs(rows), whole[rows])
    assert not torch.equal(whole, everything(MixedViews(public(), 2, "both"), round=2))
    fixed = MixedViews(public(mode="fixed"), 1, "mixup")
    assert not torch.equal(everything(fixed, 1), everything(fixed, 2))  # the views are fixed, the pairs are not


def test_inputs_are_written_to_the_memory_that_is_offered():
    blocks = []

    def allocate(shape):
        blocks.append(torch.empty(shape))
        return blocks[-1]

    views, rows = MixedViews(public(), 2, "mixup"), torch.arange(24)
    found = views.subset(1, rows, allocate).inputs(rows)
    assert len(blocks) == 1
    assert found.data_ptr() == blocks[0].data_ptr()


def test_what_cannot_be_mixed_is_explained():
    words = public(pool=torch.randint(0, 100, (12, 8)))
    with pytest.raises(ConfigError, match=r"texts can't be mixed.*mix = 'none'"):
        MixedViews(words, 1, "mixup")
    assert torch.equal(everything(MixedViews(words, 2)), words.view(1).data.repeat(2, 1))
    table = public(pool=torch.randn(12, 8))
    with pytest.raises(ConfigError, match=r"'cutmix' needs images"):
        MixedViews(table, 1, "cutmix")
    assert everything(MixedViews(table, 2, "mixup")).shape == (24, 8)


def _seed(round, view):
    from fedet.core import seed_of

    return seed_of(3, "mix", round, view)
