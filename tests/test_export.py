"""Exported models: complete, the same to the bit, readable without the trainer, and never in the way of something else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedet
from fedet import check, config, experiment
from fedet.engine import export, session
from fedet.errors import ConfigError, FedetError, Interrupted
from fedet.storage import checkpoint

SMALL = check.SMALL | {
    "method": {"name": "fedet", "client": {"steps": 2, "batch": 16}, "server": {"steps": 2, "batch": 16, "lr": 0.01}}
}
FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return fedet.run(SMALL, out=tmp_path_factory.mktemp("finished")).run_dir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of five rounds, stopped after the second."""
    out = tmp_path_factory.mktemp("stopped")

    def stop(entry):
        if entry["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        fedet.run(SMALL, out=out, rounds=5, callbacks=fedet.Callbacks(round=stop))
    (folder,) = (path for path in out.iterdir() if path.name != ".cache")
    return folder


def images():
    return torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def expected(run_dir):
    """The logits of the server model in the checkpoint, by the trainer's own means."""
    fields, _ = checkpoint.load(run_dir / "last" / "checkpoint.safetensors")
    built = experiment.build(config.load(run_dir / "config.toml"), run_dir.parent / ".cache")
    return built.env.build(built.env.large, fields["state"]["large"]).eval()(images())


def test_the_best_model_comes_back_bit_identical(finished, tmp_path):
    folder = export.export_run(finished, tmp_path / "deep" / "model", "best")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "model.safetensors").read_bytes() == (finished / "best" / "model.safetensors").read_bytes()
    model = fedet.load_model(folder)
    assert not model.training
    assert torch.equal(model(images()), fedet.load_model(finished)(images()))


def test_the_last_model_is_that_of_the_checkpoint(finished, stopped, tmp_path):
    for run_dir, number in ((finished, 3), (stopped, 2)):
        folder = export.export_run(run_dir, tmp_path / run_dir.name, "last")
        assert torch.equal(fedet.load_model(folder)(images()), expected(run_dir))
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
        assert (about["round"], about["method"], about["data"], about["seed"]) == (number, "fedet", "digits", 0)


def test_a_longer_run_that_was_stopped_exports_its_newest_model(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "copy")

    def stop(entry):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        session.resume(run_dir, rounds=9, callbacks=fedet.Callbacks(round=stop))
    folder = export.export_run(run_dir, tmp_path / "model", "last")
    assert torch.equal(fedet.load_model(folder)(images()), expected(run_dir))
    assert not torch.equal(fedet.load_model(folder)(images()), fedet.load_model(run_dir / "last")(images()))


def test_the_card_says_what_it_is(finished, tmp_path):
    card = (export.export_run(finished, tmp_path / "model") / "README.md").read_text(encoding="utf-8")
    about = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert card.startswith("---\nlibrary_name: fedet\n")
    assert f"test accuracy: {about['training']['accuracy']:.4f}" in card
    assert f"{about['num_params']:,} parameters" in card
    assert "fedet.load_model" in card
    assert about["model_type"] == "fedet"
    assert about["num_params"] == sum(p.numel() for p in fedet.load_model(tmp_path / "model").parameters())


def test_loading_needs_no_trainer(finished, tmp_path):
    folder = export.export_run(finished, tmp_path / "model")
    torch.save(images(), tmp_path / "images.pt")
    code = f"""
import sys, fedet, torch
light = ("fedet.errors", "fedet.runtime")
assert "torch" in sys.modules and not any(name.startswith("fedet.") and name not in light for name in sys.modules)
logits = fedet.load_model({str(folder)!r})(torch.load({str(tmp_path / "images.pt")!r}))
torch.save(logits.detach(), {str(tmp_path / "logits.pt")!r})
trainer = {{"fedet.engine", "fedet.api", "fedet.experiment", "fedet.methods", "fedet.data.federated", "sklearn"}}
assert not trainer & set(sys.modules)
"""
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as here: on more threads sums round in another way
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), fedet.load_model(finished)(images()))


def test_an_exported_model_may_be_replaced_and_nothing_else(finished, tmp_path):
    folder = export.export_run(finished, tmp_path / "model", "best")
    (folder / ".gitattributes").write_text("x", encoding="utf-8")
    assert export.export_run(finished, folder, "last") == folder
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]["round"] == 3
    empty = tmp_path / "empty"
    empty.mkdir()
    export.export_run(finished, empty)
    for name, text in (
        ("thesis.tex", "x"),
        ("config.json", "{}"),
        ("config.json", "[1]"),
        ("config.json", '{"model_type": "bert"}'),
    ):
        other = tmp_path / f"other{len(text)}{name}"
        other.mkdir()
        (other / name).write_text(text, encoding="utf-8")
        with pytest.raises(FedetError, match=f"already contains other files .{name}.: export to a new or empty folder"):
            export.export_run(finished, other)
        assert [path.name for path in other.iterdir()] == [name]
        assert (other / name).read_text(encoding="utf-8") == text


