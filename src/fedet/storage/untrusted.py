"""What a model folder from a stranger may ask for: models of the package, no larger than their weights, no other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fedet.config.plugins import HOW_TO_TRUST, UntrustedCode
from fedet.core import Weights
from fedet.errors import FedetError
from fedet.models import FAMILIES, SPLIT, build
from fedet.models.tabular import NAME as TABULAR
from fedet.models.text import HF
from fedet.models.text import NAMES as TEXT_MODELS
from fedet.storage.files import reason
from fedet.storage.records import ModelSpecRecord

ENCODERS = (
    "albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "mobilebert", "mpnet",
    "roberta", "roformer", "xlm-roberta",
)  # fmt: skip
"""Encoders of the transformers library that are built from numbers alone."""
WORDS = (
    "activation", "architectures", "dtype", "hidden_act", "id2label", "label2id", "model_type", "pos_att_type",
    "position_embedding_type", "problem_type", "torch_dtype", "transformers_version", "_name_or_path",
)  # fmt: skip
"""Keys of an encoder's configuration that need not be numbers; none of them refers to code or to a file that is read."""


def check_model(spec: dict[str, Any], weights: Weights, folder: Path) -> None:
    """Refuse an architecture that would run code, read other files, or take more memory than the weights in the folder."""
    place = folder / "config.json"
    try:
        ModelSpecRecord.model_validate(spec)
    except (ValidationError, RecursionError) as error:
        raise FedetError(f"{place} is damaged: architecture.{reason(error)}") from None
    name = spec["name"].removeprefix(SPLIT)
    if name not in (*FAMILIES, TABULAR, *TEXT_MODELS) and not name.startswith(HF):
        raise UntrustedCode(
            f"{place} refers to the model {spec['name']!r}, which is not part of fedet: loading it would run its code; "
            f"{HOW_TO_TRUST}"
        )
    if name not in (*FAMILIES, TABULAR):
        _check_options(name, spec.get("options") or {}, place)
    _check_sizes(spec, weights, place)


def _check_options(name: str, options: Mapping[str, Any], place: Path) -> None:
    """An exported encoder brings its whole configuration along; without one, files from elsewhere would be read."""
    if "pretrained" in options or ("config" not in options and (name.startswith(HF) or name == "minilm")):
        raise UntrustedCode(f"the model {name!r} in {place} would be read from files outside of the folder; {HOW_TO_TRUST}")
    if "config" not in options:
        return
    config = options["config"] if isinstance(options["config"], Mapping) else {}
    kind, odd = config.get("model_type"), next((key for key, value in config.items() if not _harmless(key, value)), None)
    if kind not in ENCODERS or odd is not None:
        what = f"model_type = {kind!r}" if odd is None else f"{odd} = {str(config[odd])[:60]!r}"
        raise UntrustedCode(f"the encoder in {place} has {what}, which is refused because it may run code; {HOW_TO_TRUST}")


def _harmless(key: str, value: Any) -> bool:
    return key in WORDS or value is None or isinstance(value, bool | int | float)


def _check_sizes(spec: dict[str, Any], weights: Weights, place: Path) -> None:
    """Compare the architecture, built without memory, with the weights; a layer has at least one tensor, a unit one weight."""
    tensors, numbers = len(weights), max(sum(t.numel() for t in weights.values()), 1 << 16)
    try:
        for key, value in _numbers(spec):
            limit = tensors if "layers" in key else numbers
            if not abs(value) <= limit:
                raise FedetError(f"{place} has {key} = {value!r}, which does not fit the weights next to it")
        with torch.device("meta"):
            model = build(**spec)
    except FedetError:
        raise
    except Exception as error:  # what a wrong value leads to depends on the model
        raise FedetError(f"the architecture in {place} can't be built: {type(error).__name__}: {error}") from None
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = sorted(own.keys() ^ weights.keys()) or [name for name in own if own[name] != weights[name].shape]
    if wrong:
        raise FedetError(f"the weights next to {place} do not fit the architecture in it: {wrong[0]} differs")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _numbers(item, str(inner))
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float):
        yield key, value
