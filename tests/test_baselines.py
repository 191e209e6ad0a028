"""The other methods of the paper's table against hand-computed numbers, closed forms of their traffic, and their pitfalls."""

from dataclasses import replace

import pytest
import torch
from lab import Altered, Curve, Scalar, Spy, chosen, federation, on_parabolas

from fedet import check, config, experiment, maths, train
from fedet.core import Payload
from fedet.engine import rounds
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError
from fedet.methods.fedavg import FedAvg
from fedet.methods.fedgkt import FedGKT
from fedet.methods.fedprox import FedProx
from fedet.methods.scaffold import Scaffold
from fedet.models import SPLIT
from fedet.storage.client_store import ClientStore
from fedet.train import Training

CURVES = [Curve(1, 1), Curve(3, -1)]
TWO_STEPS = Training(lr=0.1, batch=1, steps=2)
ZERO = {"x": torch.zeros(1, dtype=torch.float64)}


def built(tmp_path, method, **changes):
    short = check.quick(config.method_class(method))
    return experiment.build(config.load(check.SMALL, {"method.name": method, **short, **changes}), tmp_path / "cache")


def play(ready, tmp_path, number=1, transport=None):
    """Some rounds; the last state, the entries, the store, and every message that crossed."""
    store, spy = ClientStore(tmp_path / "clients"), Spy(transport or InProcess(ready))
    snapshot, entries = rounds.Snapshot(ready.method.init(ready.env)), []
    for _ in range(number):
        entry, _, snapshot = rounds.run_round(ready, store, snapshot, spy)
        store.commit(snapshot.round)
        entries.append(entry)
    return snapshot.state, entries, store, spy.seen


# FedProx


def test_fedprox_on_parabolas(monkeypatch):
    on_parabolas(monkeypatch)
    _, step, _ = federation(FedProx(TWO_STEPS, mu=1.0), Scalar, CURVES)
    assert step(ZERO, 1)["x"].item() == pytest.approx(-0.15, abs=1e-12)
    for curve, expected in zip(CURVES, (0.18, -0.48), strict=True):
        _, alone, _ = federation(FedProx(TWO_STEPS, mu=1.0), Scalar, [curve])
        assert alone(ZERO, 1)["x"].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
def test_fedprox_closed_form_and_first_step(monkeypatch, mu):
    on_parabolas(monkeypatch)
    a, b, x, eta, tau = 3.0, -1.0, 0.4, 0.1, 7
    start = {"x": torch.tensor([x], dtype=torch.float64)}
    _, step, _ = federation(FedProx(Training(lr=eta, batch=1, steps=tau), mu=mu), Scalar, [Curve(a, b)])
    rest = (a * b + mu * x) / (a + mu)
    assert step(start, 1)["x"].item() == pytest.approx(rest + (1 - eta * (a + mu)) ** tau * (x - rest), abs=1e-12)
    one = Training(lr=eta, batch=1, steps=1)
    _, prox, _ = federation(FedProx(one, mu=mu), Scalar, CURVES)
    _, plain, _ = federation(FedAvg(one), Scalar, CURVES)
    assert torch.equal(prox(start, 1)["x"], plain(start, 1)["x"])


@pytest.mark.parametrize("method", ["fedprox", "moon"])
def test_without_their_term_they_are_fedavg_bit_for_bit(tmp_path, method):
    plain, *_ = play(built(tmp_path, "fedavg"), tmp_path, 3)
    same, *_ = play(built(tmp_path, method, **{"method.mu": 0.0}), tmp_path, 3)
    other, *_ = play(built(tmp_path, method, **{"method.mu": 2.0}), tmp_path, 3)
    assert check.same(plain, same)
    assert not check.same(plain, other)


# SCAFFOLD


def controls(kept):
    return [kept[k]["control"]["x"].item() if kept[k] else 0.0 for k in sorted(kept)]


def test_scaffold_option_two_on_parabolas(monkeypatch):
    on_parabolas(monkeypatch)
    method = Scaffold(TWO_STEPS)
    env, step, kept = federation(method, Scalar, CURVES)
    state = method.init(env)
    expected = [
        (-0.160000, 0.800000, (-0.950000, 2.550000)),
        (-0.281500, 0.607500, (-1.189500, 2.404500)),
        (-0.360945, 0.397225, None),
    ]
    for number, (x, c, own) in enumerate(expected, start=1):
        state = step(state, number)
        assert state.model["x"].item() == pytest.approx(x, abs=5.1e-7)
        assert state.control["x"].item() == pytest.approx(c, abs=5.1e-7)
        if own:
            assert controls(kept) == pytest.approx(own, abs=5.1e-7)
    for number in range(4, 201):
        state = step(state, number)
    assert state.model["x"].item() == pytest.approx(-0.5, abs=5e-7)  # where FedAvg stays at -0.457143


