"""Each method against numbers computed by hand and against what follows from its formulas."""

import pytest
import torch
from lab import Curve, Linear, Scalar, Spy, Table, chosen, federation, on_parabolas

from fedet import check, config, experiment, maths, train
from fedet.core import Payload, Round, head_of
from fedet.engine import rounds
from fedet.engine.exchange import InProcess
from fedet.methods import METHODS, REFERENCES
from fedet.methods.fedavg import FedAvg
from fedet.storage.client_store import ClientStore
from fedet.train import Training

CURVES = [Curve(1, 1), Curve(3, -1)]
TWO_STEPS = Training(lr=0.1, batch=1, steps=2)


def small(method="fedet", **changes):
    short = check.quick(config.method_class(method))
    return config.load(check.SMALL, {"method.name": method, **short, **changes})


def built(tmp_path, method="fedet", **changes):
    return experiment.build(small(method, **changes), tmp_path / "cache")


def play(ready, tmp_path, state=None, number=1):
    """One round; returns the state before, the state after, what went down and what came up."""
    spy = Spy(InProcess(ready))
    before = rounds.Snapshot(ready.method.init(ready.env) if state is None else state, round=number - 1)
    entry, _, after = rounds.run_round(ready, ClientStore(tmp_path / "clients"), before, spy)
    return before.state, after.state, *spy.seen[-1], entry


# FedAvg


def test_fedavg_on_parabolas(monkeypatch):
    on_parabolas(monkeypatch)
    for weights, sizes, expected in (("uniform", None, -0.16), ("examples", [30, 10], 0.015)):
        _, step, _ = federation(FedAvg(TWO_STEPS, weights), Scalar, CURVES, sizes)
        state = step({"x": torch.zeros(1, dtype=torch.float64)}, 1)
        assert state["x"].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("weights", "sizes", "expected"), [("uniform", None, -0.457143), ("examples", [30, 10], 0.055556)])
def test_fedavg_drifts_to_its_own_fixed_point(monkeypatch, weights, sizes, expected):
    on_parabolas(monkeypatch)
    env, step, _ = federation(FedAvg(TWO_STEPS, weights), Scalar, CURVES, sizes)
    state = FedAvg(TWO_STEPS, weights).init(env)
    for number in range(1, 201):
        state = step(state, number)
    assert state["x"].item() == pytest.approx(expected, abs=5.1e-7)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("examples", [[0, 0.0625], [0, -0.0625]]), ("uniform", [[-0.166667, 0.125], [0.166667, -0.125]])],
)
def test_fedavg_one_full_step_equals_pooled_gradient_descent(weights, expected):
    data = [
        Table(torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64), torch.tensor([0, 1, 0])),
        Table(torch.tensor([[2.0, -1]], dtype=torch.float64), torch.tensor([1])),
    ]
    method = FedAvg(Training(lr=0.5, batch=3, steps=1), weights)
    env, step, _ = federation(method, Linear, data)
    torch.testing.assert_close(step(method.init(env), 1)["w"], torch.tensor(expected, dtype=torch.float64), atol=5.1e-7, rtol=0)


def test_fedavg_with_equal_clients_equals_any_of_them(monkeypatch):
    on_parabolas(monkeypatch)
    env, step, _ = federation(FedAvg(TWO_STEPS), Scalar, [Curve(3, -1)] * 4)
    _, alone, _ = federation(FedAvg(TWO_STEPS), Scalar, [Curve(3, -1)])
    start = FedAvg().init(env)
    assert torch.equal(step(start, 1)["x"], alone(start, 1)["x"])


def test_fedavg_averages_the_participants_only(monkeypatch):
    on_parabolas(monkeypatch)
    _, step, _ = federation(FedAvg(TWO_STEPS, "examples"), Scalar, [*CURVES, Curve(1, 100)], [30, 10, 1000])
    assert step({"x": torch.zeros(1, dtype=torch.float64)}, 1, [0, 1])["x"].item() == pytest.approx(0.015, abs=1e-12)


# Fed-ET


def test_fedet_heads_are_equal_after_every_round(tmp_path):
    ready = built(tmp_path)
    state = ready.method.init(ready.env)
    for number in (1, 2):
        _, state, *_ = play(ready, tmp_path, state, number)
        for weights in state.small.values():
            assert check.same(head_of(weights), head_of(state.large))


def test_fedet_without_server_steps_only_moves_heads(tmp_path):
    before, after, _, up, _ = play(built(tmp_path, **{"method.server.steps": 0}), tmp_path)
    mean = maths.average([head_of(reply.tensors["model"]) for reply in up.values()])
    assert check.same(head_of(after.large), mean)
    body = {name: tensor for name, tensor in before.large.items() if not name.startswith("head.")}
    assert all(torch.equal(after.large[name], tensor) for name, tensor in body.items())
    assert all(check.same(head_of(weights), mean) for weights in after.small.values())


def test_fedet_with_one_architecture_and_no_server_steps_is_fedavg(tmp_path):
    one = {"models.clients": ["cnn"], "method.server.steps": 0}
    _, after, _, up, _ = play(built(tmp_path, **one), tmp_path)
    assert check.same(after.small["cnn"], maths.average([reply.tensors["model"] for reply in up.values()]))


def test_fedet_absent_architecture_keeps_its_body_and_takes_the_head(tmp_path):
    changes = {"models.assignment": "given", "models.given": ["cnn-w0.5"] * 5 + ["resnet8-w0.0625"], "run.cohort": 2}
    for seed in range(20):
        ready = built(tmp_path, **changes, **{"run.seed": seed})
        if all(c.arch == "cnn-w0.5" for c in chosen(ready, 1)):
            break
    before, after, *_ = play(ready, tmp_path)
    old, new = before.small["resnet8-w0.0625"], after.small["resnet8-w0.0625"]
    assert all(torch.equal(old[name], new[name]) for name in old if not name.startswith("head."))
    assert check.same(head_of(new), head_of(after.large))
    assert not check.same(head_of(new), head_of(old))


