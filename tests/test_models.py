"""Models: published sizes, a healthy start without normalisation, equal heads, and other people's modules."""

import io
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedet import config, experiment
from fedet.config import ModelSpec
from fedet.core import head_of, weights_of
from fedet.errors import ConfigError
from fedet.models import FAMILIES, Head, Model, ModelCache, build, count_macs, describe
from fedet.models.vision import Residual

TOTALS = {
    ("cnn", True): (431_548, 443_158),
    ("resnet8", True): (5_224_842, 5_236_452),
    ("resnet18", True): (11_493_642, 11_505_252),
    ("vgg19", True): (20_879_306, 20_890_916),
    ("resnet8", False): (5_221_962, 5_233_572),
    ("resnet18", False): (11_488_842, 11_500_452),
}
SMALL = {"width": 0.125}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def params(name, classes=10, **variant):
    with torch.device("meta"):
        return build(name, classes, **variant).num_params()


# Sizes


@pytest.mark.parametrize(("name", "bias"), TOTALS)
def test_totals_to_the_unit(name, bias):
    assert tuple(params(name, classes, conv_bias=bias) for classes in (10, 100)) == TOTALS[name, bias]


@pytest.mark.parametrize(("name", "total"), [("resnet8", 5_232_522), ("resnet18", 11_501_322)])
def test_totals_with_the_imagenet_stem(name, total):
    assert params(name, stem="imagenet") == total


@pytest.mark.parametrize(
    ("name", "body"), [("cnn", 75_826), ("resnet8", 4_895_232), ("resnet18", 11_164_032), ("vgg19", 20_549_696)]
)
def test_bodies_to_the_unit(name, body):
    with torch.device("meta"):
        model = build(name)
    assert sum(p.numel() for p in model.body.parameters()) == body
    assert sum(p.numel() for p in model.head.parameters()) == 329_610


def test_width_scales_the_body():
    assert params("vgg19", width=0.5) < 0.5 * params("vgg19")
    assert build("cnn", width=2.0).body.width == 100
    assert build("resnet8", width=0.001).body.width == 1


def test_describe_counts_multiply_adds():
    rows = {row["name"]: row for row in describe()}
    assert list(rows) == list(FAMILIES)
    head = 512 * 512 + 512 * 128 + 128 * 10
    cnn = 28 * 28 * 6 * 75 + 10 * 10 * 16 * 150 + 400 * 120 + 120 * 100 + 100 * 84 + 84 * 50 + 50 * 512 + head
    assert rows["cnn"] == {"name": "cnn", "params": 431_548, "macs": cnn, "width": 50}
    assert rows["vgg19"]["width"] == 512


def test_count_macs_leaves_the_model_as_it_was():
    model = build("cnn").train()
    assert count_macs(model, (3, 32, 32)) == count_macs(model, (3, 32, 32)) > 0
    assert model.training
    assert not any(layer._forward_hooks for layer in model.modules())