def test_scaffold_option_one_on_parabolas(monkeypatch):
    on_parabolas(monkeypatch)
    method = Scaffold(TWO_STEPS, option="I")
    env, step, kept = federation(method, Scalar, CURVES)
    state = method.init(env)
    for number, (x, c) in enumerate([(-0.16, 1.0), (-0.284, 0.68), (-0.363, 0.432)], start=1):
        state = step(state, number)
        assert state.model["x"].item() == pytest.approx(x, abs=5.1e-7)
        assert state.control["x"].item() == pytest.approx(c, abs=5.1e-7)
        if number == 2:
            assert controls(kept) == pytest.approx([-1.16, 2.52], abs=5.1e-7)
    for number in range(4, 201):
        state = step(state, number)
    assert state.model["x"].item() == pytest.approx(-0.5, abs=5e-7)


def test_scaffold_partial_participation(monkeypatch):
    on_parabolas(monkeypatch)
    method = Scaffold(TWO_STEPS)
    env, step, kept = federation(method, Scalar, CURVES)
    state = method.init(env)
    for number, (who, x, c) in enumerate(
        [([0], 0.190000, -0.475000), ([1], -0.336150, 1.077875), ([0], -0.467578, 0.867507)], start=1
    ):
        state = step(state, number, who)
        assert state.model["x"].item() == pytest.approx(x, abs=5.1e-7)
        assert state.control["x"].item() == pytest.approx(c, abs=5.1e-7)
        assert state.control["x"].item() == pytest.approx(sum(controls(kept)) / 2, abs=1e-12)
    assert controls(kept) == pytest.approx([-1.370736, 3.105750], abs=5.1e-7)


def test_scaffold_single_steps_are_gradient_descent_on_the_mean(monkeypatch):
    on_parabolas(monkeypatch)
    method = Scaffold(Training(lr=0.1, batch=1, steps=1))
    env, step, _ = federation(method, Scalar, CURVES)
    state = method.init(env)
    for number, x in enumerate([-0.1, -0.18, -0.244, -0.2952], start=1):
        state = step(state, number)
        assert state.model["x"].item() == pytest.approx(x, abs=5.1e-7)


def test_scaffold_controls_average_to_the_servers_every_round(tmp_path):
    ready = built(tmp_path, "scaffold")
    store, snapshot = ClientStore(tmp_path / "c"), rounds.Snapshot(ready.method.init(ready.env))
    for number in range(1, 5):
        _, _, snapshot = rounds.run_round(ready, store, snapshot, InProcess(ready))
        store.commit(number)
        kept = [store.get(k).get("control") for k in range(6)]
        for name, c in snapshot.state.control.items():
            mean = sum(own[name].double() for own in kept if own) / 6
            torch.testing.assert_close(c.double(), mean, rtol=1e-4, atol=1e-6)


def test_scaffold_first_round_is_fedavg(tmp_path):
    plain, *_ = play(built(tmp_path, "fedavg"), tmp_path)
    state, *_ = play(built(tmp_path, "scaffold"), tmp_path)
    for name, w in plain.items():
        torch.testing.assert_close(state.model[name], w, rtol=1e-5, atol=1e-7)


def test_scaffold_control_is_the_mean_of_raw_gradients(tmp_path, monkeypatch):
    """With plain SGD, option II makes c_k the mean of the mini-batch gradients of the local steps."""
    ready = built(tmp_path, "scaffold")
    raw, real = [], train.cross_entropy

    def watching(model, data, index):
        loss = real(model, data, index)
        raw.append(torch.autograd.grad(loss, model.head.l3.bias, retain_graph=True)[0].double())
        return loss

    _, _, store, _ = play(ready, tmp_path)
    monkeypatch.setattr(train, "cross_entropy", watching)
    member = chosen(ready, 2)[0].id
    state, *_ = play(built(tmp_path, "scaffold"), tmp_path)
    client = ready.client(member, 2, store.get(member))
    raw.clear()
    ready.method.local(Payload({"model": state.model, "control": state.control}), client)
    torch.testing.assert_close(client.state["control"]["head.l3.bias"].double(), sum(raw) / len(raw), rtol=1e-3, atol=1e-5)


