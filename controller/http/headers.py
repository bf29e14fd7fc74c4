"""Headers that pass through the gateway, headers that it replaces, and the sandbox of responses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fleetstart.runtime.contract.worker_headers import (
    ATTEMPT_HEADER,
    BUSY_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    DEPTH_HEADER,
    DRAINING_HEADER,
    END_HEADER,
    ENTERED_HEADER,
    GRANT_HEADER,
    LINK_HEADER,
    LINK_LIMIT_HEADER,
    PROGRESS_HEADER,
    ROOT_PATH_HEADER,
    STREAM_HEADER,
    TOKEN_HEADER,
)

from .asgi import Scope

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
FORWARDED = ("x-forwarded-for", "x-forwarded-proto")
"""Told to handlers by the gateway alone: a client could forge them. What a trusted proxy says is in `client` and
`scheme` of the scope by now."""
OWN_REQUEST = frozenset(
    (
        TOKEN_HEADER,
        DEADLINE_HEADER,
        CONTINUE_HEADER,
        ATTEMPT_HEADER,
        PROGRESS_HEADER,
        ROOT_PATH_HEADER,
        STREAM_HEADER,
        END_HEADER,
        *FORWARDED,
        GRANT_HEADER,
        LINK_HEADER,
        LINK_LIMIT_HEADER,
        DEPTH_HEADER,
        "x-request-id",
        "fs-timeout-s",
        "fs-queue-timeout-s",
        "content-length",
        "expect",
    )
)
"""Replaced or consumed by the gateway on the way in."""
OWN_RESPONSE = frozenset(
    ("x-request-id", "fs-version", "fs-start", "fs-attempts", "fs-billed-ms", "fs-cost", "date", "server",
     "fs-error-message", "fs-error-hint", "idempotent-replayed", "idempotent-retaken",
     TOKEN_HEADER, BUSY_HEADER, DRAINING_HEADER, CONTINUE_HEADER, STREAM_HEADER, ENTERED_HEADER)
)  # fmt: skip
"""Written by the platform alone: a handler's are dropped."""
WHOLE_ORIGIN = frozenset(
    ("strict-transport-security", "alt-svc", "nel", "report-to", "reporting-endpoints", "clear-site-data", "expect-ct",
     "public-key-pins", "service-worker-allowed", "x-accel-redirect", "x-accel-limit-rate", "x-accel-expires",
     "x-sendfile", "x-lighttpd-send-file", "x-reproxy-url")
)  # fmt: skip
"""Act on the whole host, which functions share with each other and with the dashboard, or let a reverse proxy answer
with a file of its own: a handler's are dropped."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

_DROP_REQUEST = HOP_BY_HOP | OWN_REQUEST
_DROP_RESPONSE = frozenset(name.encode() for name in HOP_BY_HOP | OWN_RESPONSE | WHOLE_ORIGIN)


def request_headers(scope: Scope) -> list[tuple[str, str]]:
    """The client's headers that are sent to the worker, and where it called from (ASGI: names are lower case)."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    kept = [(name, value) for name, value in pairs if name not in _DROP_REQUEST and name not in named]
    if (client := scope.get("client")) is not None:
        secure = scope["scheme"] in ("https", "wss")
        kept += zip(FORWARDED, (str(client[0]), "https" if secure else "http"), strict=True)
    return kept


def response_headers(raw: Iterable[tuple[bytes, bytes]], *, root: str, keep_length: bool) -> list[tuple[bytes, bytes]]:
    """The worker's headers that are sent to the client. `root`: the function's part of the path, such as `/fn/web`."""
    passed = _passed(raw, root)
    return sandboxed([pair for pair in passed if keep_length or pair[0] != b"content-length"])


def accept_headers(raw: Iterable[tuple[bytes, bytes]], *, root: str) -> list[tuple[bytes, bytes]]:
    """Headers with which an app accepts a WebSocket, as its client gets them: each side has a handshake of its own."""
    return [pair for pair in _passed(raw, root) if not pair[0].startswith(b"sec-websocket-")]


