"""A trained model as a folder in the Hugging Face style, and back, without the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedet import state
from fedet.core import weights_of
from fedet.errors import FedetError
from fedet.models import Model, build

CARD = """---
library_name: fedet
tags: [federated-learning, {method}]
---
# {arch}, trained with {method}

One model trained on a server from clients that kept their data ({data}, seed {seed}, round {round}); test accuracy {accuracy:.4f}.

- architecture: `{arch}`, {params:,} parameters, {num_classes} classes
- input: {input_shape} (channels, height, width); 8-bit images are scaled to mean 0.5 and standard deviation 0.5: `(x / 255 - 0.5) / 0.5`

```python
import fedet

model = fedet.load_model("path/to/this/folder")
logits = model(images)
```

Method: Cho et al., Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning, IJCAI 2022.
"""


def save_model(folder: Path, model: Model, about: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and a model card."""
    config = {"model_type": "fedet", "architecture": model.spec, "num_params": model.num_params(), "training": about}
    with state.replacing(folder / "model.safetensors") as temporary:
        try:
            save_file({name: t.cpu().contiguous() for name, t in weights_of(model).items()}, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
    state.write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
    card = CARD.format(arch=model.spec["name"], params=model.num_params(), **{**model.spec, **about})
    state.write_text(folder / "README.md", card)


def load_model(folder: str | Path) -> Model:
    """The model of an exported folder (or of a run: its best), in eval mode."""
    path = Path(folder)
    if (path / "best" / "model.safetensors").is_file():
        path = path / "best"
    try:
        spec = dict(json.loads((path / "config.json").read_text(encoding="utf-8"))["architecture"])
        weights = load_file(path / "model.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise FedetError(f"{path} holds no model of fedet ({error}): give a run's folder or one that `fedet export` made") from None
    spec["input_shape"] = tuple(spec["input_shape"])
    model = build(spec.pop("name"), **spec)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise FedetError(f"{path}: the weights don't fit the architecture in config.json: {error}") from None
    with torch.no_grad():
        return model.eval()