# MOON


def test_moon_first_participation_is_fedavg_and_the_second_is_not(tmp_path):
    plain, moon = built(tmp_path, "fedavg", **{"run.cohort": 6}), built(tmp_path, "moon", **{"run.cohort": 6})
    (a, *_), (b, *_) = play(plain, tmp_path), play(moon, tmp_path)
    assert check.same(a, b)
    (a, *_), (b, *_) = play(plain, tmp_path, 2), play(moon, tmp_path, 2)
    assert not check.same(a, b)


def test_moon_keeps_a_copy_of_the_trained_model(tmp_path):
    ready = built(tmp_path, "moon")
    _, entries, store, seen = play(ready, tmp_path)
    for k in entries[0]["cohort"]:
        sent = seen[0][1][k].tensors["model"]
        kept = store.get(k)["previous"]
        assert check.same(kept, sent)
        assert all(kept[name].data_ptr() != sent[name].data_ptr() for name in sent)
    assert all(store.get(k) == {} for k in range(6) if k not in entries[0]["cohort"])


def test_moon_trains_as_if_both_models_were_asked_at_every_step(tmp_path):
    ready = built(tmp_path, "moon", **{"method.client.steps": 7})
    received = ready.env.initial(ready.env.large)
    generator = torch.Generator().manual_seed(1)
    previous = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in received.items()}
    client = ready.client(0, 2, {"previous": previous})
    up = ready.method.local(Payload({"model": received}), client)
    model, far, near = (client.build(client.large, w, slot) for w, slot in ((received, "a"), (previous, "b"), (received, "c")))

    def loss(model, data, index):
        x, y = data.batch(index)
        z = model.representation(x)
        with torch.no_grad():
            others = near.representation(x), far.representation(x)
        contrastive = maths.contrastive(z, *others, ready.method.temperature)
        return torch.nn.functional.cross_entropy(model.head.l3(z), y) + ready.method.mu * contrastive

    train.fit(model, client.data, ready.method.client, seed=client.seed, loss=loss)
    moved = max(float((w - received[name]).abs().max()) for name, w in model.state_dict().items())
    assert moved > 1e-3
    for name, w in model.state_dict().items():
        torch.testing.assert_close(up.tensors["model"][name], w, rtol=1e-4, atol=1e-6)


# FedDF


def test_feddf_without_steps_is_uniform_fedavg(tmp_path):
    ready = built(tmp_path, "feddf", **{"models.clients": ["cnn"], "method.server.steps": 0})
    state, _, _, seen = play(ready, tmp_path)
    assert check.same(state["cnn"], maths.average([up.tensors["model"] for up in seen[0][1].values()]))


def test_feddf_absent_architecture_keeps_its_model(tmp_path):
    changes = {"models.assignment": "given", "models.given": ["cnn-w0.5"] * 5 + ["resnet8-w0.0625"], "run.cohort": 2}
    for seed in range(20):
        ready = built(tmp_path, "feddf", **changes, **{"run.seed": seed})
        if all(c.arch == "cnn-w0.5" for c in chosen(ready, 1)):
            break
    state, *_ = play(ready, tmp_path)
    assert check.same(state["resnet8-w0.0625"], ready.env.initial("resnet8-w0.0625"))
    assert not check.same(state["cnn-w0.5"], ready.env.initial("cnn-w0.5"))


def test_feddf_evaluates_the_largest_and_logs_all(tmp_path):
    ready = built(tmp_path, "feddf")
    _, entries, *_ = play(ready, tmp_path)
    names = list(entries[0]["models"])
    assert names[0] == ready.env.largest
    assert set(names) == {*ready.env.archs, "ensemble"}


# DS-FL


