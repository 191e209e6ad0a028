"""Configuration: TOML in, one validated object out; an unknown key is an error that suggests the nearest known one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedet.runtime import lazy_exports

if TYPE_CHECKING:
    from fedet.config.loading import assignments, build_method, load, method_class
    from fedet.config.schema import (
        AugmentConfig,
        Config,
        DataConfig,
        FlowerConfig,
        ModelsConfig,
        ModelSpec,
        PrivacyConfig,
        RunConfig,
        TextConfig,
    )

_TABLES = (
    "AugmentConfig",
    "Config",
    "DataConfig",
    "FlowerConfig",
    "ModelSpec",
    "ModelsConfig",
    "PrivacyConfig",
    "RunConfig",
    "TextConfig",
)
_FUNCTIONS = ("assignments", "build_method", "load", "method_class")
__all__ = [
    "AugmentConfig",
    "Config",
    "DataConfig",
    "FlowerConfig",
    "ModelSpec",
    "ModelsConfig",
    "PrivacyConfig",
    "RunConfig",
    "TextConfig",
    "assignments",
    "build_method",
    "load",
    "method_class",
]

# `fedet.config.sources` is used before anything large is imported
__getattr__ = lazy_exports(__name__, dict.fromkeys(_TABLES, "schema") | dict.fromkeys(_FUNCTIONS, "loading"))
