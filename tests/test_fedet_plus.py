"""Fed-ET+: without its ingredients it is Fed-ET, and each ingredient does what it says."""

import pytest
import torch
from lab import Spy, chosen

import fedet
from fedet import check, config, experiment, maths, train
from fedet.core import head_of
from fedet.data.mix import MixedViews
from fedet.engine import rounds
from fedet.engine.exchange import InProcess
from fedet.storage.client_store import ClientStore

OFF = {
    "target": "hard",
    "temperature": 1.0,
    "views": 1,
    "mix": "none",
    "decay": 0.0,
    "agreement": False,
    "cap": 0.0,
    "small_teachers": False,
    "align": 0.0,
    "heads": "both",
    "calibrate": 0.0,
    "local_mix": 0.0,
    "mu": 0.0,
    "lam": 0.05,
    "server": {"lr": 0.05, "momentum": 0.0, "optimiser": "sgd", "schedule": "constant", "steps": 4, "batch": 16},
    "client": {"lr": 0.1, "batch": 16, "steps": 3},
}


def built(tmp_path, method="fedet-plus", **changes):
    own = {key: value for key, value in OFF.items() if method == "fedet-plus" or key in ("server", "client", "lam", "target")}
    settings = {f"method.{key}": value for key, value in own.items()} | {f"method.{key}": v for key, v in changes.items()}
    return experiment.build(config.load(check.SMALL, {"method.name": method, **settings}), tmp_path / "cache")


def play(ready, tmp_path, count=1):
    """Some rounds; returns the states (the first one included) and the last round's models."""
    spy, store = Spy(InProcess(ready)), ClientStore(tmp_path / "clients")
    snapshot = rounds.Snapshot(ready.method.init(ready.env))
    states = [snapshot.state]
    for _ in range(count):
        _, _, snapshot = rounds.run_round(ready, store, snapshot, spy)
        store.commit(snapshot.round)
        states.append(snapshot.state)
    return states, [reply.tensors["model"] for reply in spy.seen[-1][1].values()]


def test_with_everything_off_it_is_fedet_to_the_bit(tmp_path):
    plus = play(built(tmp_path), tmp_path / "a", 3)[0][-1]
    plain = play(built(tmp_path, "fedet"), tmp_path / "b", 3)[0][-1]
    assert check.same(plus.large, plain.large)
    assert check.same(plus.small, plain.small)
    assert check.same(plus.output, plain.large)


@pytest.mark.parametrize(
    "change",
    [
        {"target": "soft"},
        {"target": "soft", "temperature": 0.5},
        {"views": 2},
        {"mix": "mixup"},
        {"mix": "cutmix"},
        {"decay": 0.5},
        {"agreement": True},
        {"cap": 1.2},
        {"small_teachers": True},
        {"align": 1.0},
        {"heads": "up"},
        {"heads": "down"},
        {"heads": "none"},
        {"calibrate": 1.0},
        {"local_mix": 0.5},
        {"mu": 0.5},
        {"server": {**OFF["server"], "momentum": 0.9}},
        {"warmup": {"steps": 2, "batch": 16}},
    ],
    ids=str,
)
def test_every_ingredient_changes_the_result(tmp_path, change):
    def outcome(**changes):
        state = play(built(tmp_path, **changes), tmp_path / str(len(changes)), 2)[0][-1]
        return {"output": state.output, **state.small}

    base = {"target": "soft"} if "temperature" in change else {}
    assert not check.same(outcome(**change), outcome(**base))


def test_the_marginal_is_the_mean_of_the_consensus_over_the_rounds(tmp_path, monkeypatch):
    seen, plain = [], maths.aligned

    def noting(probs, marginal, strength):
        seen.append(probs.mean(dim=0))
        return plain(probs, marginal, strength)

    monkeypatch.setattr(maths, "aligned", noting)
    states, _ = play(built(tmp_path, align=1.0), tmp_path, 3)
    torch.testing.assert_close(states[-1].marginal, torch.stack(seen).mean(dim=0))


def test_a_client_that_agrees_with_the_aligned_consensus_is_no_dissenter():
    probs = torch.tensor([[[0.6, 0.4]], [[0.3, 0.7]]])
    alpha = torch.tensor([[0.8], [0.2]])
    c = maths.agreed(alpha, probs, torch.tensor([[0.45, 0.55]]))  # aligned: the label turned to 1
    assert c.label.tolist() == [1]
    torch.testing.assert_close(c.mass, torch.tensor([0.8]))
    torch.testing.assert_close(c.diversity, torch.tensor([[0.48, 0.32]]))


def test_it_sends_what_fedet_sends(tmp_path):
    def sent(method):
        quick = {"name": method, "client": {"steps": 1}, "server": {"steps": 2, "batch": 16}}
        return fedet.run(check.SMALL | {"method": quick}, out=tmp_path / method, seed=3, rounds=2, progress=False).traffic

    assert sent("fedet-plus") == sent("fedet")