def test_dsfl_sends_labels_and_never_parameters(tmp_path):
    ready = built(tmp_path, "dsfl", **{"method.samples": 40})
    _, entries, store, seen = play(ready, tmp_path, 2)
    m, o, n = 3, 40, 10
    for entry in entries:
        assert entry["model_params_up"] == entry["model_params_down"] == 0
        assert entry["params_up"] == m * o * n
        assert entry["params_down"] == m * (o * n + o)
    first, second = seen[0][0], seen[2][0]
    asked = [next(iter(requests.values())).tensors["request"]["samples"] for requests in (first, second)]
    assert len(asked[0].unique()) == 40
    assert not torch.equal(*asked)  # a fresh subset every round
    for k in entries[0]["cohort"]:
        assert "request" not in store.get(k)
    agreed = next(iter(seen[1][0].values())).tensors["labels"]["probs"]
    sent = torch.stack([up.tensors["labels"]["probs"] for _, up in sorted(seen[0][1].items())])
    assert torch.equal(agreed, maths.era(sent, 0.1))


def test_dsfl_clients_go_on_with_their_own_models(tmp_path):
    ready = built(tmp_path, "dsfl", **{"run.cohort": 6, "method.samples": 40})
    _, entries, store, _ = play(ready, tmp_path)
    after_one = {k: store.get(k)["model"] for k in range(6)}
    same_arch = [k for k in range(6) if ready.clients[k].arch == ready.clients[0].arch]
    assert not check.same(after_one[same_arch[0]], after_one[same_arch[1]])  # no parameters flow
    assert entries[0]["models"].keys() == {ready.env.largest, "clients"}


# FedGKT


def test_fedgkt_traffic_is_the_closed_form(tmp_path):
    ready = built(tmp_path, "fedgkt", **{"method.epochs": 1})
    _, entries, _, _ = play(ready, tmp_path, 2)
    width, n = 16 * 8 * 8, 10
    for entry, extra in zip(entries, (0, 1), strict=True):  # from the second round on, features go up once more
        examples = sum(ready.clients[k].num_examples for k in entry["cohort"])
        assert entry["params_up"] == examples * (width + n + 1) + extra * examples * width
        assert entry["params_down"] == extra * examples * n
        assert entry["model_params_up"] == entry["model_params_down"] == 0


def test_fedgkt_cached_needs_no_extra_upload(tmp_path):
    ready = built(tmp_path, "fedgkt", **{"method.epochs": 1, "method.server_logits": "cached", "run.cohort": 6})
    _, entries, _, _ = play(ready, tmp_path, 2)
    examples = int(ready.data.sizes.sum())
    assert [e["params_up"] for e in entries] == [examples * (16 * 64 + 11)] * 2
    assert [e["params_down"] for e in entries] == [0, examples * 10]


def test_fedgkt_without_distillation_clients_learn_alone(tmp_path):
    ready = built(tmp_path, "fedgkt", **{"method.epochs": 1, "method.alpha": 0.0, "run.cohort": 6})
    _, _, store, _ = play(ready, tmp_path, 2)
    for k in range(2):
        arch = SPLIT + ready.clients[k].arch
        weights = ready.env.initial(arch)
        for number in (1, 2):
            client = ready.client(k, number, {})
            model = ready.env.build(arch, weights)
            train.fit(model, client.data, ready.method.client, seed=client.seed)
            weights = {name: w.clone() for name, w in model.state_dict().items()}
        assert check.same(store.get(k)["model"], weights)


def test_fedgkt_leaves_absent_clients_alone(tmp_path):
    ready = built(tmp_path, "fedgkt", **{"method.epochs": 1})
    _, entries, store, _ = play(ready, tmp_path)
    assert all(store.get(k) == {} for k in range(6) if k not in entries[0]["cohort"])
    stems = [{n: w for n, w in store.get(k)["model"].items() if n.startswith("stem")} for k in entries[0]["cohort"]]
    assert not check.same(stems[0], stems[1])
    assert entries[0]["models"].keys() == {"server", "clients"}