# Shapes


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 64, 64), (3, 17, 40), (1, 1, 3)])
@pytest.mark.parametrize("variant", [{}, {"norm": "group"}, {"stem": "imagenet", "norm": "group"}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_image_shape(name, shape, variant):
    model = build(name, 7, input_shape=shape, **SMALL, **variant)
    images = torch.randn(2, *shape)
    assert model(images).shape == (2, 7)
    assert model.features(images).shape == (2, 512)
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_small_images_pass_through_the_cnn_unshrunk():
    assert [build("cnn", input_shape=(1, s, s)).body.linears[0].in_features for s in (8, 16)] == [16 * 4, 16]


@pytest.mark.parametrize("name", FAMILIES)
def test_group_norm_follows_every_convolution(name):
    model = build(name, norm="group", **SMALL)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert [n.num_channels for n in norms] == [c.out_channels for c in convs]
    assert not list(build(name, **SMALL).buffers())


@pytest.mark.parametrize("name", ["cnn", "resnet8"])
def test_the_parts_are_the_whole(name):
    model = build(name, **SMALL).eval()
    x = torch.randn(1, 3, 32, 32)
    assert model.representation(x).shape == (1, 128)
    torch.testing.assert_close(model(x), model.head.l3(model.representation(x)), rtol=0, atol=0)
    torch.testing.assert_close(model(x), model.head(model.features(x)), rtol=0, atol=0)
    assert sorted(head_of(model.state_dict())) == [f"head.l{i}.{part}" for i in (1, 2, 3) for part in ("bias", "weight")]


def test_adapter_only_where_widths_differ():
    with torch.device("meta"):
        assert isinstance(build("resnet8").adapter, nn.Identity)
        assert isinstance(build("resnet8", feature_width=256).adapter, nn.Sequential)


def test_head_keeps_a_batch_of_one_and_reads_as_documented():
    head, features = Head(6, 4, 3), torch.randn(1, 6)
    expected = head.l2(F.relu(head.l1(features)))
    torch.testing.assert_close(head.represent(features), expected, rtol=0, atol=0)
    assert (head.represent(features).shape, head(features).shape) == ((1, 4), (1, 3))


# Seeds


def test_build_depends_on_its_seed_and_leaves_the_global_one_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build("cnn", seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["head.l1.weight"], other["head.l1.weight"])


def test_spec_rebuilds_the_model():
    model = build("resnet8", 7, input_shape=(1, 8, 8), width=0.25, norm="group", conv_bias=False, feature_width=64)
    twin = build(**json.loads(json.dumps(model.spec)), seed=9)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(twin(x), model(x))
    assert twin.spec == model.spec


# The start of training: a healthy loss and gradient without any normalisation


def synthetic(count, seed=0):
    """Ten smooth patterns with noise, scaled as normalised photographs are."""
    rng = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(99)), 32, mode="bilinear")
    labels = torch.arange(count) % 10
    return (0.5 * patterns[labels] + 0.2 * torch.randn(count, 3, 32, 32, generator=rng)).clamp(-1, 1), labels


def cifar(count):
    folder = os.environ.get("FEDET_DATA")
    if not folder:
        pytest.skip("set FEDET_DATA to a folder that holds cifar10/*.parquet to test on real images")
    files = sorted((Path(folder) / "cifar10").glob("train*.parquet"))
    if not files:
        pytest.skip(f"no cifar10/train*.parquet in FEDET_DATA={folder}")
    parquet, image = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("PIL.Image")
    batch = next(parquet.ParquetFile(files[0]).iter_batches(count)).to_pydict()
    pixels = [image.open(io.BytesIO(cell["bytes"])).convert("RGB").tobytes() for cell in batch["img"]]
    raw = torch.frombuffer(bytearray(b"".join(pixels)), dtype=torch.uint8).view(-1, 32, 32, 3)
    return raw.permute(0, 3, 1, 2).float() / 127.5 - 1, torch.tensor(batch["label"])


def start(name, images, labels, seed=0, **variant):
    model = build(name, seed=seed, **variant)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.item(), next(model.parameters()).grad.norm().item()


