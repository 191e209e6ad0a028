"""Who may ask for what: the token in the address, the host, the methods; and the headers of every answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
"""Content security policy of the pages: nothing from elsewhere, no inline scripts or styles."""
FILE_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; frame-ancestors 'none'"
"""Policy of files from run folders, which are not trusted: they may look like something but run nothing."""
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # the address contains the token
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Guard:
    """An ASGI application that lets only those requests through that know the token and mean this server."""

    app: ASGIApp
    token: str
    port: int
    allow_control: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with the token as its root path."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            scope = {**scope, "root_path": f"/{self.token}"}
        await (self.app if refusal is None else refusal)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self._hosts():  # a page elsewhere whose name was made to point to this machine
            return PlainTextResponse("unknown host: open the address that `fedet ui` printed\n", 421)
        given = scope["path"].split("/")[1] if "/" in scope["path"] else ""
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return PlainTextResponse("the address has no valid token: open the one that `fedet ui` printed\n", 403)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if scope["method"] != "POST":
            return PlainTextResponse("only GET and POST are understood\n", 405)
        if not self.allow_control:
            return PlainTextResponse(
                "this page only shows runs: start it with `fedet ui --allow-control` to control them\n", 403
            )
        origin = headers.get("origin")  # every browser sends it with a POST
        if origin is not None and origin not in {f"http://{host}" for host in self._hosts()}:
            return PlainTextResponse("the request comes from another page\n", 403)
        return None

    def _hosts(self) -> set[str]:
        return {f"{host}:{self.port}" for host in LOOPBACK}


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