def test_fedgkt_server_passes_decrease():
    method = FedGKT(server=Training(batch=10), epochs=20)
    passes = [method._server_steps(number, 100) // 10 for number in (1, 20, 21, 31, 41, 101, 151)]
    assert passes == [20, 20, 15, 10, 5, 3, 2]


# FedGEMS


def test_fedgems_asks_only_for_what_it_never_knew(tmp_path):
    ready = built(tmp_path, "fedgems", **{"method.server.steps": 20, "method.server.lr": 0.1})
    state, entries, _, seen = play(ready, tmp_path, 4)
    size = len(ready.env.public)
    known = torch.zeros(size, dtype=torch.bool)
    assert seen[0][0][entries[0]["cohort"][0]].tensors["logits"] == {}  # an untrained server has nothing to say
    first = next(iter(seen[0][0].values())).tensors["request"]["samples"]
    known |= torch.ones(size, dtype=torch.bool).index_fill(0, first, False)
    for entry, (requests, _) in zip(entries[1:], seen[1:], strict=True):
        down = next(iter(requests.values()))
        asked = down.tensors["request"]["samples"]
        right = down.tensors["logits"]["server"].argmax(-1) == ready.env.public.labels
        known |= right
        assert torch.equal(asked, (~known).nonzero().squeeze(-1))
        assert entry["params_up"] == 3 * len(asked) * 10
        assert entry["params_down"] == 3 * (size * 10 + len(asked))
        assert entry["notes"]["asked"] == len(asked)
    assert torch.equal(state.known, known)


def test_fedgems_clients_train_on_their_own_data_until_the_server_has_trained(tmp_path):
    kept = {}
    for steps in (0, 6):
        ready = built(tmp_path / str(steps), "fedgems", **{"method.public.steps": steps})
        for rounds_played in (1, 3):
            _, _, store, _ = play(ready, tmp_path / f"{steps}-{rounds_played}", rounds_played)
            kept[steps, rounds_played] = {k: store.get(k) for k in store.clients()}
    assert check.same(kept[0, 1], kept[6, 1])  # an untrained server teaches nothing
    assert not check.same(kept[0, 3], kept[6, 3])


def test_fedgems_asks_nothing_when_the_server_knows_all(tmp_path, monkeypatch):
    ready = built(tmp_path, "fedgems")
    real, labels = train.predict, ready.env.public.labels

    def certain(model, data, index=None, chunk=250):
        if index is None and len(data) == len(labels):
            return torch.nn.functional.one_hot(labels, 10).float()
        return real(model, data, index, chunk)

    monkeypatch.setattr(train, "predict", certain)
    state, entries, _, seen = play(ready, tmp_path)
    assert entries[0]["params_up"] == 0
    assert not entries[0]["lost"]
    assert bool(state.known.all())
    assert all(len(up.tensors["logits"]["client"]) == 0 for up in seen[0][1].values())


def test_fedgems_with_eps_one_ignores_the_clients(tmp_path):
    states = []
    for lr in (0.1, 0.01):
        ready = built(tmp_path, "fedgems", **{"method.eps": 1.0, "method.client.lr": lr})
        states.append(play(ready, tmp_path, 2)[0])
    assert check.same(states[0].large, states[1].large)
    other, *_ = play(built(tmp_path, "fedgems", **{"method.eps": 0.5}), tmp_path, 2)
    assert not check.same(other.large, states[0].large)


def test_fedgems_reads_public_labels_and_says_so(tmp_path):
    states = []
    for shift in (0, 1):
        ready = built(tmp_path, "fedgems")
        ready.env.public.labels.copy_((ready.env.public.labels + shift) % 10)
        states.append(play(ready, tmp_path)[0].large)
    assert not check.same(*states)
    assert ready.method.traits.public_data == "labelled"


def test_the_mixed_loss_of_fedgems_by_hand():
    """One sample with a teacher and one without, against the formula."""
    from fedet.methods.fedgems import FedGEMS

    logits = torch.tensor([[0.1, 0.4, -0.1], [1.0, 0.0, 0.5]], dtype=torch.float64)
    teacher = torch.tensor([[1.571005, 0.628699, -0.214498], [9.0, 0.0, 0.0]], dtype=torch.float64)
    labels, taught = torch.tensor([0, 2]), torch.tensor([True, False])

    class Fixed:
        device = torch.device("cpu")

        def __call__(self, x):
            return x

    class Rows:
        def inputs(self, index):
            return logits[index]

    loss = FedGEMS(eps=0.75)._loss(labels, teacher, taught)(Fixed(), Rows(), torch.arange(2))
    alone = torch.nn.functional.cross_entropy(logits[1:], labels[1:])
    assert loss.item() == pytest.approx((0.922124 + alone.item()) / 2, abs=1e-6)


# Everyone


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "scaffold"])
def test_homogeneous_methods_send_the_large_model(tmp_path, method):
    ready = built(tmp_path, method)
    _, entries, *_ = play(ready, tmp_path)
    n = ready.env.model_cache.num_params(ready.env.large) * (2 if method == "scaffold" else 1)
    assert entries[0]["params_up"] == entries[0]["params_down"] == 3 * n