def sgd(name, images, labels, *, steps, batch, lr=0.1):
    """Losses of every step, and the final one on up to 500 examples."""
    model, rng = build(name), torch.Generator().manual_seed(0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for _ in range(steps):
        chosen = torch.randperm(len(images), generator=rng)[:batch]
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        pieces = [
            F.cross_entropy(model(x), y).item() for x, y in zip(images[:500].split(50), labels[:500].split(50), strict=True)
        ]
    return losses, sum(pieces) / len(pieces)


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("data", [synthetic, cifar])
@pytest.mark.parametrize("name", FAMILIES)
def test_starts_at_chance_with_a_gradient_everywhere(name, data, norm):
    loss, gradient = start(name, *data(50 if data is cifar else 20), norm=norm)
    assert abs(loss - math.log(10)) < 0.15
    assert 1e-4 < gradient < 10


@pytest.mark.parametrize(
    ("name", "steps"),
    [("cnn", 60), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("resnet8", 25), ("resnet18", 10), ("vgg19", 5)))],
)
def test_stays_finite_at_rate_one_tenth(name, steps):
    # On 100 images in batches of 10 it is the processor's rounding that decides whether the CNN's start survives.
    count, batch = (1000, 16) if name == "cnn" else (100, 10)
    losses, final = sgd(name, *synthetic(count), steps=steps, batch=batch)
    assert all(map(math.isfinite, losses))
    assert final < {"cnn": 2.2, "resnet8": 2.2}.get(name, math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_moves_on_real_images(name):
    losses, final = sgd(name, *cifar(1000), steps=60, batch=16)
    assert all(map(math.isfinite, losses))
    assert final < (2.29 if name.startswith("resnet") else 2.35)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_residual_blocks_start_as_their_shortcut(norm):
    block_inputs = F.relu(torch.randn(2, 8, 8, 8))
    body = build("resnet18", norm=norm, **SMALL).body
    torch.testing.assert_close(body.blocks[0](block_inputs), block_inputs, rtol=0, atol=0)
    assert sum(isinstance(m, Residual) for m in body.modules()) == 8


# A run's modules


def modules(seed=0, **specs):
    specs = specs or {"cnn": ModelSpec(name="cnn"), "res": ModelSpec(name="resnet8", width=0.125)}
    return ModelCache(specs, num_classes=10, input_shape=(1, 8, 8), feature_width=32, representation_width=16, seed=seed)


def test_all_heads_start_equal_and_bodies_do_not():
    pool = modules(a=ModelSpec(name="cnn"), b=ModelSpec(name="cnn"), c=ModelSpec(name="resnet8", width=0.125))
    assert pool.names == ("a", "b", "c")
    a, b, c = (pool.initial(arch) for arch in pool.names)
    heads = [key for key in a if key.startswith("head.")]
    assert len(heads) == 6
    assert all(torch.equal(a[key], b[key]) and torch.equal(a[key], c[key]) for key in heads)
    assert not torch.equal(a["body.convs.0.0.weight"], b["body.convs.0.0.weight"])
    assert a["head.l1.weight"].data_ptr() != b["head.l1.weight"].data_ptr()


def test_initial_weights_depend_on_the_seed_only():
    first, again, other = modules(3), modules(3), modules(4)
    again.initial("res")
    assert first.initial("cnn") is first.initial("cnn")
    assert all(torch.equal(t, again.initial("cnn")[k]) for k, t in first.initial("cnn").items())
    assert not torch.equal(first.initial("cnn")["head.l3.weight"], other.initial("cnn")["head.l3.weight"])
    assert not torch.equal(first.initial("cnn")["body.convs.0.0.weight"], other.initial("cnn")["body.convs.0.0.weight"])


def test_load_copies_and_resets():
    pool = modules()
    start = pool.initial("cnn")
    before = {key: tensor.clone() for key, tensor in start.items()}
    model = pool.load("cnn", start)
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert all(torch.equal(start[key], before[key]) for key in start)
    model.eval().requires_grad_(False)
    again = pool.load("cnn", start)
    assert again is model
    assert again.training
    assert all(p.requires_grad and p.grad is None for p in again.parameters())
    assert all(torch.equal(tensor, start[key]) for key, tensor in again.state_dict().items())


def test_slots_hold_different_weights():
    pool = modules()
    one = pool.load("cnn", pool.initial("cnn"))
    two = pool.load("cnn", {k: t + 1 for k, t in pool.initial("cnn").items()}, "teacher")
    assert one is not two
    assert torch.equal(one.head.l3.bias + 1, two.head.l3.bias)


def test_load_refuses_weights_of_another_model():
    pool, weights = modules(), modules().initial("cnn")
    for wrong in (
        {k: t for k, t in weights.items() if k != "head.l3.bias"},
        {**weights, "extra": torch.zeros(1)},
        {**weights, "head.l3.bias": torch.zeros(1)},  # would broadcast
    ):
        with pytest.raises(ConfigError, match="don't fit architecture 'cnn'"):
            pool.load("cnn", wrong)


def test_num_params_and_unknown_architectures():
    pool = modules()
    assert pool.num_params("cnn") == sum(t.numel() for t in pool.initial("cnn").values())
    for call in (pool.initial, pool.num_params, lambda arch: pool.load(arch, {})):
        with pytest.raises(ConfigError, match=r"'cn' \(did you mean 'cnn'\?\); this run has: cnn, res"):
            call("cn")


# Other people's modules

PLUGIN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, input_shape, depth=1):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 3 * depth, 3)
        nn.init.constant_(self.conv.weight, 0.25)
        self.norm = nn.BatchNorm2d(3 * depth)

    def forward(self, x):
        return self.norm(self.conv(x))

