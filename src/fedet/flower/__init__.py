"""The same methods on many machines: an app for Flower, and the only package here that imports flwr.

`bundle` reads the app folder and a node's settings, `codec` converts payloads to Flower's records, `client` is a node's side,
`versioned_store` holds a client's state, `registry` knows which clients there are, `grid` makes a transport from Flower's
grid, `server` runs the engine with it, `runs` submits an app, and `local` starts a federation on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedet.runtime import lazy_exports

if TYPE_CHECKING:
    from fedet.flower.client import client_app
    from fedet.flower.server import server_app

__all__ = ["client_app", "server_app"]

# Every message starts a process that needs only one of them, and each import costs time.
__getattr__ = lazy_exports(__name__, {"client_app": "client", "server_app": "server"})
