"""What the handlers of `keys_api`, `projects_api` and `secrets_api` share: who asks, bodies, answers."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.controller.access.decide import Caller, local
from fleetstart.controller.access.door import CALLER, DEED, Deed
from fleetstart.runtime.contract.errors import InvalidInput, TooLarge

BODY_MAX_BYTES = 256 * 1024

Kind = TypeVar("Kind", bound=msgspec.Struct)


def caller_of(request: Request) -> Caller:
    """Whoever the door let in; local where there is no door, as in a test of one API."""
    found = request.scope.get(CALLER)
    return found if isinstance(found, Caller) else local(lambda function: None)


def about(request: Request, name: str) -> None:
    """Tells the audit log what a request is about if its path does not."""
    deed = request.scope.get(DEED)
    if isinstance(deed, Deed):
        deed.name = name


async def body_of(request: Request, kind: type[Kind]) -> Kind:
    """Errors: InvalidInput, TooLarge. What the body says is in neither."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX_BYTES:
            raise TooLarge(f"a {kind.__name__} has {BODY_MAX_BYTES} bytes at most")
    try:
        return msgspec.json.decode(bytes(body or b"{}"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is no {kind.__name__}: {error}") from error


def answer(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000
