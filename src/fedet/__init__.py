"""Train one large model on a server from many small, different models on clients that never show their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedet.errors import ConfigError, DataError, Diverged, FedetError, FedetWarning, Interrupted, StopRun
from fedet.runtime import lazy_exports, package_version

if TYPE_CHECKING:
    from fedet.api import compare, resume, run
    from fedet.core import Method
    from fedet.engine.callbacks import Callbacks
    from fedet.engine.comparison import Comparison
    from fedet.engine.session import Result
    from fedet.storage.model_folder import load_model

__all__ = [
    "Callbacks",
    "Comparison",
    "ConfigError",
    "DataError",
    "Diverged",
    "FedetError",
    "FedetWarning",
    "Interrupted",
    "Method",
    "Result",
    "StopRun",
    "compare",
    "load_model",
    "resume",
    "run",
]

_NAMES = {
    "Callbacks": "engine.callbacks",
    "Comparison": "engine.comparison",
    "Method": "core",
    "Result": "engine.session",
    "compare": "api",
    "load_model": "storage.model_folder",
    "resume": "api",
    "run": "api",
}
_MODULES = ("config", "core", "data", "maths", "methods", "models", "train")
"""Modules for users' own code: `fedet.maths` works after `import fedet` alone."""

_lazy = lazy_exports(__name__, _NAMES | dict.fromkeys(_MODULES, ""))  # `fedet --help` must not wait for torch


def __getattr__(name: str) -> Any:
    return package_version() if name == "__version__" else _lazy(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
