"""Differential privacy at the clients: what is computed, what it costs, and what is refused."""

import contextlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from opacus.accountants import RDPAccountant

from fedet import check, config, experiment, models, privacy, train
from fedet.core import Delivery, Payload, generator, seed_of, weights_of
from fedet.engine import loop, session
from fedet.engine.exchange import InProcess
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.methods import METHODS, fedavg
from fedet.privacy import DPSGD
from fedet.storage import metrics as logs
from fedet.storage.run_folder import RunFolder
from fedet.train import Training

CALIBRATED = {"fedet-plus": {"method.calibrate": 0.0}}


def load(method="fedet", **changes):
    changes = CALIBRATED.get(method, {}) | {key.replace("__", "."): value for key, value in changes.items()}
    return config.load(check.SMALL, {"method.name": method, "method.client": {"steps": 4, "batch": 16}, **changes})


def weights(result):
    return {path.parent.name: path.read_bytes() for path in sorted(Path(result.run_dir).glob("*/model.safetensors"))}


def metrics(result):
    drop = ("seconds",)
    return [{key: value for key, value in m.items() if key not in drop} for m in result.metrics]


def net(name="cnn", **options):
    torch.manual_seed(0)
    return models.build(name, input_shape=(1, 8, 8), num_classes=10, feature_width=16, representation_width=8, **options)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return experiment.build(load(), tmp_path_factory.mktemp("cache")).data.client(0)


@pytest.mark.parametrize("model", [{"name": "cnn"}, {"name": "resnet8", "width": 0.0625}], ids=lambda m: m["name"])
def test_gradients_of_examples_have_the_gradient_of_their_mean_loss_as_mean(model, examples):
    model, index = net(**model), torch.arange(9)
    gradients, losses = privacy.example_gradients(train.cross_entropy, model, examples, index)
    loss = train.cross_entropy(model, examples, index)
    loss.backward()
    assert float(losses.mean()) == pytest.approx(loss.item(), rel=1e-5)
    for each, parameter in zip(gradients, model.parameters(), strict=True):
        assert each.shape == (9, *parameter.shape)
        torch.testing.assert_close(each.mean(dim=0), parameter.grad, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_one_by_one_over_all_parameters():
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[[4.0]], [[0.4]]])]  # norms 5 and 0.5
    first, second = privacy.clip_each(gradients, 1.0)
    assert first.tolist() == pytest.approx([0.6 + 0.3])
    assert second.flatten().tolist() == pytest.approx([0.8 + 0.4])
    assert [g.flatten().tolist() for g in privacy.clip_each(gradients, 0.0)] == [pytest.approx([3.3]), pytest.approx([4.4])]


def test_a_step_adds_noise_of_the_stated_size_and_divides_by_the_expected_batch(examples):
    settings = config.PrivacyConfig(clip=0.5, noise=2.0)
    model, nobody = net(), torch.empty(0, dtype=torch.int64)
    dp = DPSGD.of(settings, len(examples), 16, seed=3)
    assert float(dp.backward(train.cross_entropy, model, examples, nobody)) == 0.0
    noise = torch.cat([p.grad.flatten() for p in model.parameters()]) * 16
    assert len(noise) > 5000
    assert float(noise.std()) == pytest.approx(2.0 * 0.5, rel=0.05)
    silent = DPSGD.of(config.PrivacyConfig(clip=0.5), len(examples), 16, seed=3)
    silent.backward(train.cross_entropy, model, examples, torch.arange(7))
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(total) <= 7 * 0.5 / 16 + 1e-6


def test_every_example_is_drawn_independently_with_the_accountants_rate():
    dp = DPSGD.of(config.PrivacyConfig(clip=1.0), 50, 10, seed=1)
    drawn = list(dp.batches(2000))
    sizes = torch.tensor([len(index) for index in drawn], dtype=torch.float64)
    assert float(sizes.mean()) == pytest.approx(10, abs=0.3)
    assert float(sizes.var()) == pytest.approx(50 * 0.2 * 0.8, rel=0.15)  # a fixed size would have none
    each = torch.bincount(torch.cat(drawn), minlength=50) / 2000
    assert float((each - 0.2).abs().max()) < 0.05
    assert all(index.tolist() == list(range(5)) for index in DPSGD.of(config.PrivacyConfig(clip=1.0), 5, 10, 1).batches(3))


