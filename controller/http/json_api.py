"""Helpers of the management API's handlers: JSON bodies, query parameters, JSON responses, the time of day."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError, InvalidInput, TooLarge

Kind = TypeVar("Kind")

BODY_MAX_BYTES = 64 * 1024
"""Usually: what people write by hand is far smaller."""


async def json_body(
    request: Request,
    kind: type[Kind],
    *,
    empty: bytes = b"",
    limit_bytes: int = BODY_MAX_BYTES,
    error: type[FleetError] = InvalidInput,
) -> Kind:
    """The body as that type; `empty` stands for none. What the body says is in no error.

    Errors: TooLarge; `error` for what does not fit.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLarge(f"{request.url.path} takes {limit_bytes} bytes at most")
    try:
        return msgspec.json.decode(bytes(body or empty), type=kind)
    except UNDECODABLE as wrong:
        raise error(f"{request.url.path}: the body is not understood: {wrong}") from wrong


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json", headers=headers)


class PlacedResponse(StreamingResponse):
    """A streaming response that holds a place among those of its kind, from its first byte to its last."""

    def __init__(self, content: AsyncIterator[bytes], place: AbstractContextManager[None], **response: Any) -> None:
        super().__init__(content, **response)
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)


def query_int(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise InvalidInput(f"{name}={text[:40]!r} must be a whole number, 0 or more")
    return min(int(text), most)


def query_flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "0") not in ("", "0", "false")


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000
