"""Mount point of a user's ASGI app: `/fn/NAME` is its `root_path`, so that the URLs that it builds lead back to it, and
of the headers of its responses the platform's own are dropped.

As the ASGI specification has it, `path` then begins with `root_path`. Starlette and FastAPI (from 0.33 and 0.109),
Django and Quart take it off again to find a route, and leave it in redirects and in the URLs that they build. These
begin with `https` where the caller used it: the gateway says so, as it calls workers without TLS.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ..contract.worker_headers import RESERVED, ROOT_PATH_HEADER
from ..worker_io.asgi import App, Message, Receive, Scope, Send

_ROOT_PATH = ROOT_PATH_HEADER.encode()
_PROTOCOL = (b"x-forwarded-proto", b"https")
_SECURE = {"http": "https", "websocket": "wss"}


def mounted(app: App) -> App:
    """Wraps an ASGI app: a request that names a root path is shown to it below that path, without the header."""

    async def at_root(scope: Scope, receive: Receive, send: Send) -> None:
        raw = next((value for name, value in scope.get("headers", ()) if name == _ROOT_PATH), b"")
        await app(mount(scope, raw) if raw else scope, receive, _without_reserved(send))

    return at_root


def _without_reserved(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if headers := message.get("headers"):
            message = {**message, "headers": [pair for pair in headers if not _is_reserved(pair)]}
        await send(message)

    return sending


def _is_reserved(pair: Any) -> bool:
    """Checks a header as an app wrote it; what is none is for the check of its response."""
    name = pair[0]
    return isinstance(name, bytes) and name[: len(RESERVED)].lower() == RESERVED


def mount(scope: Scope, raw: bytes) -> Scope:
    """The scope of a request below a root path, which is percent-encoded as in a URL."""
    root = unquote(raw.decode("latin-1"))
    changed = {
        **scope,
        "root_path": root,
        "path": root + scope["path"],
        "headers": [pair for pair in scope["headers"] if pair[0] != _ROOT_PATH],
    }
    if _PROTOCOL in scope["headers"]:
        changed["scheme"] = _SECURE[scope["type"]]
    if scope.get("raw_path") is not None:
        changed["raw_path"] = raw + scope["raw_path"]
    return changed