def _passed(raw: Iterable[tuple[bytes, bytes]], root: str) -> list[tuple[bytes, bytes]]:
    pairs = [(name.lower(), value) for name, value in raw]
    return [
        (name, scoped_cookie(value, root.encode()) if name == b"set-cookie" else value)
        for name, value in pairs
        if name not in _DROP_RESPONSE
    ]


def scoped_cookie(cookie: bytes, root: bytes) -> bytes:
    """A Set-Cookie value whose cookie browsers send to the function below `root` alone: functions share a host."""
    pair, *attributes = (part.strip() for part in cookie.split(b";"))
    path, kept = b"/", []
    for attribute in attributes:
        name, _, value = attribute.partition(b"=")
        name = name.strip().lower()
        if name == b"path" and value.strip().startswith(b"/"):
            path = value.strip()
        elif name not in (b"path", b"domain"):
            kept.append(attribute)
    if path != root and not path.startswith(root + b"/"):
        path = root + path.rstrip(b"/")
    return b"; ".join((pair, *kept, b"Path=" + path))


def valid_request_id(value: bytes | None) -> str | None:
    """A request id that is valid in keys, logs and headers; else None."""
    text = value.decode("latin-1") if value else ""
    return text if _REQUEST_ID.fullmatch(text) else None


CALL_MAX_S = 86_400.0
"""No call lasts longer, so one that may wait for longer waits until its deadline."""


def queue_timeout_s(value: bytes | None, limit_s: float | None) -> float | None:
    """The call's queue timeout: 0 is no wait, None until its deadline."""
    try:
        asked_s = float(value) if value else None
    except ValueError:
        return limit_s
    if asked_s is None or not asked_s >= 0:
        return limit_s
    return min(asked_s, CALL_MAX_S if limit_s is None else limit_s)


def timeout_s(value: bytes | None, limit_s: float) -> float:
    """The call's own limit, never above the function's. A header that is no positive number is ignored."""
    try:
        asked_s = float(value) if value else limit_s
    except ValueError:
        return limit_s
    return min(asked_s, limit_s) if asked_s > 0 else limit_s


RawHeaders = list[tuple[bytes, bytes]]

SANDBOX = b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
_JSON = [b"application/json"]
_NOSNIFF = b"x-content-type-options"
_INERT = frozenset((b"application/json", b"application/octet-stream", b"application/pdf", b"text/event-stream",
                    b"text/plain", b"text/csv", b"application/x-ndjson", b"application/zip"))  # fmt: skip
"""Content types that no browser runs as long as it does not sniff; all others are sandboxed."""
_INERT_KINDS = (b"image/", b"audio/", b"video/", b"font/")
_TOKEN = rb"[\w!#$%&'*+.^`|~-]+"
_ONE_TYPE = re.compile(rb"\s*(%b/%b)\s*(?:;\s*(?:%b=(?:%b|\"[^\",\\]*\")\s*)?)*" % (_TOKEN, _TOKEN, _TOKEN, _TOKEN))
"""One type and its parameters. Browsers take a header with a comma for several, wherever it stands, and the last one
that they know counts."""


def sandboxed(headers: RawHeaders) -> RawHeaders:
    """Adds the sandbox headers to a response's, which are lower case."""
    kinds = [value for name, value in headers if name == b"content-type"]
    own = [pair for pair in headers if pair[0] != _NOSNIFF]
    own.append((_NOSNIFF, b"nosniff"))
    if kinds != _JSON and (len(kinds) != 1 or not _is_inert(kinds[0])):
        own.append((b"content-security-policy", SANDBOX))
    return own


def _is_inert(content_type: bytes) -> bool:
    found = _ONE_TYPE.fullmatch(content_type)
    if found is None:
        return False
    kind = found[1].lower()
    return kind in _INERT or (kind.startswith(_INERT_KINDS) and not kind.endswith(b"xml"))
