"""Text bodies: a batch of word-piece ids in, one feature vector per text out.

A batch is an integer tensor (texts, length); trailing zeros of a row are padding. Bodies cut a batch to its longest text and
mask the padding that is left, so that padding costs time but never changes a result.
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
"""`hf:PLACE` is the encoder in a local folder in the Hugging Face format, or of that name in the Hugging Face cache."""
VOCABULARY = 30522
"""Word pieces of the vocabulary of `bert-base-uncased`."""
MAX_LAYERS = 1000
BERTS = {"bert-tiny": (2, 128), "bert-mini": (4, 256)}
"""Layers and hidden units."""
NAMES = (*BERTS, "lstm", "minilm")
Pool = Literal["cls", "mean", "last", "max"]


class TextBody(nn.Module, ABC):
    """The part before adapter and head; its output has `width` numbers per text."""

    width: int
    vocab_size: int
    options: dict[str, Any]
    """Enough to build the same module again, without the files that its pretrained weights came from."""

    def lengths(self, ids: Tensor) -> Tensor:
        """How many ids each text has; a text that is all padding counts as one id, so that no text is empty."""
        positions = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        return (positions * (ids != 0)).amax(dim=1).clamp(min=1)

    def forward(self, ids: Tensor) -> Tensor:
        """Features of a batch of texts."""
        if ids.is_floating_point():
            raise ConfigError("a text model needs integer word-piece ids, not floats: choose text data such as sent140")
        lengths = self.lengths(ids)
        longest = int(lengths.max()) if ids.device.type != "meta" else ids.shape[1]
        return self.read(ids[:, :longest].to(torch.int64), lengths)

    @abstractmethod
    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Features of texts of these lengths, already cut to the longest."""