def test_places_where_no_model_goes(finished, tmp_path):
    before = (finished / "best" / "model.safetensors").read_bytes()
    for place in (finished, finished / "best", finished / "new"):
        with pytest.raises(FedetError, match="is inside the run's folder"):
            export.export_run(finished, place, "last")
    assert (finished / "best" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(FedetError, match="exists and is not a directory"):
        export.export_run(finished, tmp_path / "file")
    with pytest.raises(FedetError, match="can't write"):
        export.export_run(finished, tmp_path / "file" / "below")


def test_what_can_not_be_exported_is_told(finished, stopped, tmp_path):
    with pytest.raises(ConfigError, match="choose 'best' or 'last'"):
        export.export_run(finished, tmp_path / "model", "worst")
    with pytest.raises(FedetError, match="is not a run folder"):
        export.export_run(tmp_path, tmp_path / "model")
    run_dir = shutil.copytree(stopped, tmp_path / "copy")
    shutil.rmtree(run_dir / "best")
    with pytest.raises(FedetError, match="has no evaluated model yet"):
        export.export_run(run_dir, tmp_path / "model")
    shutil.rmtree(run_dir / "last")
    with pytest.raises(FedetError, match="has not finished a round yet"):
        export.export_run(run_dir, tmp_path / "model", "last")
    run_dir = shutil.copytree(stopped, tmp_path / "other")
    text = (run_dir / "config.toml").read_text(encoding="utf-8")
    (run_dir / "config.toml").write_text(text.replace("alpha = 1.0", "alpha = 1.5"), encoding="utf-8")
    with pytest.raises(FedetError, match="belong to different configurations"):
        export.export_run(run_dir, tmp_path / "model", "last")
    assert not (tmp_path / "model").exists()


def test_damaged_folders_are_told(finished, tmp_path):
    good = export.export_run(finished, tmp_path / "model")
    about = json.loads((good / "config.json").read_text(encoding="utf-8"))
    for spoil, words in (
        (lambda f: (f / "config.json").unlink(), "is not a model folder"),
        (lambda f: (f / "config.json").write_text("{"), "is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "is damaged"),
        (lambda f: (f / "config.json").write_text('{"architecture": {}}'), "is damaged"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "is damaged"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "is not a model folder"),
        (lambda f: rewrite(f, about, width=2.0), "do not fit the architecture in it"),
    ):
        folder = shutil.copytree(good, tmp_path / "bad")
        spoil(folder)
        with pytest.raises(FedetError, match=words):
            fedet.load_model(folder)
        shutil.rmtree(folder)
    with pytest.raises(FedetError, match="is not a model folder"):
        fedet.load_model(tmp_path / "nowhere")


def rewrite(folder: Path, about, **changes):
    """Change the architecture in a model's config.json."""
    changed = about | {"architecture": about["architecture"] | changes}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")


@pytest.fixture
def model(finished, tmp_path):
    """An exported model that a test may spoil, and what its config.json says."""
    folder = export.export_run(finished, tmp_path / "model")
    return folder, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_code_in_a_model_folder_is_not_run(model, tmp_path):
    folder, about = model
    proof = tmp_path / "proof"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\ndef make(): pass\n", encoding="utf-8")
    for name, options in (
        ("os:system", {"command": f"touch {proof}"}),
        (f"{tmp_path / 'evil.py'}:make", {}),
        ("split/os:system", {"command": f"touch {proof}"}),
        ("subprocess:run", {"args": ["touch", str(proof)]}),
    ):
        rewrite(folder, about, name=name, options=options, width=1.0)
        with pytest.raises(FedetError, match=r"would run its code.*trust_code=True"):
            fedet.load_model(folder)
        assert not proof.exists()
    rewrite(folder, about, name="os:system", options={"command": f"touch {proof}"}, width=1.0)
    with pytest.raises(FedetError):  # it runs, and returns no model
        fedet.load_model(folder, trust_code=True)
    assert proof.exists()


def test_code_in_a_run_folder_is_not_run(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    proof = tmp_path / "proof"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n", encoding="utf-8")
    evil, toml = f"{tmp_path / 'evil.py'}:Method", (run_dir / "config.toml").read_text(encoding="utf-8")
    fields, meta = checkpoint.load(run_dir / "last" / "checkpoint.safetensors")
    for before, after, known in (
        ('name = "fedet"', f'name = "{evil}"', False),
        ("[method]", f'[methods."{evil}"]\nlr = 1\n[method]', False),
        ('name = "digits"', f'name = "{evil}"', True),
        ('public = "split"', f'public = "{evil}"', True),
        ('name = "cnn"\nwidth = 1.5', f'name = "{evil}"', True),
    ):
        assert before in toml
        (run_dir / "config.toml").write_text(toml.replace(before, after, 1), encoding="utf-8")
        if known:  # else the configuration can't even be read without its code
            meta["config"] = config.load(run_dir / "config.toml").digest()
        checkpoint.save(run_dir / "last" / "checkpoint.safetensors", fields, meta)
        with pytest.raises(FedetError, match=r"asks to run the code in .*trust_code=True"):
            export.export_run(run_dir, tmp_path / "model", "last")
        assert not proof.exists()
    (run_dir / "config.toml").write_text(toml.replace('name = "fedet"', f'name = "{evil}"'), encoding="utf-8")
    with pytest.raises(FedetError):
        export.export_run(run_dir, tmp_path / "model", "last", trust_code=True)
    assert proof.exists()


def test_models_of_ones_own_need_trust_and_then_work(tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef make(input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))\n", encoding="utf-8"
    )
    own = {"models.server.name": f"{tmp_path / 'own.py'}:make", "models.server.label": "own", "models.server.width": 1.0}
    result = fedet.run(SMALL, out=tmp_path / "runs", rounds=1, **own)
    for which in ("best", "last"):
        with pytest.raises(FedetError, match="trust_code=True"):
            export.export_run(result.run_dir, tmp_path / which, which)
        folder = export.export_run(result.run_dir, tmp_path / which, which, trust_code=True)
        with pytest.raises(FedetError, match="trust_code=True"):
            fedet.load_model(folder)
        assert fedet.load_model(folder, trust_code=True)(images()).shape == (7, 10)


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 1e9},
        {"width": 1e300},
        {"width": -1.0},
        {"width": "wide"},
        {"width": float("nan")},
        {"num_classes": 10**12},
        {"num_classes": -3},
        {"num_classes": "10"},
        {"feature_width": 1 << 62},
        {"representation_width": [128]},
        {"input_shape": [10**9, 10**9, 10**9]},
        {"input_shape": []},
        {"input_shape": "digits"},
        {"input_shape": {"a": 1}},
        {"stem": "imagenet2"},
        {"norm": 3},
        {"conv_bias": "yes"},
        {"options": {"a": {"b": [1]}}},
        {"options": []},
        {"seed": "x"},
        {"trust_code": True},
        {"name": 3},
        {"name": ""},
        {"name": ":"},
        {"name": "split/split/cnn"},
        {"name": "hf:somewhere/else"},
        {"name": "hf:/etc"},
        {"name": "minilm"},
        {"name": "bert-tiny", "input_shape": [16], "options": {"pretrained": "/etc"}},
        {"name": "lstm", "input_shape": [16], "options": {"layers": 10**6}},
        {"name": "lstm", "input_shape": [16], "options": {"vocab_size": 10**12}},
        {"name": "lstm", "input_shape": [16], "options": {"vocab_size": "many"}},
        {"name": "lstm", "input_shape": [16], "options": {"dropout": 10**400}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": 3}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "llama"}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "bert", "auto_map": {"A": "x.Y"}}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "bert", "attn_implementation": "a/b"}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "bert", "num_hidden_layers": 10**6}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "bert", "hidden_act": "no"}}},
        {"name": "bert-tiny", "input_shape": [16], "options": {"config": {"model_type": "bert", "dtype": "hub"}}},
    ],
)  # fmt: skip
def test_any_architecture_in_a_config_ends_in_a_sentence(model, changes):
    folder, about = model
    rewrite(folder, about, **changes)
    with pytest.raises(FedetError):
        fedet.load_model(folder)


def test_an_exported_card_of_junk_is_told(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    about = json.loads((run_dir / "best" / "config.json").read_text(encoding="utf-8"))
    for training in (None, {}, [], {"accuracy": "high"}, about["training"] | {"accuracy": "high"}):
        (run_dir / "best" / "config.json").write_text(json.dumps(about | {"training": training}), encoding="utf-8")
        with pytest.raises(FedetError, match="is damaged"):
            export.export_run(run_dir, tmp_path / "model")


def test_the_last_model_claims_no_accuracy_of_an_earlier_round(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = {key: value for key, value in json.loads(lines[-1]).items() if key not in ("accuracy", "models")}
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n", encoding="utf-8")
    folder = export.export_run(run_dir, tmp_path / "model", "last")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]["accuracy"] is None
    assert "test accuracy: not measured" in (folder / "README.md").read_text(encoding="utf-8")
