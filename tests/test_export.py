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
    ready = experiment.build(config.load(run_dir / "config.toml"), run_dir.parent / ".cache")
    return ready.env.build(ready.env.large, fields["state"]["large"]).eval()(images())


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
    assert f"test accuracy {about['training']['accuracy']:.4f}" in card
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
        with pytest.raises(FedetError, match=f"holds something else .{name}.: export to a new or empty folder"):
            export.export_run(finished, other)
        assert [path.name for path in other.iterdir()] == [name]
        assert (other / name).read_text(encoding="utf-8") == text


def test_places_where_no_model_goes(finished, tmp_path):
    before = (finished / "best" / "model.safetensors").read_bytes()
    for place in (finished, finished / "best", finished / "new"):
        with pytest.raises(FedetError, match="is part of the run"):
            export.export_run(finished, place, "last")
    assert (finished / "best" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(FedetError, match="is no folder"):
        export.export_run(finished, tmp_path / "file")
    with pytest.raises(FedetError, match="can't write"):
        export.export_run(finished, tmp_path / "file" / "below")


def test_what_can_not_be_exported_is_told(finished, stopped, tmp_path):
    with pytest.raises(ConfigError, match="it is 'best' or 'last'"):
        export.export_run(finished, tmp_path / "model", "worst")
    with pytest.raises(FedetError, match="holds no run"):
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
    with pytest.raises(FedetError, match="belongs to another configuration"):
        export.export_run(run_dir, tmp_path / "model", "last")
    assert not (tmp_path / "model").exists()


def test_damaged_folders_are_told(finished, tmp_path):
    good = export.export_run(finished, tmp_path / "model")
    about = json.loads((good / "config.json").read_text(encoding="utf-8"))
    for spoil, words in (
        (lambda f: (f / "config.json").unlink(), "holds no model of fedet"),
        (lambda f: (f / "config.json").write_text("{"), "holds no model of fedet"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no model of fedet"),
        (lambda f: (f / "config.json").write_text('{"architecture": {}}'), "holds no model of fedet"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "holds no model of fedet"),
        (lambda f: _wider(f, about), "the weights don't fit the architecture in config.json"),
    ):
        folder = shutil.copytree(good, tmp_path / "bad")
        spoil(folder)
        with pytest.raises(FedetError, match=words):
            fedet.load_model(folder)
        shutil.rmtree(folder)
    with pytest.raises(FedetError, match="holds no model of fedet"):
        fedet.load_model(tmp_path / "nowhere")


def _wider(folder: Path, about):
    wider = about | {"architecture": about["architecture"] | {"width": 2.0}}
    (folder / "config.json").write_text(json.dumps(wider), encoding="utf-8")