class Scalar(nn.Module):
    def forward(self, x):
        return x.sum()

class Pair(nn.Module):
    def forward(self, x):
        return x, x

def flat(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def number():
    return 3

ready = flat(10)
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(PLUGIN)
    return lambda name: f"{path}:{name}"


def test_own_module_becomes_a_model(plugin):
    model = build(plugin("Own"), 5, input_shape=(1, 8, 8), options={"depth": 2}, feature_width=32)
    assert isinstance(model, Model)
    assert model.adapter[0].in_features == 6 * 6 * 6
    assert model.training
    assert model.body.training
    assert torch.all(model.body.conv.weight == 0.25)
    assert torch.all(model.body.norm.running_mean == 0)
    assert model(torch.randn(1, 1, 8, 8)).shape == (1, 5)
    assert build(**model.spec).num_params() == model.num_params()


def test_own_factory_and_buffers_in_modules(plugin):
    specs = {"own": ModelSpec(name=plugin("Own")), "flat": ModelSpec(name=plugin("flat"))}
    pool = modules(**specs)
    model = pool.load("own", pool.initial("own"))
    model(torch.randn(4, 1, 8, 8))
    assert model.body.norm.num_batches_tracked == 1
    assert pool.load("own", pool.initial("own")).body.norm.num_batches_tracked == 0
    assert pool.num_params("flat") == sum(t.numel() for t in weights_of(pool.load("flat", pool.initial("flat"))).values())
    assert torch.equal(pool.initial("own")["head.l2.weight"], pool.initial("flat")["head.l2.weight"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Own", {"dept": 2}, "raised an error when called.*unexpected keyword argument 'dept'"),
        ("Scalar", {}, r"\(2, 1, 8, 8\) to \(\)"),
        ("Pair", {}, "returns a tuple"),
        ("number", {}, "returned an object of type int"),
        ("ready", {}, "is not a class or function"),
        ("missing", {}, "has no 'missing' to use as a model"),
    ],
)
def test_own_module_errors_say_what_is_wrong(plugin, name, options, message):
    with pytest.raises(ConfigError, match=message):
        build(plugin(name), input_shape=(1, 8, 8), options=options)


def test_own_module_that_does_not_fit_the_data(plugin):
    with pytest.raises(ConfigError, match=r"does not run on a batch of shape \(2, 1, 9, 9\).*RuntimeError: mat1"):
        build(plugin("flat"), input_shape=(1, 9, 9))


def test_settings_that_would_be_ignored_are_errors(plugin):
    with pytest.raises(ConfigError, match="with options"):
        build(plugin("flat"), input_shape=(1, 8, 8), width=0.5)
    with pytest.raises(ConfigError, match="'cnn' takes no options"):
        build("cnn", options={"depth": 2})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet81"}, r"'resnet81' \(did you mean 'resnet18'|'resnet81' \(did you mean 'resnet8'"),
        ({"name": "qqq"}, "known: cnn, resnet8, resnet18, vgg19, mlp, bert-tiny, .*, hf:PLACE or module:callable"),
        ({"name": "cnn", "norm": "batch"}, "norm = 'batch' is not available: choose from none, group"),
        ({"name": "cnn", "stem": "big"}, "stem = 'big'"),
        ({"name": "cnn", "width": 0.0}, "width = 0.0"),
        ({"name": "vgg19", "input_shape": (128,)}, "not inputs of shape"),
        ({"name": "cnn", "width": "wide"}, "width = 'wide' must be a number above 0"),
        ({"name": "cnn", "feature_width": -5}, "feature_width = -5 must be a positive integer"),
        ({"name": "cnn", "representation_width": 1e9}, "representation_width = 1000000000.0 must be a positive integer"),
        ({"name": "cnn", "num_classes": None}, "num_classes = None must be a positive integer"),
        ({"name": "cnn", "input_shape": (3, 32.0, 32)}, r"input_shape = \(3, 32\.0, 32\) must be positive integers"),
        ({"name": "cnn", "input_shape": (3, 0, 32)}, r"input_shape = \(3, 0, 32\) must be positive integers"),
    ],
)
def test_impossible_requests(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


# Sizes that no machine can hold


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cnn", "width": 1e9}, r"'cnn' with width = 1e\+09 is too large: .* lower width$"),
        ({"name": "resnet8", "width": 1e300}, r"'resnet8' with width = 1e\+300 is too large"),
        ({"name": "vgg19", "width": 1.7e308}, r"width = 1\.7e\+308 is too large"),
        ({"name": "resnet18", "width": 1e4}, r"its [\d,]+ parameters need [\d,]+ GiB and this machine has [\d,]+ GiB"),
        ({"name": "cnn", "feature_width": 10**9}, "with feature_width = 1000000000 is too large: .* lower feature_width$"),
        ({"name": "cnn", "feature_width": 10**30}, "feature_width = 10{30} is too large"),
        ({"name": "cnn", "representation_width": 10**18}, "representation_width = 10{18} is too large"),
        ({"name": "cnn", "num_classes": 10**15}, "num_classes = 10{15} is too large"),
        ({"name": "cnn", "input_shape": (3, 10**9, 10**9)}, "input_shape = .* is too large"),
        ({"name": "split/cnn", "width": 1e9, "feature_width": 10**9}, "lower width or feature_width$"),
    ],
)
def test_sizes_that_no_machine_can_hold(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


@pytest.mark.parametrize(
    ("name", "option", "value", "problem"),
    [
        ("lstm", "hidden", 10**9, "is too large: .* lower options.hidden"),
        ("lstm", "embedding", 10**12, "is too large"),
        ("lstm", "vocab_size", 10**40, "is too large"),
        ("lstm", "hidden", 1e9, "must be a positive integer"),
        ("lstm", "layers", 10**9, "must be at most 1000"),
        ("lstm", "dropout", 5, "must be a number from 0 to 1"),
        ("bert-tiny", "hidden", 64 * 10**9, "is too large"),
        ("bert-tiny", "layers", 10**9, "must be at most 1000"),
        ("bert-tiny", "heads", 2.0, "must be a positive integer"),
    ],
)
def test_absurd_options_of_text_models(name, option, value, problem):
    with pytest.raises(ConfigError, match=rf"'{name}'.* options\.{option} = {value} {problem}"):
        build(name, input_shape=(16,), options={option: value})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"models.clients": [{"name": "resnet8", "width": 1e9}]}, "'resnet8' with width = 1e\\+09 is too large"),
        ({"models.server": {"name": "vgg19", "width": 1e5}}, "'vgg19' with width = 100000 is too large"),
        ({"models.feature_width": 10**9}, "feature_width = 1000000000 is too large"),
        ({"models.representation_width": 10**20}, "representation_width = 10{20} is too large"),
    ],
)
def test_an_experiment_with_absurd_sizes_is_refused(setting, message, tmp_path):
    loaded = config.load("digits", setting)
    with pytest.raises(ConfigError, match=message):
        experiment.build(loaded, tmp_path)


def test_an_own_model_with_an_absurd_head_is_refused(plugin):
    with pytest.raises(ConfigError, match=r"feature_width = 10{12} is too large"):
        build(plugin("flat"), input_shape=(1, 8, 8), feature_width=10**12)


def test_memory_that_can_not_be_had_is_explained(monkeypatch):
    class Full(nn.Linear):
        def __init__(self, inputs, outputs):
            if torch.empty(0).is_meta:
                return super().__init__(inputs, outputs)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    monkeypatch.setattr(nn, "Linear", Full)
    with pytest.raises(ConfigError, match="'cnn' is too large: not enough free memory for its weights; choose a smaller model"):
        build("cnn")


def test_checking_a_size_draws_no_random_numbers():
    torch.manual_seed(5)
    expected = torch.random.get_rng_state()
    ModelCache(
        {"cnn": ModelSpec(name="cnn")}, num_classes=3, input_shape=(1, 8, 8), feature_width=8, representation_width=8, seed=0
    )
    assert torch.equal(torch.random.get_rng_state(), expected)