class LSTM(TextBody):
    """An embedding and two layers of LSTM; its features are the state after each text's last id."""

    def __init__(self, vocab_size: int, embedding: int, hidden: int, layers: int, dropout: float, pool: Pool) -> None:
        super().__init__()
        self.embedding = _embedding(vocab_size, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=dropout)
        self.pool, self.width, self.vocab_size = pool, hidden, vocab_size

    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Run over padding, too: an LSTM reads from left to right, so the states of a text don't depend on what follows it."""
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
    """One vector per text from the states of its ids (texts, length, width)."""
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
    """Build the body of this name, with pretrained weights if the options or the name refer to any."""
    if len(shape) != 1:
        raise ConfigError(f"'{name}' is a text model and the data's inputs have the shape {shape}: choose an image model")
    body = _lstm(dict(options)) if name == "lstm" else _encoder(name, dict(options))
    config = getattr(getattr(body, "encoder", None), "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and shape[0] > positions:
        raise ConfigError(f"'{name}' reads at most {positions} word pieces: lower data.text.max_length = {shape[0]} to that")
    return body


def notice(models: Mapping[str, Any]) -> str | None:
    """A warning for readers of the results if a run with this `[models]` table starts from random weights, or None."""
    given = [*models.get("clients", []), models.get("server")]
    specs = [spec if isinstance(spec, Mapping) else {"name": spec} for spec in given]
    berts = [spec for spec in specs if spec["name"] in BERTS and "pretrained" not in (spec.get("options") or {})]
    if not berts:
        return None
    names = ", ".join(spec.get("label") or spec["name"] for spec in berts)
    return (
        f"NO PRETRAINED WEIGHTS: {names} {'starts' if len(berts) == 1 else 'start'} from random weights. The paper's models "
        "were pretrained, so accuracies can't be compared with the paper's."
    )


def _lstm(options: dict[str, Any]) -> LSTM:
    chosen = _validated("lstm", options, vocab_size=VOCABULARY, embedding=50, hidden=256, layers=2, dropout=0.0, pool="last")
    _check_pool("lstm", chosen["pool"], ("last", "mean", "max"))
    body = LSTM(**chosen)
    body.options = chosen
    return body


def _encoder(name: str, options: dict[str, Any]) -> Encoder:
    """An encoder from its configuration, with pretrained weights if there is a folder that has them."""
    pool = options.pop("pool", "mean" if name == "minilm" else "cls")
    _check_pool(name, pool, ("cls", "mean"))
    folder, config = _configured(name, options)
    body = Encoder(config, pool)
    if folder is not None and next(body.parameters()).device.type != "meta":
        pretrained.load_into(body.encoder, folder)
    body.options = {"config": config.to_diff_dict(), "pool": pool}
    return body


def _configured(name: str, options: dict[str, Any]) -> tuple[Path | None, Any]:
    """The folder with pretrained weights, if any, and the configuration of the transformers library."""
    if "config" in options:  # the `options` of a body that was built before
        return None, _check_layers(name, pretrained.from_plain(_validated(name, options, config=None)["config"]))
    place = options.pop("pretrained", None) if name in BERTS else None
    if name in BERTS and place is None:
        return None, _bert(name, options)
    chosen = _validated(name, options, layers=None, dropout=None)
    folder = pretrained.minilm() if name == "minilm" else pretrained.find(str(place or name.removeprefix(HF)), f"'{name}'")
    plain = pretrained.read_config(folder)
    if name in BERTS and (plain.get("num_hidden_layers"), plain.get("hidden_size")) != BERTS[name]:
        raise ConfigError(
            f"{folder} holds no {name} ({BERTS[name][0]} layers of {BERTS[name][1]} units): name the model 'hf:{place}' instead"
        )
    config = pretrained.from_plain(_first_layers(plain, chosen["layers"], name))
    return folder, _with_dropout(_check_layers(name, config), chosen["dropout"])


def _bert(name: str, options: dict[str, Any]) -> Any:
    layers, hidden = BERTS[name]
    chosen = _validated(name, options, vocab_size=VOCABULARY, layers=layers, hidden=hidden, heads=None, dropout=0.1)
    width, heads = chosen["hidden"], chosen["heads"] or max(1, chosen["hidden"] // 64)
    if width % heads:
        raise ConfigError(
            f"'{name}': options.hidden = {width} is not divisible by {heads} heads: change options.hidden or options.heads"
        )
    plain = {
        "model_type": "bert",
        "vocab_size": chosen["vocab_size"],
        "hidden_size": width,
        "num_hidden_layers": chosen["layers"],
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return _with_dropout(pretrained.from_plain(plain), chosen["dropout"])


def _first_layers(plain: dict[str, Any], layers: int | None, name: str) -> dict[str, Any]:
    """The configuration of the first layers alone."""
    key = "num_hidden_layers" if "num_hidden_layers" in plain else "n_layers"
    if layers is None:
        return plain
    if not isinstance(plain.get(key), int) or not 1 <= layers <= plain[key]:
        raise ConfigError(
            f"'{name}': options.layers = {layers} must be from 1 to {plain.get(key)}, the number of layers it has"
        )
    return plain | {key: layers}


def _with_dropout(config: Any, rate: float | None) -> Any:
    """Set the rate of dropout, under whichever name this kind of encoder has for it."""
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if rate is not None and hasattr(config, key):
            setattr(config, key, rate)
    return config


def _validated(name: str, options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The options with defaults filled in."""
    for key, value in options.items():
        if key not in defaults:
            raise ConfigError(f"'{name}' has no option {key}{nearest(key, defaults)}; it has: {', '.join([*defaults, 'pool'])}")
        if problem := _problem(key, value):
            raise ConfigError(f"'{name}': options.{key} = {value!r} {problem}")
    return {**defaults, **options}


def _problem(key: str, value: Any) -> str | None:
    if key == "dropout":
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        return None if right else "must be a number from 0 to 1"
    if key not in ("vocab_size", "embedding", "hidden", "layers", "heads"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return "must be a positive integer"
    return f"must be at most {MAX_LAYERS}" if key == "layers" and value > MAX_LAYERS else None


def _check_layers(name: str, config: Any) -> Any:
    layers = getattr(config, "num_hidden_layers", 1)
    if not 1 <= layers <= MAX_LAYERS:
        raise ConfigError(f"'{name}': its configuration has {layers} layers; the number must be from 1 to {MAX_LAYERS}")
    return config


def _embedding(vocab_size: int, width: int) -> nn.Embedding:
    """As torch's, but on the meta device no values are drawn: that would import torch's compiler, which takes seconds."""
    table = torch.empty(vocab_size, width)
    return nn.Embedding(vocab_size, width, _weight=table if table.is_meta else nn.init.normal_(table))


def _check_pool(name: str, pool: str, choices: tuple[str, ...]) -> None:
    if pool not in choices:
        raise ConfigError(f"'{name}': options.pool = {pool!r} is not available: choose from {', '.join(choices)}")
