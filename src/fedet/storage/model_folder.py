"""A trained model as a folder in the Hugging Face style, and back, without the training code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedet.config import objects
from fedet.core import Weights, weights_of
from fedet.errors import FedetError
from fedet.models import Model, build
from fedet.storage import files, untrusted
from fedet.storage.records import ModelRecord

MAX_HEADER = 1 << 22
"""Bytes in which a safetensors file lists its tensors: some 40,000; a million of them would take minutes and gigabytes."""
CARD = """---
library_name: fedet
tags: [federated-learning, {method}]
---
# {arch}, trained with {method}

Trained on a server from clients that kept their data to themselves.

- data: {data}, seed {seed}, {round} rounds; test accuracy: {accuracy}
- architecture: `{arch}`, {params:,} parameters, {num_classes} classes
- input: {input_shape} (channels, height, width for images); 8-bit images as `(x / 255 - 0.5) / 0.5`; texts as word-piece ids,
  padded with zeros at the end

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
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(model).items()}
    with files.replacing(folder / "model.safetensors") as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
    files.write_json(folder / "config.json", config)
    accuracy = "not measured" if about["accuracy"] is None else f"{about['accuracy']:.4f}"
    values = {**model.spec, **about, "arch": model.spec["name"], "params": model.num_params(), "accuracy": accuracy}
    files.write_text(folder / "README.md", CARD.format(**values))


def load_model(folder: str | Path, *, trust_code: bool = False, own: Any = None) -> Model:
    """The model of an exported folder, or the best one of a run, in eval mode.

    Only models of the package are built, from the folder's own files alone. A model that is somebody's own code, such as
    `module:callable`, needs `trust_code=True`: loading it runs that code. One that was passed to the run as an object needs
    that class or function again, as `own`.
    """
    path = Path(folder)
    if (path / "best" / "model.safetensors").is_file():
        path = path / "best"
    spec, weights = read_about(path)["architecture"], _read_weights(path)
    if not trust_code and own is None:
        untrusted.check_model(spec, weights, path)
    with objects.scope({} if own is None else {spec["name"]: own}):
        model = _build(spec, path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FedetError(f"the weights in {path} do not fit the architecture in its config.json: {error}") from None
    return model.eval()


def read_about(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    if not (folder / "config.json").is_file():
        raise FedetError(f"{folder} is not a model folder: it has no config.json; give a run or a folder from `fedet export`")
    return files.read_json(folder / "config.json", ModelRecord)


def _read_weights(path: Path) -> Weights:
    if not (path / "model.safetensors").is_file():
        raise FedetError(f"{path} is not a model folder: it has no model.safetensors")
    try:
        files.check_header(path / "model.safetensors", MAX_HEADER)
        return load_file(path / "model.safetensors")
    except Exception as error:  # the parser raises many types, depending on where the damage is
        raise FedetError(f"{path / 'model.safetensors'} is damaged: {error}") from None


def _build(spec: dict[str, Any], path: Path) -> Model:
    try:
        return build(**spec)
    except (FedetError, KeyboardInterrupt):
        raise
    except Exception as error:  # what a wrong value leads to depends on the model
        raise FedetError(f"the architecture in {path / 'config.json'} can't be built: {error}") from None
