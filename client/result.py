"""Results of calls: the decoded answer with its bill and timing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Generic, TypeVar

import msgspec

from fleetstart.runtime.contract.errors import InvalidOutput
from fleetstart.runtime.contract.sse import BILL_EVENT, EventParser, ServerSentEvent
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER, REQUEST_HEADER

from .errors import SHOWN_CHARS, HandlerResponse, decode_error

T = TypeVar("T")
EVENTS = "text/event-stream"
_PHASE = re.compile(r"([\w.-]+)(?:;[^,]*?dur=([\d.]+))?[^,]*(?:,\s*|$)")


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Bill of one call."""

    billed_ms: int
    cost: Decimal
    """In dollars."""


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
    """Whether it is the stored answer of an earlier call with the same key."""
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


def raise_for(name: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Raises the error of a response of 400 or more. Errors: the platform's, HandlerResponse."""
    if headers.get(ERROR_HEADER):
        raise decode_error(status, body)
    if status >= 400:
        shown = body[:SHOWN_CHARS].decode(errors="replace").strip()
        message = f"function {name} answered HTTP {status}: {shown or 'an empty body'}"
        raise HandlerResponse(message, status=status, headers=dict(headers), body=body)


def decode_value(name: str, content_type: str, body: bytes, returns: Any) -> Any:
    """Decodes an answer: JSON to `returns`, text to str, everything else to bytes. Errors: InvalidOutput."""
    kind = content_type.partition(";")[0].strip().lower()
    if returns is bytes:
        return body
    try:
        if kind == "application/json" or kind.endswith("+json"):
            return msgspec.json.decode(body, type=returns)
        value = body.decode() if kind.startswith("text/") else body if body or kind else None
        return value if returns is Any else msgspec.convert(value, returns)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidOutput(
            f"function {name} answered {len(body):,} bytes of {kind or 'no type'} that are no {returns}: {error}"
        ) from error


class EventReader:
    """Decoder of a stream of events: gives its items, keeps its bill, raises the error that it ends with."""

    def __init__(self, name: str, returns: Any) -> None:
        self._name = name
        self._returns = returns
        self._parser = EventParser()
        self.bill: Bill | None = None

    def feed(self, block: bytes) -> list[tuple[Any, ServerSentEvent]]:
        """Takes a block of the stream; returns the items in it, each with its event.

        Errors: the platform's, InvalidOutput.
        """
        return [read for event in self._parser.feed(block) for read in self._read(event)]

    def end(self) -> list[tuple[Any, ServerSentEvent]]:
        event = self._parser.end()
        return self._read(event) if event else []

    def _read(self, event: ServerSentEvent) -> list[tuple[Any, ServerSentEvent]]:
        if event.name == "error":
            raise decode_error(500, event.data)
        if event.name == BILL_EVENT:
            self.bill = msgspec.json.decode(event.data, type=Bill)
        elif event.name == "progress":
            return [(NO_ITEM, event)]
        elif event.data != "[DONE]":  # how streams in OpenAI's format end
            return [(self._item(event.data), event)]
        return []

    def _item(self, data: str) -> Any:
        try:
            return msgspec.json.decode(data, type=self._returns)
        except msgspec.ValidationError as error:
            raise InvalidOutput(f"an item of function {self._name} is no {self._returns}: {error}") from error
        except msgspec.DecodeError:
            return data  # an app's own stream, whose events are text


NO_ITEM: Any = object()
"""In place of an item, beside an event that is none."""


def server_timing(text: str) -> dict[str, float]:
    """Parses Server-Timing into milliseconds by phase."""
    return {name: float(dur) for name, dur in _PHASE.findall(text) if dur}


def _bill(billed_ms: str, cost: str) -> Bill | None:
    try:
        return Bill(billed_ms=int(billed_ms), cost=Decimal(cost))
    except (ValueError, InvalidOperation):
        return None
