"""Train one large model on a server from many small, different models on clients that never show their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedet.errors import ConfigError, DataError, Diverged, FedetError, Interrupted

if TYPE_CHECKING:
    from fedet.api import Result
    from fedet.comparison import Comparison, compare
    from fedet.export import load_model
    from fedet.start import resume, run

__all__ = [
    "Comparison",
    "ConfigError",
    "DataError",
    "Diverged",
    "FedetError",
    "Interrupted",
    "Result",
    "compare",
    "load_model",
    "resume",
    "run",
]

_LAZY = {
    "run": "start",
    "resume": "start",
    "Result": "api",
    "compare": "comparison",
    "Comparison": "comparison",
    "load_model": "export",
}
_MODULES = ("config", "core", "data", "maths", "methods", "models", "train")
"""Modules for users' own code: `fedet.maths` works after `import fedet` alone."""


def __getattr__(name: str) -> Any:
    """Load torch only when something is run: `fedet --help` must not wait for it."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"fedet.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'fedet' has no attribute {name!r}")
    return getattr(import_module(f"fedet.{_LAZY[name]}"), name)
