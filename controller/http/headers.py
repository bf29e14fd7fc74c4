"""Which headers pass through the gateway, and which it writes itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fleetstart.runtime.contract.worker_headers import (
    ATTEMPT_HEADER,
    BUSY_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    PROGRESS_HEADER,
    TOKEN_HEADER,
)

from .confining import confined

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
OWN_REQUEST = frozenset(
    (
        TOKEN_HEADER,
        DEADLINE_HEADER,
        CONTINUE_HEADER,
        ATTEMPT_HEADER,
        PROGRESS_HEADER,
        "x-request-id",
        "fs-timeout-s",
        "fs-queue-timeout-s",
        "content-length",
        "expect",
    )
)
"""Replaced or consumed by the gateway on the way in."""
OWN_RESPONSE = frozenset(
    ("x-request-id", "fs-version", "fs-start", "fs-billed-ms", "fs-cost", "date", "server",
     TOKEN_HEADER, BUSY_HEADER, DRAINING_HEADER, CONTINUE_HEADER)
)  # fmt: skip
"""A handler cannot write what the platform says of itself."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

_DROP_REQUEST = HOP_BY_HOP | OWN_REQUEST
_DROP_RESPONSE = frozenset(name.encode() for name in HOP_BY_HOP | OWN_RESPONSE)


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """What the worker gets of the client's headers (ASGI: names are lower case)."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == "connection" for part in value.split(",")}
    return [(name, value) for name, value in pairs if name not in _DROP_REQUEST and name not in named]


def response_headers(raw: Iterable[tuple[bytes, bytes]], *, keep_length: bool) -> list[tuple[bytes, bytes]]:
    """What the client gets of the worker's headers."""
    pairs = [(name.lower(), value) for name, value in raw]
    return confined(
        [
            (name, value)
            for name, value in pairs
            if name not in _DROP_RESPONSE and (keep_length or name != b"content-length")
        ]
    )


def sane_request_id(value: bytes | None) -> str | None:
    """The client's own id if it can stand in keys, logs and headers."""
    text = value.decode("latin-1") if value else ""
    return text if _REQUEST_ID.fullmatch(text) else None


def queue_timeout_s(value: bytes | None, limit_s: float | None) -> float | None:
    """How long the call may wait for a worker: 0 is not at all, None as long as its deadline allows."""
    try:
        asked_s = float(value) if value else None
    except ValueError:
        return limit_s
    if asked_s is None or not asked_s >= 0:
        return limit_s
    return asked_s if limit_s is None else min(asked_s, limit_s)


def timeout_s(value: bytes | None, limit_s: float) -> float:
    """The call's own limit, never above the function's. A header that is no positive number is ignored."""
    try:
        asked_s = float(value) if value else limit_s
    except ValueError:
        return limit_s
    return min(asked_s, limit_s) if asked_s > 0 else limit_s
