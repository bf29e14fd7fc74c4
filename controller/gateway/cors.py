"""CORS: calls of functions from web pages of other origins, outside of authentication.

A preflight is answered here and starts no worker; responses get the headers that let the page read them and ours. Calls
of a function without `cors` pass unchanged: an ASGI app may have CORS headers of its own. Cookies are never allowed:
keys travel in a header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fleetstart.runtime.contract.errors import NotFound, Refused

from ..http.asgi import Message, RawHeaders, Receive, Scope, Send, respond_error
from ..http.invoke_url import parse_target
from ..http.request_body import header
from ..http.scope import ORIGIN_ALLOWED
from ..state.records import VersionKey
from ..state.traffic import version_of_alias
from ..state.view import View

MAX_AGE_S = 600
"""Time for which a browser caches the answer to a preflight."""
EXPOSED = (
    b"x-request-id, fs-version, fs-start, fs-attempts, fs-billed-ms, fs-cost, fs-error, server-timing, location, "
    b"retry-after, retry-after-ms, x-should-retry, *"
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class OriginRejected(Refused):
    code = "origin_refused"
    status = 403


class Cors:
    def __init__(self, view: View, inner: App) -> None:
        self._view = view
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles HTTP calls of functions. Calls without an Origin header need not come here."""
        origin = header(scope, b"origin")
        origins = self._origins(scope) if origin is not None else ()
        if origin is None or not origins:
            await self._inner(scope, receive, send)
            return
        allowed = allowed_origin(origins, origin)
        asked = header(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and asked is not None:
            await _answer_preflight(scope, send, allowed, asked)
        elif allowed is None:
            await self._inner(scope, receive, send)  # without CORS headers the browser keeps the response from the page
        else:
            scope[ORIGIN_ALLOWED] = True
            await self._inner(scope, receive, _sharing(send, allowed))

    def _origins(self, scope: Scope) -> Sequence[str]:
        target = parse_target(scope["path"], scope.get("raw_path") or b"", b"")
        record = self._view.functions.get(target.name)
        if record is None:
            return ()
        try:
            version = target.version if target.version is not None else version_of_alias(record, target.alias)
        except NotFound:
            return ()
        known = self._view.versions.get(VersionKey(record.name, version))
        return known.spec.cors if known is not None else ()


def allowed_origin(origins: Sequence[str], origin: bytes) -> bytes | None:
    """The value of Access-Control-Allow-Origin; None if that origin is not allowed."""
    if "*" in origins:
        return b"*"
    return origin if origin.decode("latin-1").lower() in {known.lower() for known in origins} else None


def _share_headers(allowed: bytes) -> RawHeaders:
    headers = [(b"access-control-allow-origin", allowed)]
    return headers if allowed == b"*" else [*headers, (b"vary", b"origin")]


async def _answer_preflight(scope: Scope, send: Send, allowed: bytes | None, method: bytes) -> None:
    if allowed is None:
        origin = (header(scope, b"origin") or b"").decode("latin-1")[:100]
        await respond_error(
            send,
            OriginRejected(
                f"pages of {origin!r} may not call this function", hint="its setting `cors` lists the origins that may"
            ),
            "",
            [(b"vary", b"origin")],
        )
        return
    headers = [
        *_share_headers(allowed),
        (b"access-control-allow-methods", method),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
    ]
    wanted = header(scope, b"access-control-request-headers")
    if wanted is not None:
        headers.append((b"access-control-allow-headers", wanted))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _sharing(send: Send, allowed: bytes) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [pair for pair in message["headers"] if not pair[0].startswith(b"access-control-")]
            message["headers"] = [*own, *_share_headers(allowed), (b"access-control-expose-headers", EXPOSED)]
        await send(message)

    return sending