def test_feddf_sends_small_models(tmp_path):
    ready = built(tmp_path, "feddf")
    _, entries, *_ = play(ready, tmp_path)
    sizes = sum(ready.env.model_cache.num_params(ready.clients[k].arch) for k in entries[0]["cohort"])
    assert entries[0]["params_up"] == entries[0]["params_down"] == sizes


def test_feddf_stops_early_and_keeps_the_best_student(tmp_path):
    """At a rate that ruins the students, the best on validation data is no worse than where they started from."""
    ruin = {"method.server.lr": 2.0, "method.server.steps": 40, "method.server.optimiser": "sgd", "method.server.clip": 1.0}
    learn = {"method.client.steps": 80, "method.client.lr": 0.3, "method.client.clip": 1.0}
    wise = {"method.validate_every": 1, "method.patience": 3}

    def after(**changes):
        ready = built(tmp_path, "feddf", **{"data.val_fraction": 0.3, **learn, **changes})
        students, *_ = play(ready, tmp_path)
        return [train.evaluate(ready.env.build(arch, w), ready.data.val).accuracy for arch, w in students.items()]

    idle, ruined, kept = after(**{"method.server.steps": 0}), after(**ruin), after(**ruin, **wise)
    assert sum(ruined) < sum(idle)
    assert all(later >= before for before, later in zip(idle, kept, strict=True))
    with pytest.raises(ConfigError, match=r"data\.val_fraction"):
        after(**ruin, **wise, **{"data.val_fraction": 0.0})


def test_models_that_clients_keep_are_tested_for_all_of_them_now_and_then(tmp_path):
    ready, at_once = built(tmp_path, "fedgkt", **{"run.eval_stored_every": 2}), []

    class Watched(type(ready.method)):
        def client_models(self, state, env, client_states):
            at_once.append(len(client_states))
            return super().client_models(state, env, client_states)

    _, entries = check.Lab("fedgkt", {}, tmp_path).run(replace(ready, method=Watched(**vars(ready.method))))
    assert max(at_once) == ready.config.run.cohort  # more states than a round has may not fit in memory
    assert ["stored" in entry for entry in entries] == [False, True, True]  # the last round is tested in full
    stored, seen = entries[1]["stored"]["server"], {k for entry in entries[:2] for k in entry["replied"]}
    assert stored["clients"] == len(seen) > len(entries[1]["replied"])
    assert stored["mean"] <= stored["best"] <= 1


def test_scaffolds_single_count_is_logged_beside_the_double(tmp_path):
    ready = built(tmp_path, "scaffold")
    _, entries = check.Lab("scaffold", {}, tmp_path).run(ready)
    n = ready.env.model_cache.num_params(ready.env.large)
    for entry in entries:
        assert entry["model_params_up"] == n * len(entry["replied"]) == entry["params_up"] // 2


def lying(ready, victim, group, name, lie):
    """One client's tensor of this group and name is another one."""

    def change(k, reply):
        if k != victim or group not in reply.tensors:
            return reply
        truth = dict(reply.tensors[group])
        return Payload({group: truth | {name: lie(truth[name].clone())}})

    return Altered(ready, change)


@pytest.mark.parametrize("label", [-1, 10])
def test_fedgkt_sets_a_client_with_impossible_labels_aside(tmp_path, label):
    ready = built(tmp_path, "fedgkt")
    victim = chosen(ready, 1)[0].id
    liar = lying(ready, victim, "upload", "labels", lambda labels: labels.index_fill(0, torch.tensor([0]), label))
    _, (entry,), *_ = play(ready, tmp_path, transport=liar)
    assert entry["failures"] == [{"client": victim, "kind": "bad reply", "why": "sent labels outside 0..9"}]
    assert len(entry["replied"]) == len(entry["cohort"]) - 1


@pytest.mark.parametrize("lie", [lambda p: p * 1e6, lambda p: 1 - 2 * p, lambda p: p - 0.1])
def test_dsfl_sets_a_client_whose_soft_labels_are_none_aside(tmp_path, lie):
    ready = built(tmp_path, "dsfl")
    victim = chosen(ready, 1)[0].id
    _, (entry,), *_ = play(ready, tmp_path, transport=lying(ready, victim, "labels", "probs", lie))
    assert entry["failures"] == [{"client": victim, "kind": "bad reply", "why": "sent soft labels that are not probabilities"}]
    assert len(entry["replied"]) == len(entry["cohort"]) - 1
