"""Text bodies: a batch of word-piece ids in, one feature vector per text out.

A batch is an integer tensor (texts, length); the zeros behind the last other number of a row are its padding.
Bodies cut a batch to its longest text and look away from the rest, so that padding changes nothing but the time it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedet.config.sources import nearest
from fedet.errors import ConfigError
from fedet.models import pretrained
from fedet.models.vision import Shape

HF = "hf:"
"""`hf:PLACE` is the encoder in a folder in the Hugging Face style, or of that name on the hub if it was fetched before."""
VOCABULARY = 30522
BERTS = {"bert-tiny": (2, 128), "bert-mini": (4, 256)}
"""Layers and hidden units."""
NAMES = (*BERTS, "lstm", "minilm")
Pool = Literal["cls", "mean", "last", "max"]


class TextBody(nn.Module, ABC):
    """What comes before adapter and head; `width` numbers per text."""

    width: int
    vocab_size: int
    options: dict[str, Any]
    """With these alone the same module can be made anew, without the files that its first weights came from."""

    def lengths(self, ids: Tensor) -> Tensor:
        """How many ids each text has; one that is all padding counts as one id long, so that there is something to read."""
        places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        return (places * (ids != 0)).amax(dim=1).clamp(min=1)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of a batch of texts."""
        if ids.is_floating_point():
            raise ConfigError("a text model reads word-piece ids, not floats: give it data such as sent140")
        lengths = self.lengths(ids)
        longest = int(lengths.max()) if ids.device.type != "meta" else ids.shape[1]
        return self.read(ids[:, :longest].to(torch.int64), lengths)

    @abstractmethod
    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Features of texts of these lengths, cut to the longest."""


class LSTM(TextBody):
    """An embedding and two layers of LSTM; the state after each text's last id."""

    def __init__(self, vocab_size: int, embedding: int, hidden: int, layers: int, dropout: float, pool: Pool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=dropout)
        self.pool, self.width, self.vocab_size = pool, hidden, vocab_size

    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """An LSTM reads from left to right, so what it makes of a text does not depend on the padding behind it."""
        states, _ = self.lstm(self.embedding(ids))
        return pooled(states, lengths, self.pool)


class Encoder(TextBody):
    """An encoder of the transformers library."""

    def __init__(self, config: Any, pool: Pool) -> None:
        super().__init__()
        self.encoder = pretrained.encoder(config, pooler=pool == "cls")
        self.pool, self.width, self.vocab_size = pool, int(config.hidden_size), int(config.vocab_size)
        self.padding = config.pad_token_id or 0

    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The pooler's output (or the first state where there is none), or the mean of the states."""
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        out = self.encoder(input_ids=ids.where(mask, self.padding), attention_mask=mask.to(torch.int64))
        if self.pool == "cls" and getattr(out, "pooler_output", None) is not None:
            features: Tensor = out.pooler_output
            return features
        return pooled(out.last_hidden_state, lengths, self.pool)


def pooled(states: Tensor, lengths: Tensor, pool: Pool) -> Tensor:
    """One vector for each text from those of its ids (texts, length, width)."""
    if pool == "cls":
        return states[:, 0]
    if pool == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    mask = (torch.arange(states.shape[1], device=states.device) < lengths[:, None])[:, :, None]
    if pool == "max":
        return states.masked_fill(~mask, float("-inf")).amax(dim=1)
    return (states * mask).sum(dim=1) / lengths[:, None]


def known(name: str) -> bool:
    """Whether this is the name of a text model."""
    return name in NAMES or name.startswith(HF)


