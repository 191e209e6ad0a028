"""The same methods on many machines: an app for Flower, and the only code here that imports flwr.

`bundle` reads the app folder and a node's settings, `codec` turns payloads into Flower's records, `client` works at a node,
`shelf` keeps what a client keeps, `grid` makes an exchange from Flower's grid, `server` runs the engine with it, and `local`
starts a federation on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedet.flower.client import client_app
    from fedet.flower.server import server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Load only the half that is asked for: every message starts a process, and its imports are paid each time."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'fedet.flower' has no attribute {name!r}")
    return getattr(import_module(f"fedet.flower.{name.removesuffix('_app')}"), name)
