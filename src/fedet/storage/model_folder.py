"""A trained model as a folder in the Hugging Face style, and back, without the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedet.core import weights_of
from fedet.errors import FedetError
from fedet.models import Model, build
from fedet.storage import checkpoint

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
    with checkpoint.replacing(folder / "model.safetensors") as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
    checkpoint.write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    accuracy = "not measured" if about["accuracy"] is None else f"{about['accuracy']:.4f}"
    words = {**model.spec, **about, "arch": model.spec["name"], "params": model.num_params(), "accuracy": accuracy}
    checkpoint.write_text(folder / "README.md", CARD.format(**words))


def load_model(folder: str | Path) -> Model:
    """The model of an exported folder (or of a run: its best), in eval mode."""
    path = Path(folder)
    if (path / "best" / "model.safetensors").is_file():
        path = path / "best"
    try:
        spec = dict(read_about(path)["architecture"])
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


def read_about(folder: Path) -> Any:
    """What a model folder's config.json holds."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