def test_the_epsilon_is_the_accountants_for_the_steps_taken(tmp_path):
    c = load("fedet", privacy__clip=1.0, privacy__noise=1.1)
    done = session.run_config(c, tmp_path)
    sizes = experiment.build(c, tmp_path / "cache").data.sizes
    stated = json.loads((done.run_dir / "result.json").read_text())["privacy"]
    rounds = {str(k): sum(k in m["cohort"] for m in done.metrics) for k in range(len(sizes))}
    assert stated["clients"].keys() == {k for k, n in rounds.items() if n}
    for k, own in stated["clients"].items():
        accountant, size = RDPAccountant(), int(sizes[int(k)])
        for _ in range(rounds[k] * 4):
            accountant.step(noise_multiplier=1.1, sample_rate=min(16, size) / size)
        assert own == {"epsilon": pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-6)}
    found = [own["epsilon"] for own in stated["clients"].values()]
    assert stated["epsilon"]["max"] == max(found)
    assert done.metrics[-1]["privacy"]["epsilon"] == stated["epsilon"]
    last = json.loads((done.run_dir / "ledger.jsonl").read_text().splitlines()[-1])
    assert {str(line["id"]): line["epsilon"] for line in last["clients"]}.items() <= {
        k: own["epsilon"] for k, own in stated["clients"].items()
    }.items()
    assert "epsilon" in (done.run_dir / "report.html").read_text()


def test_noise_0_without_clipping_is_the_plain_run_to_the_bit(tmp_path):
    plain = session.run_config(load(), tmp_path / "a")
    off = session.run_config(load(privacy__clip=0.0, privacy__noise=0.0, privacy__delta=0.5), tmp_path / "b")
    assert weights(plain) == weights(off)
    assert metrics(plain) == metrics(off)
    assert plain.run_dir.name == off.run_dir.name  # the same experiment
    assert "privacy" not in plain.summary


def test_private_training_without_noise_or_effective_clipping_follows_plain_training(examples):
    few = replace(examples, rows=examples.rows[:12])  # fewer than a batch: both take all of them in every step
    settings = Training(lr=0.1, batch=16, steps=5)
    plain, private = net(), net()
    train.fit(plain, few, settings, seed=1)
    train.fit(private, replace(few, privacy=config.PrivacyConfig(clip=1e6)), settings, seed=1)
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_private_runs_repeat_and_are_the_same_in_workers(tmp_path):
    noise = {"privacy__clip": 1.0, "privacy__noise": 0.5, "privacy__update_clip": 1.0, "privacy__update_noise": 0.1}
    c = load("fedprox", run__rounds=1, **noise)
    one = session.run_config(c, tmp_path / "a")
    two = session.run_config(c, tmp_path / "b", workers=2)
    assert weights(one) == weights(two)
    assert metrics(one) == metrics(two)
    stated = one.summary["privacy"]
    assert stated["client_epsilon"]["max"] > 0
    assert weights(one) != weights(session.run_config(load("fedprox", run__rounds=1), tmp_path / "c"))


def test_what_is_spent_continues_where_a_run_was_stopped(tmp_path):
    c = load(privacy__clip=1.0, privacy__noise=1.0, run__rounds=2)
    whole = session.run_config(c, tmp_path / "a")
    half = session.run_config(c.model_copy(update={"run": c.run.model_copy(update={"rounds": 1})}), tmp_path / "b")
    assert session.resume(half.run_dir, rounds=2).summary["privacy"] == whole.summary["privacy"]


class Stopped(InProcess):
    """The run is stopped after the clients of a round have answered, or they all lose their replies."""

    def __init__(self, ready, at, lose=False):
        super().__init__(ready)
        self.at, self.lose = at, lose

    def send(self, number, tasks):
        delivery = super().send(number, tasks)
        if number == self.at and not self.lose:
            raise KeyboardInterrupt
        return Delivery({}) if number == self.at else delivery


def play(folder, ready, transport):
    """Run or resume; returns how often each client has trained, as far as the stated epsilons tell."""
    if not (folder.path / "config.toml").exists():
        folder.begin(ready, None)
    with contextlib.suppress(Interrupted):
        loop.run(ready, folder, transport)
    spending = ready.spending()
    times = {spending.of(0, n)["client_epsilon"]: n for n in range(1, 20)}
    return {int(k): times[own["client_epsilon"]] for k, own in folder.result()["privacy"]["clients"].items()}