def test_the_output_is_the_moving_average_of_the_server_model(tmp_path):
    ready = built(tmp_path, decay=0.5)
    states, _ = play(ready, tmp_path, 3)
    expected = states[0].large
    for number, state in enumerate(states[1:], start=1):
        expected = maths.average(
            [expected, state.large], [min(0.5, number / (number + 3)), 1 - min(0.5, number / (number + 3))]
        )
    assert check.same(states[-1].output, expected)
    assert check.same(ready.method.models(states[-1], ready.env)["server"][1], expected)
    assert all(check.same(head_of(w), head_of(expected)) for w in states[-1].small.values())


@pytest.mark.parametrize(("heads", "up", "down"), [("both", 1, 1), ("up", 1, 0), ("down", 0, 1), ("none", 0, 0)])
def test_heads_are_transferred_in_the_chosen_directions(tmp_path, heads, up, down):
    ready = built(tmp_path, heads=heads, server={"steps": 0})
    (before, after), replies = play(ready, tmp_path)
    mean = maths.average([head_of(w) for w in replies])
    assert check.same(head_of(after.large), mean if up else head_of(before.large))
    arrived = [check.same(head_of(w), head_of(after.large)) for w in after.small.values()]
    assert all(arrived) if down else not any(arrived)


def test_teachers_are_asked_about_the_mixture_that_the_student_sees(tmp_path, monkeypatch):
    ready = built(tmp_path, mix="both", views=2, target="soft")
    asked, seen = [], []

    def noting(function, notes):
        def noted(model, data, index=None, *rest, **keywords):
            notes.append((data, index))
            return function(model, data, index, *rest, **keywords)

        return noted

    monkeypatch.setattr(train, "predict", noting(train.predict, asked))
    monkeypatch.setattr(train, "forward", noting(train.forward, seen))
    rows = train.rows_used(2 * len(ready.env.public), ready.method.server, _distillation_seed(ready))[0]
    play(ready, tmp_path)
    whole = MixedViews(ready.env.public, 2, "both").subset(1, rows)
    teachers = [(data, index) for data, index in asked if index is not None and torch.equal(index, rows)]
    assert len(teachers) == len(chosen(ready, 1))
    for data, index in [*teachers, *seen[-ready.method.server.steps :]]:
        assert torch.equal(data.inputs(index), whole.inputs(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mix": "mixup"}, "texts can't be mixed"),
        ({"local_mix": 0.3}, "texts can't be mixed"),
        ({"warmup.steps": 1}, "warmup needs images"),
    ],
    ids=str,
)
def test_what_texts_do_not_allow_is_refused_before_a_run_starts(tmp_path, change, words):
    from fedet.data import Public
    from fedet.errors import ConfigError

    ready = built(tmp_path, **change)
    public = Public(torch.randint(0, 9, (8, 5)), torch.arange(8), ready.config.data.augment, 0)
    with pytest.raises(ConfigError, match=words):
        ready.method.check(type(ready.env)(**{**vars(ready.env), "public": public}))


def test_local_mixing_trains_on_pairs_of_the_clients_own_examples(tmp_path):
    data = built(tmp_path).data.client(0)
    seen = []

    class Constant(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, inputs):
            seen.append(inputs)
            return torch.tensor([[2.0, 0.0, -1.0]]).expand(len(inputs), -1)

    own, index = data.inputs(torch.arange(4)).flatten(1), torch.arange(4)
    labels = torch.tensor([0, 1, 2, 1])
    batch = type("Batch", (), {"batch": lambda self, rows: (own[rows], labels[rows])})()
    torch.manual_seed(0)
    loss = train.calibrated(labels, 0.0, mix=0.5)(Constant(), batch, index)
    torch.manual_seed(0)
    partner, share = torch.randperm(4), torch.distributions.Beta(0.5, 0.5).sample((4,))
    torch.testing.assert_close(seen[0], share[:, None] * own + (1 - share)[:, None] * own[partner])
    costs = -torch.log_softmax(torch.tensor([2.0, 0.0, -1.0]), dim=0)[labels]
    torch.testing.assert_close(loss, (share * costs + (1 - share) * costs[partner]).mean())


def test_mixing_gives_the_same_bits_in_a_pool_and_after_a_stop(tmp_path):
    method = {"name": "fedet-plus", "local_mix": 0.3, **check.quick(config.method_class("fedet-plus"))}
    small = check.SMALL | {"method": {key.removeprefix("method."): value for key, value in method.items()}}

    def bits(name, **changes):
        return (
            fedet.run(small, out=tmp_path / name, progress=False, **changes).run_dir / "last/model.safetensors"
        ).read_bytes()

    whole = bits("whole", rounds=2)
    assert bits("pool", rounds=2, run__workers=2) == whole
    bits("stopped", rounds=1)
    (stopped,) = (path for path in (tmp_path / "stopped").iterdir() if path.name != ".cache")
    fedet.resume(stopped, rounds=2, progress=False)
    assert (stopped / "last/model.safetensors").read_bytes() == whole


def _distillation_seed(ready):
    from fedet.core import Round, seed_of

    return train.distillation_seed(Round(1, [], lambda requests: {}, seed_of(ready.seed, "round", 1)))
