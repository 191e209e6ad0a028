"""The same methods on many machines: an app for Flower, and the only code here that imports flwr.

`bundle` reads the app folder and a node's settings, `codec` turns payloads into Flower's records, `client` works at a node,
`shelf` keeps what a client keeps, `grid` makes an exchange from Flower's grid, `server` runs the engine with it, and `local`
starts a federation on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedet.runtime import lazy_exports

if TYPE_CHECKING:
    from fedet.flower.client import client_app
    from fedet.flower.server import server_app

__all__ = ["client_app", "server_app"]

# Every message starts a process that needs one half only, and pays for its imports each time.
__getattr__ = lazy_exports(__name__, {"client_app": "client", "server_app": "server"})
