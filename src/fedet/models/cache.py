"""The models of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedet.config.sources import nearest
from fedet.core import Weights, seed_of, weights_of
from fedet.errors import ConfigError
from fedet.models import text
from fedet.models.factory import build, is_own, seeded
from fedet.models.model import Head, Model
from fedet.models.split import CHANNELS, SPLIT, Extractor
from fedet.models.vision import Shape

if TYPE_CHECKING:
    from fedet.config import ModelSpec


class ModelCache:
    """The architectures of one run: their initial weights, and modules that are reused instead of rebuilt."""

    def __init__(
        self,
        specs: Mapping[str, ModelSpec],
        *,
        num_classes: int,
        input_shape: Shape,
        feature_width: int,
        representation_width: int,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self._specs = dict(specs)
        self._common: dict[str, Any] = {
            "num_classes": num_classes,
            "input_shape": input_shape,
            "feature_width": feature_width,
            "representation_width": representation_width,
        }
        self._seed = seed
        self._device = torch.device(device)
        self.device = str(device)
        self._initial: dict[str, Weights] = {}
        self._modules: dict[tuple[str, str], Model] = {}
        self._sizes = {arch: self._count(arch) for arch in self._specs if not is_own(self._specs[arch].name)}

    @property
    def names(self) -> tuple[str, ...]:
        """The architectures, in the order given."""
        return tuple(self._specs)

    @torch.inference_mode(False)  # weights from inference mode could not be trained
    def initial(self, arch: str) -> Weights:
        """The run's initial weights, always the same dict: don't change it. All architectures' heads are equal."""
        if arch not in self._initial:
            common = self._initial_stem() if arch.startswith(SPLIT) else self._initial_head()
            self._initial[arch] = {**weights_of(self._build(arch)), **common}
        return self._initial[arch]

    @torch.inference_mode(False)
    def load(self, arch: str, weights: Weights, slot: str = "") -> Model:
        """The module of this architecture and slot in training mode, with a copy of these weights.

        The next call with the same slot reuses it; use another slot to hold two at a time.
        """
        model = self._modules.get((arch, slot))
        if model is None:
            model = self._modules[arch, slot] = self._build(arch)
        _copy_into(model, weights, arch)
        model.zero_grad(set_to_none=True)
        return model.requires_grad_(True).train()

    def num_params(self, arch: str) -> int:
        """How many parameters this architecture has, head included."""
        if arch not in self._sizes:
            self._sizes[arch] = self._count(arch)
        return self._sizes[arch]

    def vocab_size(self, arch: str) -> int | None:
        """How many different token ids a text model accepts; None for other models."""
        if is_own(self._spec(arch).name):
            return None
        body = self._build(arch, "meta").body
        return body.vocab_size if isinstance(body, text.TextBody) else None

    @property
    def split_shape(self) -> Shape:
        """The shape of one example's features behind the stem of a split model."""
        _, height, width = self._common["input_shape"]
        return (CHANNELS, height, width)

    def _spec(self, arch: str) -> ModelSpec:
        if arch.startswith(SPLIT):
            whole = self._spec(arch.removeprefix(SPLIT))
            return whole.model_copy(update={"name": SPLIT + whole.name})
        if arch not in self._specs:
            known = ", ".join(self._specs)
            raise ConfigError(f"no architecture is called '{arch}'{nearest(arch, self._specs)}; this run has: {known}")
        return self._specs[arch]

    def _count(self, arch: str) -> int:
        # A user's own body may not work on the meta device.
        return self._build(arch, "cpu" if is_own(self._spec(arch).name) else "meta").num_params()

    def _build(self, arch: str, device: Literal["cpu", "meta"] = "cpu") -> Model:
        # Weights are drawn on the CPU whatever the run's device, so that they are the same on all devices.
        spec = self._spec(arch)
        with torch.device(device):
            model = build(
                spec.name,
                width=spec.width,
                stem=spec.stem,
                norm=spec.norm,
                conv_bias=spec.conv_bias,
                options=spec.options,
                seed=seed_of(self._seed, "init", arch),
                **self._common,
            )
        return model if device == "meta" else model.to(self._device)

    def _initial_head(self) -> Weights:
        sizes = (self._common[key] for key in ("feature_width", "representation_width", "num_classes"))
        with seeded(seed_of(self._seed, "init", "head")):
            head = Head(*sizes).to(self._device)
        return {f"head.{name}": tensor for name, tensor in weights_of(head).items()}

    def _initial_stem(self) -> Weights:
        with seeded(seed_of(self._seed, "init", "stem")):
            stem = Extractor(self._common["input_shape"][0]).to(self._device)
        return {f"stem.{name}": tensor for name, tensor in weights_of(stem).items()}


def _copy_into(model: Model, weights: Weights, arch: str) -> None:
    own = model.state_dict()
    wrong = sorted(own.keys() ^ weights.keys()) or [name for name in own if own[name].shape != weights[name].shape]
    if wrong:
        raise ConfigError(f"these weights don't fit architecture '{arch}': {wrong[0]} and {len(wrong) - 1} more differ")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