def make(name: str, options: Mapping[str, Any], shape: Shape) -> TextBody:
    """The body of this name, with pretrained weights where the options (or the name) say where they are."""
    if len(shape) != 1:
        raise ConfigError(f"'{name}' reads texts and the data's inputs have the shape {shape}: choose an image model")
    body = _lstm(dict(options)) if name == "lstm" else _encoder(name, dict(options))
    config = getattr(getattr(body, "encoder", None), "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and shape[0] > positions:
        raise ConfigError(f"'{name}' reads up to {positions} word pieces, data.text.max_length is {shape[0]}: lower it")
    return body


def notice(models: Mapping[str, Any]) -> str | None:
    """What whoever reads the figures of a run with this `[models]` table must know about its beginning."""
    given = [*models.get("clients", []), models.get("server")]
    specs = [spec if isinstance(spec, Mapping) else {"name": spec} for spec in given]
    berts = [spec for spec in specs if spec["name"] in BERTS and "pretrained" not in (spec.get("options") or {})]
    if not berts:
        return None
    names = ", ".join(spec.get("label") or spec["name"] for spec in berts)
    return (
        f"NO PRETRAINED WEIGHTS: {names} {'starts' if len(berts) == 1 else 'start'} from random numbers. The paper's were "
        "pretrained, so this is another experiment than the paper's, and its accuracy can't be held against the paper's."
    )


def _lstm(options: dict[str, Any]) -> LSTM:
    chosen = _taken("lstm", options, vocab_size=VOCABULARY, embedding=50, hidden=256, layers=2, dropout=0.0, pool="last")
    _check_pool("lstm", chosen["pool"], ("last", "mean", "max"))
    body = LSTM(**chosen)
    body.options = chosen
    return body


def _encoder(name: str, options: dict[str, Any]) -> Encoder:
    """An encoder from its configuration, and with the weights of a folder if there is one."""
    pool = options.pop("pool", "mean" if name == "minilm" else "cls")
    _check_pool(name, pool, ("cls", "mean"))
    folder, config = _configured(name, options)
    body = Encoder(config, pool)
    if folder is not None and next(body.parameters()).device.type != "meta":
        pretrained.load_into(body.encoder, folder)
    body.options = {"config": config.to_diff_dict(), "pool": pool}
    return body


def _configured(name: str, options: dict[str, Any]) -> tuple[Path | None, Any]:
    """Where the weights are, if anywhere, and the configuration of the transformers library."""
    if "config" in options:  # as `options` of a body has it
        return None, pretrained.from_plain(_taken(name, options, config=None)["config"])
    place = options.pop("pretrained", None) if name in BERTS else None
    if name in BERTS and place is None:
        return None, _bert(name, options)
    chosen = _taken(name, options, layers=None, dropout=None)
    folder = pretrained.minilm() if name == "minilm" else pretrained.find(str(place or name.removeprefix(HF)), f"'{name}'")
    plain = pretrained.read_config(folder)
    if name in BERTS and (plain.get("num_hidden_layers"), plain.get("hidden_size")) != BERTS[name]:
        raise ConfigError(f"{folder} holds no {name} of {BERTS[name][0]} layers of {BERTS[name][1]}: use it as 'hf:{place}'")
    return folder, _dropping(pretrained.from_plain(_cut(plain, chosen["layers"], name)), chosen["dropout"])


def _bert(name: str, options: dict[str, Any]) -> Any:
    layers, hidden = BERTS[name]
    chosen = _taken(name, options, vocab_size=VOCABULARY, layers=layers, hidden=hidden, heads=None, dropout=0.1)
    width, heads = chosen["hidden"], chosen["heads"] or max(1, chosen["hidden"] // 64)
    if width % heads:
        raise ConfigError(f"{name}: {width} hidden units can't be shared out to {heads} heads: change options.hidden or .heads")
    plain = {
        "model_type": "bert",
        "vocab_size": chosen["vocab_size"],
        "hidden_size": width,
        "num_hidden_layers": chosen["layers"],
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return _dropping(pretrained.from_plain(plain), chosen["dropout"])


def _cut(plain: dict[str, Any], layers: int | None, name: str) -> dict[str, Any]:
    """The first layers only."""
    key = "num_hidden_layers" if "num_hidden_layers" in plain else "n_layers"
    if layers is None:
        return plain
    if not isinstance(plain.get(key), int) or not 1 <= layers <= plain[key]:
        raise ConfigError(f"{name}: options.layers = {layers}, it has {plain.get(key)}")
    return plain | {key: layers}


def _dropping(config: Any, rate: float | None) -> Any:
    """Another rate of dropout, under whatever name this kind of encoder has it."""
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if rate is not None and hasattr(config, key):
            setattr(config, key, rate)
    return config


def _taken(name: str, options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    for key in options:
        if key not in defaults:
            raise ConfigError(f"'{name}' has no option {key}{nearest(key, defaults)}; it has: {', '.join([*defaults, 'pool'])}")
    for key, value in options.items():
        least = 0 if key == "dropout" else 1
        if isinstance(defaults[key], int | float) and (isinstance(value, bool | str) or not least <= value):
            raise ConfigError(f"'{name}': options.{key} = {value!r} must be a number from {least} up")
    return {**defaults, **options}


def _check_pool(name: str, pool: str, choices: tuple[str, ...]) -> None:
    if pool not in choices:
        raise ConfigError(f"'{name}': options.pool = {pool!r}: it is one of {', '.join(choices)}")
