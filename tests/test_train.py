"""The training loop against torch's own optimisers and schedules, and the stream of batches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from fedet import maths, train
from fedet.core import generator
from fedet.data import Dataset, Examples
from fedet.data.resident import resident
from fedet.models import build
from fedet.runtime import keep_freed_memory
from fedet.train import Training


class Rows:
    def __init__(self, n=50):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(n, 1, 8, 8, generator=g), torch.randint(0, 10, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def inputs(self, index):
        return self.x[index]

    @property
    def labels(self):
        return self.y

    def batch(self, index):
        return self.x[index], self.y[index]


def tiny():
    return build("cnn", input_shape=(1, 8, 8), feature_width=16, representation_width=8)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({}, lambda p: torch.optim.SGD(p, lr=0.05)),
        ({"momentum": 0.9, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)),
        ({"clip": 0.1}, lambda p: torch.optim.SGD(p, lr=0.05)),
        ({"optimiser": "adam", "weight_decay": 0.01}, lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01)),
        ({"optimiser": "adamw", "weight_decay": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01)),
    ],
)
def test_fit_takes_the_steps_of_torchs_optimisers(settings, make, schedule):
    data, mine, other = Rows(), tiny(), tiny()
    training = Training(lr=0.05, batch=16, steps=8, schedule=schedule, **settings)
    train.fit(mine, data, training, seed=3)
    optimiser = make(other.parameters())
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 8) if schedule == "cosine" else None
    for index in train.batches(50, 16, 8, generator(3, "batches")):
        optimiser.zero_grad()
        F.cross_entropy(other(data.x[index]), data.y[index]).backward()
        if "clip" in settings:
            torch.nn.utils.clip_grad_norm_(other.parameters(), settings["clip"])
        optimiser.step()
        if rates:
            rates.step()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01}, {"weight_decay": 0.01}])
def test_sgd_has_the_bits_of_torchs(settings):
    data, mine, other = Rows(), tiny(), tiny()
    train.fit(mine, data, Training(lr=0.05, batch=16, steps=5, **settings), seed=3)
    optimiser = torch.optim.SGD(other.parameters(), lr=0.05, **settings)
    for index in train.batches(50, 16, 5, generator(3, "batches")):
        optimiser.zero_grad()
        F.cross_entropy(other(data.x[index]), data.y[index]).backward()
        optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def test_a_parameter_without_gradient_stays():
    model = tiny()
    model.unused = torch.nn.Parameter(torch.ones(3))
    train.fit(model, Rows(), Training(lr=0.05, batch=16, steps=2, momentum=0.9), seed=0)
    assert model.unused.tolist() == [1, 1, 1]


class Skipping(torch.nn.Module):
    """A model whose steps use different layers, so that the parameters with a gradient change."""

    device = torch.device("cpu")

    def __init__(self, widths, pattern):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, width) for width in widths)
        self.pattern, self.calls = pattern, 0

    def forward(self, x):
        used = self.pattern[self.calls % len(self.pattern)]
        self.calls += 1
        return sum(self.layers[i](x.flatten(1)).mean(dim=1, keepdim=True) for i in used) * torch.arange(10)


@pytest.mark.parametrize(
    ("widths", "pattern"),
    [((5, 5, 5), [[1], [0], [1], [2]]), ((5, 5, 7), [[1], [0], [1], [2]]), ((5, 5, 7), [[1], [0, 2], [0, 1], [2]])],
    ids=["equal shapes", "other shapes", "other numbers"],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_has_the_bits_of_torchs_where_steps_skip_parameters(momentum, weight_decay, widths, pattern):
    data, mine, other = Rows(), Skipping(widths, pattern), Skipping(widths, pattern)
    train.fit(mine, data, Training(lr=0.05, batch=16, steps=9, momentum=momentum, weight_decay=weight_decay), seed=3)
    optimiser = torch.optim.SGD(other.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    for index in train.batches(50, 16, 9, generator(3, "batches")):
        optimiser.zero_grad()
        F.cross_entropy(other(data.x[index]), data.y[index]).backward()
        optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))


def test_fit_leaves_the_global_random_numbers_alone():
    before = torch.random.get_rng_state()
    train.fit(tiny(), Rows(), Training(steps=2), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_no_steps_no_change():
    model = tiny()
    kept = [p.clone() for p in model.parameters()]
    assert train.fit(model, Rows(), Training(steps=0), seed=0) == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))


@trials(max_examples=50, deadline=None)
@given(size=st.integers(1, 70), batch=st.integers(1, 80), steps=st.integers(0, 30), seed=st.integers(0, 999))
def test_batches_repeat_nothing_within_a_pass(size, batch, steps, seed):
    found = list(train.batches(size, batch, steps, torch.Generator().manual_seed(seed)))
    width, per_pass = min(size, batch), size // min(size, batch)
    assert [len(b) for b in found] == [width] * steps
    for start in range(0, steps, per_pass):
        seen = torch.cat(found[start : start + per_pass])
        assert len(seen.unique()) == len(seen)


def test_the_papers_server_takes_93_batches_and_35_of_the_next_pass():
    found = list(train.batches(6000, 64, 128, torch.Generator().manual_seed(0)))
    assert len(torch.cat(found[:93]).unique()) == 93 * 64
    assert len(torch.cat(found[93:]).unique()) == 35 * 64


def test_rows_used_are_those_that_fit_visits():
    settings, visited = Training(lr=0.1, batch=7, steps=4), []

    def watching(model, data, index):
        visited.append(index)
        return train.cross_entropy(model, data, index)

    train.fit(tiny(), Rows(), settings, seed=5, loss=watching)
    rows, place = train.rows_used(50, settings, 5)
    assert torch.equal(rows, torch.cat(visited).unique())
    assert torch.equal(rows[place[rows]], rows)
    assert (place >= 0).sum() == len(rows)


def test_gradient_is_that_of_the_mean_loss_over_all_data():
    model, data = tiny(), Rows()
    whole = torch.autograd.grad(F.cross_entropy(model(data.x), data.y), list(model.parameters()))
    for (_, mine), theirs in zip(train.gradient(model, data, chunk=7).items(), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_evaluate_counts_hits():
    model, data = tiny(), Rows()
    with torch.no_grad():
        logits = model.eval()(data.x)
    score = train.evaluate(model, data)
    assert score.accuracy == (logits.argmax(-1) == data.y).double().mean().item()
    assert score.loss == pytest.approx(F.cross_entropy(logits, data.y).item(), abs=1e-5)


def images(channels, n=40):
    g = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (2 * n, channels, 16, 16), generator=g, dtype=torch.uint8)
    dataset = Dataset("made up", pixels, torch.randint(0, 10, (2 * n,), generator=g), 10)
    return Examples(dataset, torch.randperm(2 * n, generator=g)[:n])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "options"), [("cnn", {}), ("resnet8", {"width": 0.125, "stem": "imagenet"})])
def test_examples_made_ready_once_change_no_bit(channels, name, options, monkeypatch):
    settings, found = Training(lr=0.05, batch=16, steps=8), []
    for make in (train.resident, lambda data, visits, last: data):
        monkeypatch.setattr(train, "resident", make)
        model = build(name, input_shape=(channels, 16, 16), feature_width=16, representation_width=8, **options)
        found.append((train.fit(model, images(channels), settings, seed=2), model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_examples_are_made_ready_only_if_that_pays(monkeypatch):
    data = images(3)
    assert resident(data, 79, last=True) is data
    ready = resident(data, 80, last=True)
    assert ready.batch(torch.arange(5))[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ready.inputs(torch.arange(5)), data.inputs(torch.arange(5)))
    assert torch.equal(ready.batch(torch.tensor([3, 1]))[1], data.labels[[3, 1]])
    assert resident(data, 80, last=False).inputs(torch.arange(5)).is_contiguous()
    assert resident(Rows(), 10**6, last=True).__class__ is Rows
    monkeypatch.setattr("fedet.data.resident.LIMIT", 1000)
    assert resident(data, 80, last=True) is data


def test_freed_memory_is_reused_where_the_c_library_allows_it():
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")

    def work():
        return sum(float(block.fill_(1)[0]) for block in [torch.empty(1 << 20) for _ in range(25)])  # 100 MB

    for _ in range(3):
        work()
    resource = pytest.importorskip("resource", reason="page faults are counted on Unix only")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        work()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000  # 128,000 if memory is given back


def test_calibrated_loss_is_cross_entropy_of_shifted_logits():
    data, model, index = Rows(), tiny(), torch.arange(20)
    labels = torch.tensor([0] * 5 + [3] * 45)
    shifted = model(data.x[index]) + maths.label_offset(torch.bincount(labels, minlength=10), 0.7)
    assert torch.equal(train.calibrated(labels, 0.7)(model, data, index), F.cross_entropy(shifted, data.y[index]))
    assert torch.allclose(train.calibrated(labels, 0.0)(model, data, index), train.cross_entropy(model, data, index))
