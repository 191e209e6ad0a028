"""Tables: the guide runs as it stands, inputs are standardised on request, and architectures get names of their own."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedet import check, models
from fedet import config as configuration
from fedet.data import federated
from fedet.errors import ConfigError

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "tabular.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_guide_runs_and_learns(fedet):
    code, settings = blocks("python")[0], blocks("toml")[0]
    Path("cancer.py").write_text(code, encoding="utf-8")
    Path("cancer.toml").write_text(settings, encoding="utf-8")
    said = fedet("run", "cancer.toml", "--json", "--quiet")
    assert said.json["best_accuracy"] > 0.85
    assert said.json["warnings"] == []
    assert said.json["arch_params"].keys() == {"mlp", "mlp-depth3", "mlp-w4"}
    arrays = np.load(Path(said.json["run_dir"]) / "split.npz")
    assert arrays["mean"].shape == arrays["std"].shape == (30,)
    assert fedet("resume", said.json["run_dir"], "--rounds", "11", "--json", "--quiet").json["rounds"] == 11


def test_the_guide_reads_a_table_with_words_and_gaps(fedet):
    """And its function is the one that the guide shows."""
    rows = [f"{'ABC'[i % 3]},{'xy'[i % 2]},{i % 3 + i % 7 / 10},{'' if i == 4 else i}" for i in range(120)]
    Path("penguins.csv").write_text("\n".join(["species,island,bill,mass", *rows]) + "\n", encoding="utf-8")
    Path("penguins.py").write_text(blocks("python")[1], encoding="utf-8")
    Path("cancer.toml").write_text(blocks("toml")[0], encoding="utf-8")
    said = fedet("run", "cancer.toml", "--set", "data.name=penguins.py:data", "--rounds", "2", "--json", "--quiet")
    assert said.json["rounds"] == 2
    assert np.load(Path(said.json["run_dir"]) / "split.npz")["mean"].shape == (4,)


@pytest.mark.parametrize("kind", ["int64", "Int64"])
def test_a_table_of_whole_numbers_needs_no_scaling(fedet, kind):
    Path("own.py").write_text(
        "import numpy as np, pandas\n\ndef data():\n    values = np.random.default_rng(0).integers(0, 9, (300, 3))\n"
        f"    table = pandas.DataFrame(values, columns=list('abc')).astype('{kind}')\n"
        "    return table.assign(d=table['a'] > 4), table['b']\n",
        encoding="utf-8",
    )
    Path("cancer.toml").write_text(blocks("toml")[0], encoding="utf-8")
    settings = [
        "--set",
        "data.name=own.py:data",
        "--set",
        "data.standardise=false",
        "--set",
        "method.client.lr=1e-3",
        "--rounds",
        "1",
    ]
    assert fedet("run", "cancer.toml", *settings, "--json", "--quiet").json["rounds"] == 1


DATA = """\
import numpy as np


def table():
    x = np.random.default_rng(0).normal([5.0, -3.0, 0.0, 7.0], [100.0, 1.0, 1e-3, 0.0], (200, 4))
    return x, np.arange(200) % 2


def public(n):
    return np.full((n, 4), 7.0)
"""


def load(tmp_path, **changes):
    (tmp_path / "own.py").write_text(DATA, encoding="utf-8")
    config = configuration.load(check.SMALL, {"data.name": f"{tmp_path / 'own.py'}:table", **changes})
    return federated.load(config.data, 0, tmp_path)


def test_the_clients_training_examples_determine_the_scaling(tmp_path):
    raw, scaled = load(tmp_path), load(tmp_path, **{"data.standardise": True})
    rows = torch.from_numpy(raw.parts.rows)
    values = raw.dataset.inputs[rows].double()
    assert torch.allclose(scaled.scaling.mean, values.mean(0))
    mine = scaled.dataset.inputs[rows].double()
    assert mine.mean(0).abs().max() < 1e-5
    assert torch.allclose(mine.std(0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64), atol=1e-4)
    again = (raw.dataset.inputs[raw.test.rows].double() - values.mean(0)) / scaled.scaling.std
    assert torch.allclose(scaled.test.inputs(torch.arange(len(scaled.test))), again.float())
    assert (raw.parts.rows == scaled.parts.rows).all()


def test_public_inputs_are_scaled_by_the_same_numbers(tmp_path):
    split = load(tmp_path, **{"data.standardise": True})
    rows = split.public.rows
    assert torch.equal(split.public.view(1).inputs(torch.arange(len(rows))), split.dataset.inputs[rows])
    other = load(tmp_path, **{"data.standardise": True, "data.public": f"{tmp_path / 'own.py'}:public", "data.public_size": 5})
    expected = other.scaling(torch.full((5, 4), 7.0))
    assert torch.equal(other.public.view(1).inputs(torch.arange(5)), expected)


def test_images_are_not_standardised(tmp_path):
    config = configuration.load(check.SMALL, {"data.standardise": True})
    with pytest.raises(ConfigError, match=r"data.standardise is for tables of numbers, and digits is none"):
        federated.load(config.data, 0, tmp_path)


def test_the_new_key_leaves_old_identities_alone():
    config = configuration.load("digits")
    assert config.digest() == configuration.load("digits", {"data.standardise": False}).digest()
    assert config.digest() != configuration.load("digits", {"data.standardise": True}).digest()
    plain = config.model_dump(mode="json")
    del plain["data"]["standardise"]  # as an older version wrote it
    assert configuration.load(plain).digest() == config.digest()


def test_mlp_has_the_sizes_it_is_asked_for():
    model = models.build("mlp", 3, input_shape=(7,), width=0.5, options={"hidden": 20, "depth": 3})
    assert [tuple(layer.weight.shape) for layer in model.body.layers] == [(10, 7), (10, 10), (10, 10)]
    assert model(torch.zeros(2, 7)).shape == (2, 3)
    assert models.build("mlp", 3, input_shape=(1, 8, 8)).body.layers[0].in_features == 64
    again = models.build(**model.spec)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for options, words in (
        ({"hiden": 3}, r"'mlp' has no option 'hiden' \(did you mean 'hidden'\?\)"),
        ({"depth": 0}, "options.depth = 0"),
        ({"depth": True}, "options.depth = True"),
    ):
        with pytest.raises(ConfigError, match=words):
            models.build("mlp", 3, input_shape=(7,), options=options)
    with pytest.raises(ConfigError, match="stem, norm and conv_bias have no effect on 'mlp'"):
        models.build("mlp", 3, input_shape=(7,), norm="group")


def names(clients, server):
    loaded = configuration.load("digits", {"models.clients": clients, "models.server": server})
    assert configuration.load(loaded.model_dump(mode="json")) == loaded
    return [spec.id for spec in [*loaded.models.clients, loaded.models.server]]


def test_architectures_that_would_share_a_name_get_one_of_their_own():
    deep, wide = {"name": "mlp", "options": {"depth": 3}}, {"name": "mlp", "options": {"hidden": 128, "depth": 3}}
    assert names(["mlp", deep, wide], "cnn") == ["mlp", "mlp-depth3", "mlp-hidden128-depth3", "cnn"]
    assert names(["mlp", "cnn"], "cnn") == ["mlp", "cnn", "cnn-server"]
    for clients in (["cnn", "cnn"], [{"name": "cnn", "label": "a"}, {"name": "mlp", "label": "a"}]):
        with pytest.raises(ConfigError, match="two architectures are named"):
            names(clients, "mlp")
