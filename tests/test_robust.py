"""Robust averages and consensuses: what their docstrings promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedet import maths
from fedet.config.schema import RobustConfig
from fedet.engine import defences
from fedet.trust import averages as robust

AVERAGES = {
    "median": robust.median,
    "trimmed": lambda models, weights=None: robust.trimmed(models, weights, share=0.4),
    "krum": lambda models, weights=None: robust.krum(models, weights, share=0.2),
    "multi-krum": lambda models, weights=None: robust.krum(models, weights, share=0.2, keep=None),
    "geometric": robust.geometric_median,
}
SEEDS = st.integers(0, 10_000)


def models(seed, n, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    return [{"w": spread * torch.randn(3, 4, generator=g), "b": torch.randn(4, generator=g)} for _ in range(n)]


def probabilities(seed, clients=7, batch=12, classes=4):
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(clients, batch, classes, generator=g), dim=-1)


def flat(model):
    return torch.cat([w.double().flatten() for w in model.values()])


@pytest.mark.parametrize("name", AVERAGES)
@given(seed=SEEDS, order=st.permutations(range(7)))
@settings(max_examples=15, deadline=None)
def test_an_average_does_not_depend_on_the_order_of_the_clients(name, seed, order):
    some = models(seed, 7)
    mixed = [some[k] for k in order]
    torch.testing.assert_close(flat(AVERAGES[name](some)), flat(AVERAGES[name](mixed)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_equal_models_is_that_model(name):
    one = models(0, 1)[0]
    torch.testing.assert_close(flat(AVERAGES[name]([one] * 5)), flat(one))


@pytest.mark.parametrize("name", AVERAGES)
@given(seed=SEEDS, far=st.floats(10, 1e12), hostile=st.integers(1, 2))
@settings(max_examples=20, deadline=None)
def test_two_of_ten_cannot_carry_a_robust_average_away_but_they_carry_the_mean(name, seed, far, hostile):
    honest = models(seed, 10 - hostile)
    liars = [{key: torch.full_like(w, far) for key, w in honest[0].items()} for _ in range(hostile)]
    points = torch.stack([flat(m) for m in honest])
    centre = points.mean(dim=0)
    radius = float((points - centre).norm(dim=1).max())
    moved = float((flat(AVERAGES[name](honest + liars)) - centre).norm())
    assert moved <= 4 * radius
    assert float((flat(maths.average(honest + liars)) - centre).norm()) > 0.1 * hostile * far - radius


@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_median_stays_in_the_honest_range_of_every_coordinate(seed):
    honest = models(seed, 6)
    liars = [{key: 1e6 * torch.randn_like(w) for key, w in honest[0].items()} for _ in range(5)]
    points, found = torch.stack([flat(m) for m in honest]), flat(robust.median(honest + liars))
    assert bool((found >= points.min(dim=0).values - 1e-6).all())
    assert bool((found <= points.max(dim=0).values + 1e-6).all())


def test_trimming_nothing_is_the_mean_to_the_bit():
    some = models(3, 5)
    assert all(torch.equal(w, robust.trimmed(some, share=0.0)[name]) for name, w in maths.average(some).items())
    probs = probabilities(1)
    assert torch.equal(robust.trimmed_of(probs, 0.0), maths.mean_over_clients(probs))


def test_integer_buffers_keep_their_type():
    some = [{"n": torch.tensor([k, 2 * k])} for k in (1, 2, 9)]
    for average in AVERAGES.values():
        assert average(some)["n"].dtype == torch.int64
    assert robust.median(some)["n"].tolist() == [2, 4]


def test_medians_by_hand():
    assert robust.median([{"w": torch.tensor([v])} for v in (0.0, 0.0, 1.0)])["w"].tolist() == [0.0]  # the counter-example
    assert robust.median([{"w": torch.tensor([v])} for v in (1.0, 2.0, 4.0, 9.0)])["w"].tolist() == [3.0]
    assert robust.trimmed([{"w": torch.tensor([v])} for v in (1.0, 2.0, 6.0, 99.0)], share=0.25)["w"].tolist() == [4.0]


def test_krum_chooses_colluders_if_too_few_are_expected_the_counter_example():
    honest, together = models(5, 5, spread=5.0), models(6, 1)[0]
    liars = [{key: w + 50 for key, w in together.items()}] * 5
    assert float(flat(robust.krum(honest + liars, share=0.2)).mean()) > 40


def test_the_geometric_median_takes_the_larger_cluster_the_counter_example():
    near, far = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    assert float(robust.geometric_median([near] * 3 + [far] * 2)["w"].max()) < 0.01


@pytest.mark.parametrize(("honest", "liars"), [(6, 4), (6, 5), (9, 1)])
@pytest.mark.parametrize("far", [1e2, 1e5, 1e12, 1e20])
def test_an_outlier_pulls_the_geometric_median_no_further_the_further_away_it_is(honest, liars, far):
    some = models(1, honest)
    centre = torch.stack([flat(m) for m in some]).mean(dim=0)
    radius = max(float((flat(m) - centre).norm()) for m in some)
    bad = [{key: torch.full_like(w, far) for key, w in some[0].items()} for _ in range(liars)]
    n = honest + liars
    assert float((flat(robust.geometric_median(some + bad)) - centre).norm()) <= 2 * honest / (n - 2 * liars) * radius


@given(seed=SEEDS, factor=st.floats(0.001, 0.999))
@settings(max_examples=20, deadline=None)
def test_clipping_scales_the_update_and_nothing_else(seed, factor):
    old, new = models(seed, 2)
    got = robust.clipped(new, old, factor)
    before, after = (robust.norm(robust.difference(m, old)) for m in (new, got))
    assert after == pytest.approx(factor * before, rel=1e-4)
    assert robust.clipped(new, old, 1.0)["w"] is new["w"]


# Consensus


@pytest.mark.parametrize("kind", ["variance", "entropy", "calibrated", "agreement", "trimmed", "median"])
@given(seed=SEEDS, order=st.permutations(range(7)))
@settings(max_examples=10, deadline=None)
def test_a_consensus_is_a_distribution_and_does_not_depend_on_the_order(kind, seed, order):
    combine = defences.combining(RobustConfig(consensus=kind))["consensus"]
    probs = probabilities(seed)
    a, b = combine(probs), combine(probs[list(order)])
    torch.testing.assert_close(a.probs, b.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.probs.sum(dim=-1), torch.ones(12))
    torch.testing.assert_close(a.alpha.sum(dim=0), torch.ones(12))
    torch.testing.assert_close(a.diversity.sum(dim=-1), a.mass, atol=1e-5, rtol=1e-4)


def test_without_defences_nothing_is_replaced_and_variance_is_the_papers_consensus_to_the_bit():
    assert defences.combining(None) == {}
    probs = probabilities(2)
    same = defences.combining(RobustConfig(consensus="variance"))
    assert torch.equal(same["consensus"](probs).probs, maths.consensus(probs).probs)
    assert torch.equal(same["mean"](probs), probs.mean(dim=0))
    assert same["average"] is maths.average


def liars_and_honest(liars):
    """Honest clients that are fairly sure of class 0, and one-hot liars that say 1."""
    honest = torch.tensor([0.6, 0.15, 0.15, 0.1]).expand(7 - liars, 30, 4)
    return torch.cat([honest, torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(liars, 30, 4)])


@pytest.mark.parametrize(
    "settings", [{"consensus": "agreement"}, {"consensus": "trimmed"}, {"consensus": "median"}, {"consensus": "calibrated"}]
)
def test_a_liar_who_shouts_buys_the_papers_consensus_but_not_a_robust_one(settings):
    probs = liars_and_honest(1)
    assert bool((maths.consensus(probs).label == 1).all())
    robust_one = defences.combining(RobustConfig(**settings))["consensus"](probs)
    assert bool((robust_one.label == 0).all())


def test_entropy_alone_does_not_stop_a_liar_the_counter_example_but_a_cap_does():
    probs = liars_and_honest(1)
    assert bool((defences.combining(RobustConfig(consensus="entropy"))["consensus"](probs).label == 1).all())
    assert bool((defences.combining(RobustConfig(consensus="entropy", cap=2.0))["consensus"](probs).label == 0).all())
    assert float(defences.combining(RobustConfig(cap=2.0))["consensus"](probs).alpha.max()) <= 2 / 7 + 1e-6


def test_a_cap_does_not_help_honest_clients_that_are_not_sure_the_counter_example():
    unsure = torch.tensor([0.5, 0.2, 0.2, 0.1]).expand(6, 5, 4)
    probs = torch.cat([unsure, torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 5, 4)])
    assert bool((maths.consensus(probs, cap=2.0).label == 1).all())


def test_entropy_confidence_is_zero_for_uniform_and_one_for_certain():
    probs = torch.tensor([[[0.25] * 4, [1.0, 0, 0, 0]]])
    torch.testing.assert_close(robust.entropy_confidence(probs), torch.tensor([[0.0, 1.0]]))


def test_calibration_gives_each_client_the_confidence_that_its_agreement_earns():
    probs = probabilities(4, clients=6, batch=60)
    found = robust.calibrated(probs).amax(dim=-1).mean(dim=-1)
    torch.testing.assert_close(found, maths.agreement(probs).clamp(min=0.25), atol=0.02, rtol=0.0)
    assert torch.equal(robust.calibrated(probs).argmax(dim=-1), probs.argmax(dim=-1))


def test_three_clients_sure_of_three_classes_have_no_median_and_it_is_uniform():
    probs = torch.eye(3)[:, None, :]
    found = robust.combined_consensus(probs, robust.median_of(probs))
    torch.testing.assert_close(found.probs, torch.full((1, 3), 1 / 3))


def test_agreement_weights_silence_whoever_contradicts_everybody():
    probs = liars_and_honest(1)
    torch.testing.assert_close(robust.agreement_weighted(probs), probs[0])
    lone = torch.eye(3)[:, None, :].expand(3, 5, 3)  # nobody agrees with anybody
    assert bool(torch.isfinite(robust.agreement_weighted(lone)).all())


def test_who_is_left_out():
    assert robust.leave_out([0.9, 0.8, 0.3, 0.85], 0.5) == 2
    assert robust.leave_out([0.9, 0.8, 0.5, 0.85], 0.5) is None
    assert robust.leave_out([0.9, 0.1], 0.5) is None


def test_norms_are_exact_for_huge_weights():
    assert robust.norm({"w": torch.full((100,), 1e30), "n": torch.tensor([7])}) == pytest.approx(1e31)
    assert robust.norm({"n": torch.tensor([7])}) == 0
    assert math.isfinite(robust.norm({"w": torch.full((1000,), 3e38)}))


def test_mean_cosines_by_hand():
    updates = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert robust.mean_cosines(updates).tolist() == pytest.approx([-1 / 3, 0.0, -1 / 3, 0.0])
    assert robust.mean_cosines(updates[:1]).tolist() == [0.0]


@given(seed=SEEDS, n=st.integers(6, 12), data=st.data())
@settings(max_examples=20, deadline=None)
def test_mean_cosines_of_reversed_updates_are_what_the_docstring_says(seed, n, data):
    f = data.draw(st.integers(1, (n - 1) // 2))
    own = 3.0 * torch.eye(n, dtype=torch.float64)
    updates = torch.cat([own, torch.full((n, 1), 1.5, dtype=torch.float64)], dim=1)  # c = 1.5^2 / (3^2 + 1.5^2) = 0.2
    scales = torch.rand(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    found = robust.mean_cosines(torch.where(torch.arange(n)[:, None] < f, -updates, updates) * scales)
    torch.testing.assert_close(found[:f], torch.full((f,), 0.2 * (2 * f - n - 1) / (n - 1), dtype=torch.float64))
    torch.testing.assert_close(found[f:], torch.full((n - f,), 0.2 * (n - 2 * f - 1) / (n - 1), dtype=torch.float64))


@given(seed=SEEDS, constant=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_soft_labels_that_do_not_depend_on_the_input_correlate_with_nobody_however_many_there_are(seed, constant):
    common = 3 * torch.eye(4).repeat(5, 1)
    honest = torch.softmax(common + torch.randn(4, 20, 4, generator=torch.Generator().manual_seed(seed)), dim=-1)
    same = torch.softmax(torch.tensor([100.0, 0.0, 0.3, 0.0]), dim=-1).expand(constant, 20, 4)
    scores = robust.correlations(torch.cat([honest, same]))
    assert float(scores[4:].abs().max()) < 1e-12
    assert float(scores[:4].min()) > 0
    found = robust.uninformative(scores.tolist(), 0.25, 0.0, range(len(scores)))
    assert found is not None
    assert found >= 4


def test_correlations_by_hand_and_the_counter_examples():
    right = torch.eye(4).repeat(2, 1)
    assert robust.correlations(torch.stack([right, right, right])).tolist() == pytest.approx([1, 1, 1])
    shifted = right.roll(1, 1)
    assert robust.correlations(torch.stack([right, shifted])).tolist() == pytest.approx([-1 / 3, -1 / 3])
    liars = robust.correlations(torch.stack([right, shifted, shifted, shifted]))  # a majority correlates with itself
    assert liars[0] < 0 < liars[1]
    single = right[:1].expand(8, 4)  # an honest client that has seen one class
    assert robust.correlations(torch.stack([right, right, single]))[2] == 0
    hint = 0.99 * single + 0.01 * right  # says almost nothing
    assert 0 < robust.correlations(torch.stack([right, right, hint]))[2] < 0.05


def test_who_is_uninformative_by_hand():
    scores = [0.4, 0.2, 0.0, -0.1, 0.04]
    assert robust.uninformative(scores, 0.25, 0.02, range(5)) == 3
    assert robust.uninformative(scores, 0.25, 0.02, [0, 1, 4]) == 4
    assert robust.uninformative(scores, 0.25, 0.02, [0, 1]) is None
    assert robust.uninformative(scores, 0.25, 0.3, range(5)) is None  # nothing in common yet
    assert robust.uninformative(scores, 0.25, 0.02, []) is None
    assert robust.uninformative([1.0, 1.0, 0.0, 0.0], 0.25, 0.02, range(4)) is None  # two may have conspired
