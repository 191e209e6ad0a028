"""The formulas against hand-computed numbers and against the properties that follow from them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedet import maths

A_LOGITS = torch.tensor([[2, 0.5, 0], [0.2, 1.4, 0.6], [1, 0.8, -0.5]], dtype=torch.float64)
A = torch.softmax(A_LOGITS, dim=-1).unsqueeze(1)
A_SERVER = torch.tensor([[0.5, 0.2, -0.1]], dtype=torch.float64)


def close(actual, expected, tolerance=5.1e-7):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


def loss_and_gradient(logits, c, lam, **how):
    z = logits.clone().requires_grad_()
    loss = maths.ensemble_loss(z, c, lam, **how)
    loss.backward()
    return loss.detach(), z.grad


# Hand-computed examples


def test_example_a_consensus():
    c = maths.consensus(A)
    close(maths.confidence(A)[:, 0], [0.081817, 0.029498, 0.026414])
    close(c.alpha[:, 0], [0.594044, 0.214172, 0.191783])
    close(c.probs[0], [0.568067, 0.296820, 0.135113])
    close(c.diversity[0], [0.036850, 0.122348, 0.054974])
    close(c.mass, [0.214172])
    assert c.label.tolist() == [0]


@pytest.mark.parametrize(
    ("lam", "how", "loss", "gradient"),
    [
        (0.05, "raw", 0.813838, [-0.560414, 0.320901, 0.239513]),
        (0.05, "normalised", 0.837492, [-0.550014, 0.311168, 0.238845]),
        (0.5, "raw", 0.682868, [-0.534903, 0.297028, 0.237875]),
        (0.5, "normalised", 0.919413, [-0.430902, 0.199702, 0.231200]),
        (0.0, "raw", 0.828390, [-0.563248, 0.323554, 0.239694]),
    ],
)
def test_example_a_loss_and_gradient(lam, how, loss, gradient):
    value, grad = loss_and_gradient(A_SERVER, maths.consensus(A), lam, diversity=how)
    close(value, loss)
    close(grad[0], gradient)


def two():
    x2 = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64).unsqueeze(1)
    return torch.cat([A, x2], dim=1), torch.cat([A_SERVER, torch.tensor([[0, 0.3, 0.6]], dtype=torch.float64)])


def test_batch_of_two():
    probs, server = two()
    c = maths.consensus(probs)
    close(c.alpha[:, 1], [0.543860, 0.333333, 0.122807])
    close(c.probs[1], [0.642105, 0.245614, 0.112281])
    close(F.cross_entropy(server[1:], c.label[1:]), 1.428390)
    assert c.mass[1] == 0
    raw, gradient = loss_and_gradient(server, c, 0.05)
    close(raw, 1.121114)
    close(gradient, [[-0.280207, 0.160451, 0.119756], [-0.380153, 0.161777, 0.218376]])
    close(loss_and_gradient(server, c, 0.05, diversity="normalised")[0], 1.132941)


def test_example_b_confidence_beats_count():
    probs = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.55, 0.35], [0.1, 0.55, 0.35]], dtype=torch.float64).unsqueeze(1)
    c = maths.consensus(probs)
    close(maths.confidence(probs)[:, 0], [0.108889, 0.033889, 0.033889])
    close(c.alpha[:, 0], [0.616352, 0.191824, 0.191824])
    close(c.probs[0], [0.531447, 0.272642, 0.195912])
    close(c.diversity[0], [0.038365, 0.211006, 0.134277])
    close(c.mass, [0.383648])
    assert c.label.item() == 0
    assert probs.mean(dim=0).argmax().item() == 1


def test_example_c_two_classes():
    c = maths.consensus(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]], dtype=torch.float64).unsqueeze(1))
    close(c.alpha[:, 0], [0.941176, 0.058824, 0.0])
    close(c.probs[0], [0.870588, 0.129412])


def test_example_d_a_label_nobody_chose():
    c = maths.consensus(torch.tensor([[0.50, 0.45, 0.05], [0.05, 0.45, 0.50]], dtype=torch.float64).unsqueeze(1))
    close(c.alpha[:, 0], [0.5, 0.5])
    close(c.probs[0], [0.275, 0.450, 0.275])
    assert c.label.item() == 1
    assert torch.equal(c.diversity, c.probs)
    close(c.mass, [1.0])


# Edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 3, 7, 10, 100])
def test_all_uniform_gives_equal_weights(dtype, classes):
    logits = torch.tensor([0.0, 5.0, -30.0, 1e-3]).to(dtype).view(4, 1, 1).expand(4, 3, classes)
    c = maths.consensus(torch.softmax(logits, dim=-1))
    assert torch.equal(c.alpha, torch.full((4, 3), 0.25, dtype=dtype))
    assert c.alpha.dtype == c.probs.dtype == dtype


def test_ties_go_to_the_lowest_label():
    c = maths.consensus(torch.tensor([[[0.4, 0.4, 0.2]]]))
    assert c.label.item() == 0
    assert c.mass.item() == 0


@pytest.mark.parametrize("how", ["raw", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_dissent_no_diversity_gradient(how, dtype):
    c = maths.consensus(torch.tensor([[[0.7, 0.2, 0.1]], [[0.6, 0.3, 0.1]]], dtype=dtype))
    logits = torch.randn(1, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    plain, with_term = (loss_and_gradient(logits, c, lam, diversity=how) for lam in (0.0, 0.5))
    assert torch.equal(plain[0], with_term[0])
    assert torch.equal(plain[1], with_term[1])


def test_soft_target_pulls_towards_the_consensus():
    c = maths.consensus(A)
    _, gradient = loss_and_gradient(A_SERVER, c, 0.0, target="soft")
    close(gradient[0], (torch.softmax(A_SERVER, -1) - c.probs)[0].tolist())


def test_loss_is_finite_for_certain_teachers():
    probs = torch.eye(3).unsqueeze(1)  # three one-hot clients that all disagree
    value, gradient = loss_and_gradient(torch.tensor([[200.0, 0.0, -200.0]]), maths.consensus(probs), 0.5)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="clients, batch, classes"):
        maths.consensus(torch.ones(3, 3))
    with pytest.raises(ValueError, match="normalised"):
        maths.ensemble_loss(A_SERVER, maths.consensus(A), 0.1, diversity="other")


# Properties


@st.composite
def ensembles(draw, dtype=torch.float64):
    clients, batch, classes = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(2, 12))
    scale = draw(st.floats(0.1, 8))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.softmax(scale * torch.randn(clients, batch, classes, generator=g, dtype=dtype), dim=-1)


common = settings(max_examples=60, deadline=None)


@common
@given(ensembles())
def test_weights_and_consensus_lie_on_the_simplex(probs):
    c = maths.consensus(probs)
    assert (c.alpha >= 0).all()
    torch.testing.assert_close(c.alpha.sum(0), torch.ones(probs.shape[1], dtype=probs.dtype))
    torch.testing.assert_close(c.probs.sum(-1), torch.ones(probs.shape[1], dtype=probs.dtype))
    torch.testing.assert_close(c.diversity.sum(-1), c.mass)
    assert (c.mass <= 1 + 1e-12).all()


@common
@given(ensembles(), st.floats(0, 2), st.sampled_from(["raw", "normalised"]), st.randoms(use_true_random=False))
def test_gradient_sums_to_zero_over_the_classes(probs, lam, how, random):
    logits = torch.randn(probs.shape[1:], dtype=probs.dtype, generator=torch.Generator().manual_seed(random.randrange(2**31)))
    _, gradient = loss_and_gradient(logits, maths.consensus(probs), lam, diversity=how)
    assert gradient.sum(-1).abs().max() < 1e-12


@common
@given(ensembles(), st.randoms(use_true_random=False))
def test_order_of_clients_and_names_of_classes_do_not_matter(probs, random):
    clients, classes = list(range(probs.shape[0])), list(range(probs.shape[2]))
    random.shuffle(clients)
    random.shuffle(classes)
    c, p, q = maths.consensus(probs), maths.consensus(probs[clients]), maths.consensus(probs[:, :, classes])
    torch.testing.assert_close(p.alpha, c.alpha[clients])
    torch.testing.assert_close(p.probs, c.probs)
    torch.testing.assert_close(p.diversity, c.diversity)
    torch.testing.assert_close(q.alpha, c.alpha)
    torch.testing.assert_close(q.probs, c.probs[:, classes])
    torch.testing.assert_close(q.diversity, c.diversity[:, classes])


@common
@given(ensembles())
def test_duplicating_every_client_halves_the_weights_and_nothing_else(probs):
    c, twice = maths.consensus(probs), maths.consensus(torch.cat([probs, probs]))
    torch.testing.assert_close(twice.alpha, torch.cat([c.alpha, c.alpha]) / 2)
    for name in ("probs", "label", "diversity", "mass"):
        torch.testing.assert_close(getattr(twice, name), getattr(c, name))


@common
@given(ensembles())
def test_a_uniform_client_changes_nothing(probs):
    uniform = torch.full_like(probs[:1], 1 / probs.shape[-1])
    c, more = maths.consensus(probs), maths.consensus(torch.cat([probs, uniform]))
    assert (more.alpha[-1] == 0).all()
    torch.testing.assert_close(more.probs, c.probs)
    torch.testing.assert_close(more.diversity, c.diversity)


@common
@given(ensembles(torch.float32), st.floats(0, 1))
def test_one_client_or_full_agreement_leaves_lambda_without_effect(probs, lam):
    alone = maths.consensus(probs[:1])
    assert (alone.alpha == 1).all()
    assert torch.equal(alone.probs, probs[0])
    agreed = maths.consensus(probs[:1].repeat(3, 1, 1))
    logits = torch.zeros(probs.shape[1:])
    for c in (alone, agreed):
        assert (c.mass == 0).all()
        assert torch.equal(maths.ensemble_loss(logits, c, lam), maths.ensemble_loss(logits, c, 0.0))


@common
@given(ensembles(), st.floats(0.01, 1))
def test_raw_term_is_the_normalised_one_weighted_by_its_mass(probs, lam):
    c = maths.consensus(probs)
    logits = torch.linspace(-1, 1, probs[0].numel(), dtype=probs.dtype).view(probs.shape[1:])
    base = maths.ensemble_loss(logits, c, 0.0)
    each = [maths.ensemble_loss(logits[i : i + 1], c[torch.tensor([i])], lam, "normalised") for i in range(len(logits))]
    plain = [maths.ensemble_loss(logits[i : i + 1], c[torch.tensor([i])], 0.0) for i in range(len(logits))]
    mass = c.mass
    expected = sum(m * (e - p) + lam * torch.xlogy(m, m) for m, e, p in zip(mass, each, plain, strict=True)) / len(logits)
    torch.testing.assert_close(maths.ensemble_loss(logits, c, lam) - base, expected)


def test_selecting_samples_is_the_same_as_a_smaller_batch():
    g = torch.Generator().manual_seed(3)
    probs = torch.softmax(torch.randn(4, 9, 5, generator=g), dim=-1)
    index = torch.tensor([7, 0, 3])
    part, whole = maths.consensus(probs[:, index]), maths.consensus(probs)[index]
    for name in ("alpha", "probs", "label", "diversity", "mass"):
        assert torch.equal(getattr(part, name), getattr(whole, name))


# Averages


def test_average_is_uniform_weighted_and_rounds_once():
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
    assert maths.average([a, b])["w"].tolist() == [2.0, 4.0]
    assert maths.average([a, b], [30, 10])["w"].tolist() == [1.5, 3.0]
    tiny = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0**-30])}, {"w": torch.tensor([-1.0])}]
    assert maths.average(tiny)["w"].item() == pytest.approx(2.0**-30 / 3, rel=1e-6)  # float32 sums would give 0


def test_average_keeps_types_and_rounds_counters():
    models = [
        {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(3)},
        {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(4)},
    ]
    out = maths.average(models)
    assert out["w"].dtype == torch.float16
    assert out["n"].dtype == torch.int64
    assert out["n"].item() in (3, 4)


def test_average_shares_no_memory():
    a = {"w": torch.ones(2)}
    maths.average([a])["w"].zero_()
    assert a["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("weights", [[1.0], [-1.0, 2.0], [0.0, 0.0]])
def test_average_refuses_impossible_weights(weights):
    with pytest.raises(ValueError, match="weight"):
        maths.average([{"w": torch.ones(1)}] * 2, weights)


# The bound


def test_bound_terms():
    a, n = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([400, 100, 25])
    assert maths.sample_size_term(a, n, 0.05) == pytest.approx(0.164428, abs=5.1e-7)
    one = torch.tensor([1.0]), torch.tensor([1])
    assert maths.sample_size_term(*one, 0.05) == pytest.approx(1.730818, abs=5.1e-7)
    assert maths.sample_size_term(*one, 0.05, "lemma") == pytest.approx(1.358102, abs=5.1e-7)
    assert maths.sample_size_term(*one, 0.5) == pytest.approx(maths.sample_size_term(*one, 0.5, "lemma"))
    assert maths.sample_size_term(*one, 0.5) == pytest.approx(0.832555, abs=5.1e-7)
    skew = maths.label_discrepancy(torch.tensor([0.7, 0.2, 0.1]), torch.full((3,), 1 / 3))
    assert skew.item() == pytest.approx(0.366667, abs=5.1e-7)
    with pytest.raises(ValueError, match=r"0\.5"):
        maths.sample_size_term(a, n, 0.9)


def test_bound_is_linear_in_the_weights_and_monotone():
    errors, sizes = torch.tensor([0.1, 0.3]), torch.tensor([50, 200])
    gaps, joint = torch.tensor([0.2, 0.4]), torch.tensor([0.05, 0.1])

    def bound(a, delta=0.05, n=sizes):
        return maths.generalisation_bound(torch.tensor(a), errors, n, gaps, joint, delta)

    first, second, mixed = bound([1.0, 0.0]), bound([0.0, 1.0]), bound([0.25, 0.75])
    assert first.empirical == pytest.approx(0.1)
    assert first.total == pytest.approx(0.1 + math.sqrt(math.log(20) / 50) + 0.2 + 0.05)
    assert mixed.total == pytest.approx(0.25 * first.total + 0.75 * second.total)
    assert bound([0.5, 0.5], 0.01).total > bound([0.5, 0.5], 0.1).total > bound([0.5, 0.5], 0.1, sizes * 4).total


# The other methods' terms

STUDENT = torch.tensor([[0.5, 0.2, -0.1]], dtype=torch.float64)


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    value = function(x)
    value.backward()
    return value.detach(), x.grad


def test_label_offset_is_the_logarithm_of_the_smoothed_share():
    counts = torch.tensor([3, 0, 6])
    assert torch.allclose(maths.label_offset(counts, 1.0).exp(), torch.tensor([3.5, 0.5, 6.5]) / 10.5)
    assert torch.allclose(maths.label_offset(counts, 0.3), 0.3 * maths.label_offset(counts, 1.0))
    assert bool((maths.label_offset(counts, 0.0) == 0).all())


def test_with_the_offset_constant_logits_already_explain_the_frequencies():
    """Where labels say nothing but how frequent they are, equal logits have no gradient; without the offset they have one."""
    labels = torch.tensor([0] * 30 + [1] * 70)
    for strength, expected in ((1.0, 0.0), (0.0, 0.2)):
        logits = torch.zeros(100, 2, requires_grad=True)
        offset = maths.label_offset(torch.bincount(labels), strength)
        torch.nn.functional.cross_entropy(logits + offset, labels).backward()
        assert logits.grad.sum(dim=0).abs().max() == pytest.approx(expected, abs=2e-3)


def test_proximal_is_half_the_squared_distance():
    reference = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.5]])}
    params = {"a": torch.tensor([2.0, 4.0], requires_grad=True), "b": torch.tensor([[0.0]], requires_grad=True)}
    value = maths.proximal(params, reference, 0.4)
    value.backward()
    assert value.item() == pytest.approx(0.2 * (1 + 4 + 0.25))
    torch.testing.assert_close(params["a"].grad, torch.tensor([0.4, 0.8]))
    torch.testing.assert_close(params["b"].grad, torch.tensor([[-0.2]]))


def test_linear_adds_its_direction_to_the_gradient():
    w = {"a": torch.tensor([3.0, -1.0], requires_grad=True)}
    maths.linear(w, {"a": torch.tensor([0.25, 7.0])}).backward()
    assert w["a"].grad.tolist() == [0.25, 7.0]


def test_contrastive_example():
    z = torch.tensor([[1, 2, 0.5]], dtype=torch.float64)
    near = torch.tensor([[0.5, 1.5, 1]], dtype=torch.float64)
    far = torch.tensor([[-1, 0.5, 2]], dtype=torch.float64)
    close(F.cosine_similarity(z, near), [0.933139])
    close(F.cosine_similarity(z, far), [0.190476])
    value, gradient = value_and_gradient(lambda x: maths.contrastive(x, near, far, 0.5), z)
    close(value, 0.204106)
    close(gradient[0], [-0.061169, 0.010424, 0.080643])
    assert abs((z * gradient).sum().item()) < 1e-12  # only the direction of z matters
    value, gradient = value_and_gradient(lambda x: maths.contrastive(x, near, near, 0.5), z)
    close(value, 0.693147)
    assert gradient.abs().max() < 1e-15


def test_contrastive_bounds_and_overflow():
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    close(maths.contrastive(z, z, -z, 0.5), 0.018150)
    close(maths.contrastive(z, -z, z, 0.5), 4.018150)
    assert torch.isfinite(maths.contrastive(z, -z, z, 1e-3))


def test_contrastive_is_a_mean_over_the_batch():
    g = torch.Generator().manual_seed(0)
    z, near, far = (torch.randn(5, 4, generator=g) for _ in range(3))
    each = [maths.contrastive(z[i : i + 1], near[i : i + 1], far[i : i + 1], 0.5) for i in range(5)]
    torch.testing.assert_close(maths.contrastive(z, near, far, 0.5), torch.stack(each).mean())


TEACHERS = torch.tensor([[2, 0, 0], [0, 3, 0], [1, 1, -1]], dtype=torch.float64).unsqueeze(1)


def test_average_logits_example():
    target = maths.average_logits(TEACHERS)
    close(target[0], [0.376052, 0.524822, 0.099126])
    value, gradient = value_and_gradient(lambda z: maths.divergence(z, target), STUDENT)
    close(value, 0.110056)
    close(gradient[0], [0.060700, -0.201269, 0.140568])
    probabilities = torch.softmax(TEACHERS, -1).mean(0)  # a different target, which FedDF does not take
    close(probabilities[0], [0.433525, 0.494754, 0.071721])
    close(maths.divergence(STUDENT, probabilities), 0.120367)


def test_average_logits_ignores_a_constant_in_a_teacher():
    shifted = TEACHERS + torch.tensor([5.0, -3.0, 0.0], dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(maths.average_logits(shifted), maths.average_logits(TEACHERS))


def test_average_logits_of_the_student_itself_leaves_it_alone():
    target = maths.average_logits(STUDENT.expand(4, 1, 3))
    value, gradient = value_and_gradient(lambda z: maths.divergence(z, target), STUDENT)
    assert abs(value.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


def test_era_example():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]], dtype=torch.float64).unsqueeze(1)
    sharp = maths.era(probs, 0.1)
    close(sharp[0], [0.620968, 0.318816, 0.060216])
    close(maths.era(probs, 1.0)[0], [0.366650, 0.343004, 0.290346])  # not the plain mean
    value, gradient = value_and_gradient(lambda z: maths.divergence(z, sharp), STUDENT)
    close(value, 0.130640)
    close(gradient[0], [-0.184216, 0.004738, 0.179478])
    close(F.cross_entropy(STUDENT, sharp), 0.960165)


@pytest.mark.parametrize(
    ("classes", "top", "result", "entropy"),
    [
        (10, 1.0, 0.999592, 0.004493),
        (100, 1.0, 0.995526, 0.049229),
        (100, 0.3, 0.158981, 4.302558),
        (10, 0.3, 0.506249, 1.777951),
    ],
)
def test_era_sharpens_or_flattens(classes, top, result, entropy):
    p = torch.full((1, 1, classes), (1 - top) / (classes - 1), dtype=torch.float64)
    p[..., 0] = top
    out = maths.era(p, 0.1)[0]
    close(out[0], result)
    close(-(out * out.log()).sum(), entropy)


@common
@given(ensembles(), st.randoms(use_true_random=False))
def test_era_keeps_the_label_and_knows_no_order(probs, random):
    order = list(range(probs.shape[0]))
    random.shuffle(order)
    out = maths.era(probs, 0.1)
    assert torch.equal(out.argmax(-1), probs.mean(0).argmax(-1))
    torch.testing.assert_close(out.sum(-1), torch.ones(probs.shape[1], dtype=probs.dtype))
    torch.testing.assert_close(maths.era(probs[order], 0.1), out)


def test_distillation_example():
    teacher = torch.tensor([[2, 0.5, 0]], dtype=torch.float64)
    value, gradient = value_and_gradient(lambda z: maths.distillation(z, teacher, 3.0), STUDENT)
    close(value, 0.207807)
    close(gradient[0], [-0.313633, 0.138356, 0.175277])
    close(maths.distillation(STUDENT, teacher, 1.0), 0.185459)
    close(value + F.cross_entropy(STUDENT, torch.tensor([0])), 1.036197)
    value, gradient = value_and_gradient(lambda z: maths.distillation(z, teacher + 4, 3.0), teacher)
    assert abs(value.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


def test_reliable_fusion_example():
    weights, fused = maths.reliable_fusion(A_LOGITS.unsqueeze(1), torch.tensor([0]))
    close(weights[:, 0], [0.571005, 0.0, 0.428995])
    close(fused[0], [1.571005, 0.628699, -0.214498])
    server = torch.tensor([[0.1, 0.4, -0.1]], dtype=torch.float64)
    target = torch.softmax(fused, -1)
    close(target[0], [0.642079, 0.250236, 0.107685])
    value, gradient = value_and_gradient(
        lambda z: 0.75 * F.cross_entropy(z, torch.tensor([0])) + 0.25 * maths.divergence(z, target), server
    )
    close(value, 0.922124)
    close(gradient[0], [-0.594922, 0.363453, 0.231468])


def test_reliable_fusion_edges():
    certain = torch.tensor([[[1000.0, 0, 0]], [[0.1, 0, 0]], [[0, 5.0, 0]]])
    weights, fused = maths.reliable_fusion(certain, torch.tensor([0]))
    assert torch.isfinite(fused).all()
    assert weights[:, 0].tolist() == [1.0, 0.0, 0.0]  # no overflow for an entropy of zero
    weights, fused = maths.reliable_fusion(certain, torch.tensor([2]))
    assert weights.abs().sum() == 0
    assert fused.abs().sum() == 0


@pytest.mark.parametrize("shape", [(70, 40, 5, 5), (1, 200_000), (200_000,), (3, 100, 200)])
def test_large_averages_are_rounded_once_as_small_ones_are(shape):
    models = [torch.randn(shape) for _ in range(3)]
    models = [m.contiguous(memory_format=torch.channels_last) if m.dim() == 4 else m for m in models]
    mean = maths.average([{"w": m} for m in models], [1.0, 2.0, 4.0])["w"]
    assert torch.equal(mean, ((models[0].double() + 2.0 * models[1].double() + 4.0 * models[2].double()) / 7.0).float())


# Ingredients of Fed-ET+


def test_agreement_by_hand():
    choices = torch.tensor([[0, 1, 2, 0], [0, 1, 1, 2], [0, 2, 1, 1]])
    found = maths.agreement(torch.eye(3, dtype=torch.float64)[choices])
    # the others' majority; of two different votes the lower label counts: client 0 against [0, 1, 1, 1], client 1 against
    # [0, 1, 1, 0], client 2 against [0, 1, 1, 0]
    close(found, [0.5, 0.75, 0.5])
    assert maths.agreement(torch.eye(3)[choices[:1]]).tolist() == [1.0]


def test_trust_multiplies_the_variance():
    trust = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)
    c = maths.consensus(A, trust)
    weights = maths.confidence(A)[:, 0] * trust
    torch.testing.assert_close(c.alpha[:, 0], weights / weights.sum())
    torch.testing.assert_close(c.probs[0], (c.alpha[:, 0, None] * A[:, 0]).sum(dim=0))
    equal = maths.consensus(A, torch.full((3,), 0.7, dtype=torch.float64))
    torch.testing.assert_close(equal.alpha, maths.consensus(A).alpha)


def test_capped_by_hand():
    close(maths.capped(torch.tensor([[0.7], [0.2], [0.1]], dtype=torch.float64), 0.5)[:, 0], [0.5, 1 / 3, 1 / 6])
    close(maths.capped(torch.tensor([[0.6], [0.35], [0.05]], dtype=torch.float64), 0.4)[:, 0], [0.4, 0.4, 0.2])
    close(maths.capped(torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64), 0.5)[:, 0], [0.5, 0.25, 0.25])
    close(maths.capped(torch.tensor([[0.9], [0.1], [0.0]], dtype=torch.float64), 1 / 3)[:, 0], [1 / 3, 1 / 3, 1 / 3])


@given(st.integers(2, 8), st.floats(1.0, 5.0), st.integers(0, 10_000))
def test_capped_weights_stay_on_the_simplex_and_below_the_limit(clients, cap, seed):
    g = torch.Generator().manual_seed(seed)
    alpha = torch.rand(clients, 20, generator=g, dtype=torch.float64) ** 8
    alpha = alpha / alpha.sum(dim=0)
    limited = maths.capped(alpha, cap / clients)
    torch.testing.assert_close(limited.sum(dim=0), torch.ones(20, dtype=torch.float64))
    assert float(limited.max()) <= cap / clients * (1 + 1e-5)
    below = (alpha <= cap / clients).all(dim=0)
    torch.testing.assert_close(limited[:, below], alpha[:, below])  # nothing to do


@given(st.integers(0, 10_000), st.floats(0.1, 10.0))
def test_sharpen_keeps_the_order_and_moves_the_entropy(seed, temperature):
    probs = torch.softmax(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)
    out = maths.sharpen(probs, temperature)
    torch.testing.assert_close(out.sum(dim=-1), torch.ones(5, dtype=torch.float64))
    assert torch.equal(out.argsort(), probs.argsort())

    def entropy(p):
        return -torch.xlogy(p, p).sum(dim=-1)

    assert bool(((entropy(out) - entropy(probs)) * (temperature - 1) >= -1e-9).all())


def test_sharpen_by_hand_and_with_certain_teachers():
    close(maths.sharpen(torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), 0.5), [2 / 3, 1 / 6, 1 / 6])
    assert maths.sharpen(torch.tensor([1.0, 0.0]), 2.0).tolist() == [1.0, 0.0]
    same = torch.tensor([0.6, 0.4])
    assert maths.sharpen(same, 1.0) is same


def test_moving_average_starts_fast_and_reaches_its_decay():
    old, new = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    assert maths.moving_average(old, new, 1, 0.9)["w"].tolist() == [0.75, 0.75]
    assert maths.moving_average(old, new, 3, 0.9)["w"].tolist() == [0.5, 0.5]
    close(maths.moving_average(old, new, 1000, 0.9)["w"], [0.1, 0.1])


def test_matching_views_by_hand():
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    # each row: its other view has cosine 1, the two others 0
    close(maths.matching_views(z, 0.5), math.log(1 + 2 * math.exp(-2)))
    close(maths.matching_views(torch.ones(6, 2, dtype=torch.float64), 0.5), math.log(5))


def test_aligned_by_hand():
    probs = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)
    found = maths.aligned(probs, torch.tensor([0.35, 0.6]))  # factors 0.5 and 2
    close(found, [[0.4 / 0.8, 0.4 / 0.8], [0.3 / 1.1, 0.8 / 1.1]])
    close(maths.aligned(probs, probs.mean(dim=0)), probs.tolist())
    close(maths.aligned(probs, torch.tensor([0.35, 0.6]), 0.0), probs.tolist())


@given(st.integers(0, 10_000))
def test_aligned_moves_the_mean_towards_the_marginal(seed):
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(200, 4, generator=g, dtype=torch.float64), dim=-1)
    marginal = torch.softmax(0.3 * torch.randn(4, generator=g, dtype=torch.float64), dim=-1)
    found = maths.aligned(probs, marginal)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(200, dtype=torch.float64))
    assert (found.mean(dim=0) - marginal).abs().sum() <= (probs.mean(dim=0) - marginal).abs().sum() + 1e-9


def test_a_class_that_nobody_predicts_stays_finite():
    found = maths.aligned(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0.5, 0.5]))
    assert found.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_mixup_loss_is_the_mean_of_two_losses_weighted_by_the_shares():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    loss = maths.mixup_loss(logits, torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([0.75, 1.0]))
    # 0.75 log 2 + 0.25 log 4 = 0.866434 and log(1 / 0.7) = 0.356675
    assert loss.item() == pytest.approx((0.866434 + 0.356675) / 2, abs=1e-6)
