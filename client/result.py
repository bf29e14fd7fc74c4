"""Results of calls: the decoded answer with its bill and timing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Generic, TypeVar

from fleetstart.runtime.contract.call_format import EVENTS, NO_ITEM, Bill, EventReader, decode_value, raise_for
from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER

T = TypeVar("T")
_PHASE = re.compile(r"([\w.-]+)(?:;[^,]*?dur=([\d.]+))?[^,]*(?:,\s*|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[T]):
    """Answer of one call, and what the platform tells about it."""

    value: T
    request_id: str
    version: int = 0
    """Version that answered; 0 if unknown."""
    start: str = ""
    """`hot`, `warm` or `cold`."""
    replayed: bool = False
    """True if it is the stored answer of an earlier call with the same key."""
    bill: Bill | None = None
    """None for an answer of more than 1 MiB, which has begun before its bill is known; `fs trace` has it."""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """The phases of Server-Timing."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def result_of(name: str, status: int, headers: Mapping[str, str], body: bytes, returns: Any) -> Result[Any]:
    """Decodes a response. Errors: the platform's, HandlerResponse, InvalidOutput."""
    raise_for(name, status, headers, body)
    if headers.get("content-type", "").startswith(EVENTS):
        reader = EventReader(name, returns)
        read = [*reader.feed(body), *reader.end()]
        value: Any = [item for item, _ in read if item is not NO_ITEM]
        bill = reader.bill
    else:
        value = decode_value(name, headers.get("content-type", ""), body, returns)
        bill = _bill(headers.get("fs-billed-ms", ""), headers.get("fs-cost", ""))
    version = headers.get("fs-version", "")
    return Result(
        value=value,
        request_id=headers.get(REQUEST_HEADER, ""),
        version=int(version) if version.isdecimal() else 0,
        start=headers.get("fs-start", ""),
        replayed=headers.get("idempotent-replayed") == "true",
        bill=bill,
        phases_ms=server_timing(headers.get("server-timing", "")),
        status=status,
        headers=dict(headers),
    )


def server_timing(text: str) -> dict[str, float]:
    """Parses Server-Timing into milliseconds by phase."""
    return {name: float(dur) for name, dur in _PHASE.findall(text) if dur}


def _bill(billed_ms: str, cost: str) -> Bill | None:
    try:
        return Bill(billed_ms=int(billed_ms), cost=Decimal(cost))
    except (ValueError, InvalidOperation):
        return None