@pytest.mark.parametrize("secret", [False, True])
def test_rounds_that_were_lost_or_not_finished_are_spent_and_noise_drawn_again_is_spent_again(tmp_path, secret):
    noise = {"privacy__update_clip": 0.001, "privacy__update_noise": 1.0, "privacy__secret": secret}
    ready = experiment.build(load("fedavg", run__rounds=3, run__checkpoint_every=2, run__cohort=6, **noise), tmp_path / "cache")
    path = tmp_path / "run"
    path.mkdir()
    everyone = dict.fromkeys(range(6), 1)
    assert play(RunFolder(path), ready, Stopped(ready, 1)) == everyone  # stopped before its first round was finished
    again = 2 if secret else 1
    stopped = dict.fromkeys(everyone, again + 1)
    assert play(RunFolder(path), ready, Stopped(ready, 2)) == stopped
    with (path / "asked.jsonl").open("a") as file:
        file.write('{"round": 3, "cli')  # killed while it was written
    lost = play(RunFolder(path), ready, Stopped(ready, 3, lose=True))
    assert lost == dict.fromkeys(everyone, again + again + 1)
    assert RunFolder(path).metrics()[-1]["lost"]
    assert RunFolder(path).participations(secret).total == lost


def test_folders_of_older_versions_count_the_rounds_that_were_finished(tmp_path):
    finished = [{"round": 1, "cohort": [0, 2]}, {"round": 2, "cohort": [0]}]
    for secret in (False, True):
        assert privacy.Participations(secret, [], finished).total == {0: 2, 2: 1}
        asked = [{"round": 2, "clients": [0]}, {"round": 2, "clients": [0]}]
        assert privacy.Participations(secret, asked, finished).total == {0: 3 if secret else 2, 2: 1}


def test_a_round_that_the_budget_cut_off_after_its_clients_had_trained_is_spent(tmp_path):
    c = load("dsfl", privacy__clip=1.0, privacy__noise=1.0, run__rounds=50, run__cohort=6)
    small = session.run_config(load("dsfl", run__rounds=1, run__cohort=6), tmp_path / "a").metrics[0]
    budget = small["params_total"] + 12 * small["params_up"] // 10  # the first exchange: ten numbers up, one down
    done = session.run_config(c.model_copy(update={"run": c.run.model_copy(update={"budget_params": budget})}), tmp_path / "b")
    assert done.summary["rounds"] == 1
    asked = RunFolder(done.run_dir).asked()
    assert [line["round"] for line in asked] == [1, 2]
    spending = experiment.build(c, tmp_path / "cache").spending()
    assert done.summary["privacy"]["clients"]["0"] == spending.of(0, 2)


@dataclass(frozen=True)
class Twice(fedavg.FedAvg):
    """Somebody's method, which trains as often as it likes."""

    steps: tuple[int, ...] = (4,)
    batch: int = 16

    def privacy_gap(self):
        return None

    def local(self, down, client):
        model = client.build(client.large, down.tensors["model"])
        for number, steps in enumerate(self.steps):
            train.fit(
                model, client.data, replace(self.client, steps=steps, batch=self.batch), seed=seed_of(client.seed, number)
            )
        return Payload({"model": weights_of(model)})


@pytest.mark.parametrize(("steps", "batch"), [((4, 1), 16), ((5,), 16), ((4,), 17)])
def test_a_method_that_takes_more_steps_than_its_epsilon_counts_is_refused(tmp_path, steps, batch):
    ready = experiment.build(load("fedavg", privacy__clip=1.0, privacy__noise=1.0), tmp_path)
    method = Twice(client=ready.method.client, steps=steps, batch=batch)
    request = Payload({"model": ready.env.initial(ready.env.large)})
    for private, allowed in (({}, False), ({"clip": 0.0, "noise": 0.0}, True)):
        settings = ready.config.privacy.model_copy(update=private)
        own = replace(ready, method=method, config=ready.config.model_copy(update={"privacy": settings}))
        with (
            contextlib.nullcontext() if allowed else pytest.raises(FedetError, match="the epsilon counts 4 with batches of 16")
        ):
            own.local(request, own.client(0, 1, {}))
    fine = replace(ready, method=Twice(client=ready.method.client, steps=(3, 1)))
    assert fine.local(request, fine.client(0, 1, {})).tensors["model"]


def test_clipping_without_noise_has_no_epsilon_and_checkpoints_do_not_read_all_rounds(tmp_path, monkeypatch):
    reads, read = [], logs.read
    monkeypatch.setattr(logs, "read", lambda path, **options: reads.append(path) or read(path, **options))
    done = session.run_config(load(privacy__clip=1.0, run__rounds=1), tmp_path)
    after_one_round = len(reads)
    session.run_config(load(privacy__clip=1.0, run__rounds=3), tmp_path)
    assert len(reads) == 2 * after_one_round
    assert done.summary["privacy"]["epsilon"] == {"max": None, "median": None}
    assert privacy.epsilon(0.0, 0.1, 10, 1e-5) == math.inf
    assert privacy.epsilon(1.0, 0.1, 0, 1e-5) == 0.0