def test_fedet_lambda_zero_is_training_on_pseudo_labels(tmp_path, monkeypatch):
    ready = built(tmp_path, **{"method.lam": 0.0})
    _, after, *_ = play(ready, tmp_path)
    monkeypatch.setattr(maths, "ensemble_loss", lambda logits, c, *rest: torch.nn.functional.cross_entropy(logits, c.label))
    _, plain, *_ = play(ready, tmp_path)
    assert check.same(after, plain)


def test_fedet_lambda_matters(tmp_path):
    _, with_term, *_ = play(built(tmp_path, **{"method.lam": 0.5}), tmp_path)
    _, without, *_ = play(built(tmp_path, **{"method.lam": 0.0}), tmp_path)
    assert not check.same(with_term.large, without.large)


def test_fedet_starts_all_models_with_one_head(tmp_path):
    ready = built(tmp_path)
    state = ready.method.init(ready.env)
    assert all(check.same(head_of(w), head_of(state.large)) for w in state.small.values())


def test_fedet_traffic_is_twice_the_small_models(tmp_path):
    ready = built(tmp_path)
    *_, entry = play(ready, tmp_path)
    sizes = [ready.env.model_cache.num_params(ready.clients[k].arch) for k in entry["cohort"]]
    assert entry["params_up"] == entry["params_down"] == sum(sizes)
    assert entry["bytes_up"] == 4 * sum(sizes)
    assert entry["model_params_up"] == entry["params_up"]


def test_fedet_trains_the_server_with_its_ensemble_loss_only(tmp_path):
    """The server's step recomputed here from the replies: consensus, loss and SGD by hand."""
    ready = built(tmp_path, **{"method.server": {"lr": 0.05, "batch": 16, "steps": 3}, "method.lam": 0.5})
    before, after, _, up, _ = play(ready, tmp_path)
    seed = conformance_round_seed(ready)
    view = ready.env.public.view(1)
    arch = {c.id: c.arch for c in ready.clients}
    teachers = [(arch[k], reply.tensors["model"]) for k, reply in sorted(up.items())]
    model = ready.env.build(ready.env.large, before.large | maths.average([head_of(w) for _, w in teachers]), "mine")
    for index in train.batches(len(view), 16, 3, torch.Generator().manual_seed(train.seed_of(seed, "batches"))):
        x = view.inputs(index)
        with torch.no_grad():
            probs = torch.stack([torch.softmax(ready.env.build(a, w).eval()(x), -1) for a, w in teachers])
        loss = maths.ensemble_loss(model(x), maths.consensus(probs), 0.5)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(after.large[name], tensor, rtol=1e-5, atol=1e-6)


def conformance_round_seed(ready):
    return train.seed_of(train.seed_of(ready.seed, "round", 1), "distil")


def test_predictions_do_not_depend_on_which_samples_are_asked_for(tmp_path):
    """Teachers predict only the samples a round uses; on all of them they would say the same, bit for bit."""
    ready = built(tmp_path)
    view = ready.env.public.view(1)
    rows = torch.arange(0, len(view), 3)
    for arch in ready.env.model_cache.names:
        model = ready.env.build(arch, ready.env.initial(arch))
        assert torch.equal(train.predict(model, view)[rows], train.predict(model, view, rows)), arch


# All methods


@pytest.mark.parametrize("name", [cls.name for cls in METHODS if cls.traits.public_data != "labelled"])
def test_labels_of_public_data_do_not_matter(tmp_path, name):
    """Two worlds that differ in the labels of the public samples alone give the same bits."""
    states = []
    for shuffled in (False, True):
        ready = built(tmp_path, name)
        labels = ready.data.dataset.labels
        if shuffled and ready.data.public is not None:
            rows = ready.data.public.rows
            kept = labels.clone()
            labels[rows] = labels[rows.flip(0)]
            assert not torch.equal(kept, labels)
        states.append(play(ready, tmp_path)[1])
    assert check.same(*states)


def test_partition_cohorts_and_initial_weights_are_the_same_for_all_methods(tmp_path):
    seen = []
    for cls in (*METHODS, *REFERENCES):
        ready = built(tmp_path, cls.name)
        cohorts = [[c.id for c in chosen(ready, number)] for number in range(1, 6)]
        weights = {arch: ready.env.initial(arch) for arch in ready.env.model_cache.names}
        seen.append((ready.data.split_arrays()["client_rows"].tolist(), ready.clients, cohorts, weights))
    for other in seen[1:]:
        assert seen[0][:3] == other[:3]
        assert check.same(seen[0][3], other[3])


USUAL = ("fedet-plus",)  # the others take minutes
ALL = [cls.name for cls in (*METHODS, *REFERENCES)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in ALL])
def test_every_method_keeps_its_promises(name):
    for outcome in check.check(name):
        assert outcome.ok, f"{outcome.name}: {outcome.detail}"


def test_round_weights():
    cohort = [type("C", (), {"id": k, "num_examples": n})() for k, n in ((3, 10), (5, 30))]
    r = Round(1, cohort, lambda requests: {}, 0)
    assert r.weights([3, 5]) == [1, 1]
    assert r.weights([5], "examples") == [30]
    assert Round(1, cohort, lambda requests: {}, 0, {3: 2, 5: 1}).weights([3, 5], "examples") == [20, 30]
    assert Payload().tensors == {}
