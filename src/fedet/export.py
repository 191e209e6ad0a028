"""A trained model as a folder in the Hugging Face style, and back, without the trainer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedet import state
from fedet.core import weights_of
from fedet.errors import ConfigError, FedetError
from fedet.models import Model, build

CARD = """---
library_name: fedet
tags: [federated-learning, {method}]
---
# {arch}, trained with {method}

One model trained on a server from clients that kept their data.

- trained on {data}, seed {seed}, to round {round}; test accuracy {accuracy}
- architecture: `{arch}`, {params:,} parameters, {num_classes} classes
- input: {input_shape} (channels, height, width for images); 8-bit images as `(x / 255 - 0.5) / 0.5`; texts as word-piece ids,
  zeros behind

```python
import fedet

model = fedet.load_model("path/to/this/folder")
logits = model(images)
```

Made with fedet, after Cho et al., Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated
Learning, IJCAI 2022.
"""


def save_model(folder: Path, model: Model, about: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and a model card."""
    config = {"model_type": "fedet", "architecture": model.spec, "num_params": model.num_params(), "training": about}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights_of(model).items()}
    with state.replacing(folder / "model.safetensors") as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
    state.write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    accuracy = "not measured" if about["accuracy"] is None else f"{about['accuracy']:.4f}"
    words = {**model.spec, **about, "arch": model.spec["name"], "params": model.num_params(), "accuracy": accuracy}
    state.write_text(folder / "README.md", CARD.format(**words))


def load_model(folder: str | Path) -> Model:
    """The model of an exported folder (or of a run: its best), in eval mode."""
    path = Path(folder)
    if (path / "best" / "model.safetensors").is_file():
        path = path / "best"
    try:
        spec = dict(_about(path)["architecture"])
        weights = load_file(path / "model.safetensors")
        model = build(spec.pop("name"), **spec)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise FedetError(
            f"{path} holds no model of fedet ({error}): give a run's folder or one that `fedet export` made"
        ) from None
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FedetError(f"{path}: the weights don't fit the architecture in config.json: {error}") from None
    return model.eval()


def export_run(run_dir: Path, folder: Path, which: str = "best") -> Path:
    """Write the best or the last server model of a run, finished or not, into a folder of its own."""
    if which not in ("best", "last"):
        raise ConfigError(f"--which {which}: it is 'best' or 'last'")
    if not (run_dir / "config.toml").is_file():
        raise FedetError(f"{run_dir} holds no run: give the folder that `fedet run` made, it has a config.toml")
    _check_target(run_dir, folder)
    model, about = _best(run_dir) if which == "best" else _last(run_dir)
    save_model(folder, model, about)
    return folder


def _best(run_dir: Path) -> tuple[Model, dict[str, Any]]:
    if not (run_dir / "best" / "model.safetensors").is_file():
        raise FedetError(f"{run_dir} has no evaluated model yet: go on with `fedet resume {run_dir}`")
    return load_model(run_dir / "best"), _about(run_dir / "best")["training"]


def _last(run_dir: Path) -> tuple[Model, dict[str, Any]]:
    """From the checkpoint, because the model beside it is that of the last run that came to its end."""
    from fedet import config, experiment, runfolder

    checkpoint = run_dir / "last" / "checkpoint.safetensors"
    fields, meta = state.load(checkpoint) if checkpoint.is_file() else ({"round": 0}, {})
    if not fields["round"]:
        raise FedetError(f"{run_dir} has not finished a round yet: go on with `fedet resume {run_dir}`")
    loaded = config.load(run_dir / "config.toml")
    if meta["config"] != loaded.digest():
        raise FedetError(f"{checkpoint} belongs to another configuration than {run_dir / 'config.toml'}")
    ready = experiment.build(loaded, runfolder.cache(run_dir.parent))
    fresh, kept = ready.method.init(ready.env), fields["state"]
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        kept = dataclasses.replace(fresh, **kept)
    arch, weights = next(iter(ready.method.models(kept, ready.env).values()))
    accuracy = None if fields["accuracy"] < 0 else fields["accuracy"]
    about = {"method": ready.method.name, "data": ready.config.data.name, "seed": ready.seed}
    return ready.env.build(arch, weights).eval(), about | {"round": fields["round"], "accuracy": accuracy}


def _check_target(run_dir: Path, folder: Path) -> None:
    """Refuse a place that holds anything but an exported model."""
    if folder.exists() and not folder.is_dir():
        raise FedetError(f"{folder} is no folder: choose another name for the exported model")
    if folder.resolve().is_relative_to(run_dir.resolve()):
        raise FedetError(f"{folder} is part of the run: export to a folder outside of it")
    there = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    try:
        ours = not there or _about(folder)["model_type"] == "fedet"
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise FedetError(f"{folder} holds something else ({sorted(there)[0]}): export to a new or empty folder")


def _about(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