QUICK = ("moon", "scaffold")  # their losses are not a mean of cross-entropies


@pytest.mark.parametrize(
    "method", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (m.name for m in METHODS) if n != "fedgkt"]
)
def test_every_method_but_fedgkt_can_train_with_dp_sgd(method, tmp_path):
    c = load(method, privacy__clip=1.0, privacy__noise=1.0, run__rounds=2, run__cohort=6, method__client={"steps": 1})
    done = session.run_config(c, tmp_path)
    assert len(done.summary["privacy"]["clients"]) == 6
    assert done.summary["rounds"] == 2


def test_an_update_is_clipped_as_a_whole_and_gets_noise():
    before = {"w": torch.zeros(2000), "steps": torch.tensor(3)}
    after = {"w": torch.full((2000,), 2.0), "steps": torch.tensor(4)}
    down, up = Payload({"model": before}), Payload({"model": after})
    clipped = privacy.private_update(config.PrivacyConfig(update_clip=0.5), down, up, seed=1).tensors["model"]
    assert float(clipped["w"].norm()) == pytest.approx(0.5)
    assert int(clipped["steps"]) == 3
    settings = config.PrivacyConfig(update_clip=0.5, update_noise=2.0)
    noisy = privacy.private_update(settings, down, up, seed=1).tensors["model"]
    assert float((noisy["w"] - clipped["w"]).std()) == pytest.approx(1.0, rel=0.1)
    assert privacy.private_update(config.PrivacyConfig(), down, up, seed=1) is up
    inside = privacy.private_update(config.PrivacyConfig(update_clip=1e6), down, up, seed=1).tensors["model"]
    assert torch.equal(inside["w"], after["w"])


def test_secret_noise_can_not_be_repeated(examples):
    settings = Training(lr=0.1, batch=16, steps=1)

    def trained(secret):
        model = net()
        private = replace(examples, privacy=config.PrivacyConfig(clip=1.0, noise=1.0, secret=secret))
        train.fit(model, private, settings, seed=1)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(False), trained(False))
    assert not torch.equal(trained(True), trained(True))


@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        ("fedgkt", {"privacy.clip": 1.0}, "the features and the label of every example"),
        ("scaffold", {"privacy.clip": 1.0, "method.option": "I"}, r"method\.option = 'II'"),
        ("fedet-plus", {"privacy.clip": 1.0, "method.calibrate": 1.0}, r"method\.calibrate = 0"),
        ("fedet-plus", {"privacy.clip": 1.0, "method.calibrate": 0.0, "method.local_mix": 0.3}, r"method\.local_mix = 0"),
        ("dsfl", {"privacy.update_clip": 1.0}, "whose clients send a model alone"),
        ("scaffold", {"privacy.update_clip": 1.0}, "whose clients send a model alone"),
        ("fedet", {"privacy.noise": 1.0}, r"set privacy\.clip as well"),
        ("fedet", {"privacy.update_noise": 1.0}, r"set privacy\.update_clip as well"),
    ],
)
def test_an_epsilon_that_would_not_hold_is_refused(method, changes, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        experiment.build(load(method, **{key.replace(".", "__"): value for key, value in changes.items()}), tmp_path)


def test_references_send_nothing_and_stay_as_they_are(tmp_path):
    private = session.run_config(load("local", privacy__clip=1.0, privacy__noise=1.0, run__rounds=1), tmp_path / "a")
    assert "privacy" not in private.summary
    assert metrics(private) == metrics(session.run_config(load("local", run__rounds=1), tmp_path / "b"))


def test_a_model_with_batch_normalisation_is_refused(examples):
    model = net()
    model.adapter = torch.nn.Sequential(model.adapter, torch.nn.BatchNorm1d(16))
    private = replace(examples, privacy=config.PrivacyConfig(clip=1.0))
    with pytest.raises(ConfigError, match="batch normalisation"):
        train.fit(model, private, Training(steps=1), seed=1)


def test_the_noise_does_not_repeat_the_batches():
    one, two = DPSGD.of(config.PrivacyConfig(clip=1.0), 50, 10, seed=1), generator(1, "batches")
    assert one.g.initial_seed() != two.initial_seed()
    assert one.g.initial_seed() == seed_of(1, "dp")
