"""Format of calls and their answers, for whoever calls a function: the Python client, and handlers that call others.

An input is bytes, or JSON. An answer is JSON, text or bytes; an event stream gives items. A response with ERROR_HEADER
is an error of the platform, any other of 400 or more the handler's own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .decoding import UNDECODABLE
from .errors import ErrorBody, ErrorInfo, FleetError, InvalidOutput, error_from
from .sse import BILL_EVENT, EventParser, ServerSentEvent
from .worker_headers import ERROR_HEADER, REQUEST_HEADER

NOTHING: Any = object()
"""Stands for an input that was not given: None is JSON's null."""
NO_ITEM: Any = object()
"""In place of an item, beside an event that is none."""
JSON = "application/json"
BYTES = "application/octet-stream"
EVENTS = "text/event-stream"
SHOWN_CHARS = 200
"""How much of an input or of a body an error shows."""
_ONE_AT_A_TIME = threading.Lock()
"""Held while a decoder is made: msgspec crashes where two threads make the first ones of a type."""


class HandlerResponse(FleetError):
    """The handler itself answered with an HTTP status of 400 or more; `status`, `headers` and `body` are its own."""

    code = "handler_response"

    def __init__(self, message: str, *, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(message)
        vars(self)["status"] = status
        self.headers = headers
        self.body = body


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Bill of one call."""

    billed_ms: int
    cost: Decimal
    """In dollars."""


_BILL = msgspec.json.Decoder(Bill)


def encode_input(input: Any, arguments: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """Body and content type: bytes as they are, everything else as JSON. Errors: TypeError."""
    if arguments and input is not NOTHING:
        raise TypeError("give the input as one value or as keyword arguments, not both")
    if input is NOTHING:
        if not arguments:
            return None, ""
        input = dict(arguments)
    if isinstance(input, bytes | bytearray | memoryview):
        return bytes(input), BYTES
    try:
        return msgspec.json.encode(input), JSON
    except (TypeError, ValueError) as error:
        raise TypeError(f"the input cannot be sent as JSON: {error}; give bytes, or values that JSON has") from error


def raise_for(name: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Raises the error of a response of 400 or more. Errors: the platform's, HandlerResponse."""
    if headers.get(ERROR_HEADER):
        raise decode_error(status, body)
    if status >= 400:
        shown = body[:SHOWN_CHARS].decode(errors="replace").strip()
        message = f"function {name} answered HTTP {status}: {shown or 'an empty body'}"
        raise HandlerResponse(message, status=status, headers=dict(headers), body=body)


def redirect_of(status: int, headers: Mapping[str, str]) -> str:
    """Server to which one in front of the platform sends its callers, as a proxy that speaks TLS alone does; empty for
    every answer of the platform, and of its functions."""
    if status not in (301, 302, 303, 307, 308) or headers.get(REQUEST_HEADER):
        return ""
    to = urlsplit(headers.get("location", ""))
    return f"{to.scheme}://{to.netloc}" if to.scheme and to.netloc else ""


_ERROR = msgspec.json.Decoder(ErrorBody)
"""Made once, at import, as is that of bills: msgspec crashes where two threads are the first to decode a type."""


def decode_error(status: int, body: bytes | str) -> FleetError:
    """Builds the error of a platform's response; an unknown code keeps its text."""
    try:
        found = _ERROR.decode(body)
    except UNDECODABLE:
        text = body[:SHOWN_CHARS].decode(errors="replace") if isinstance(body, bytes) else body[:SHOWN_CHARS]
        info = ErrorInfo(code="not_found" if status == 404 else "internal", message=f"HTTP {status}: {text.strip()}")
        return error_from(info)
    error = error_from(found.error)
    if error.code != found.error.code:  # of a part of the server, which has no class here
        vars(error).update(code=found.error.code, status=status)
    return explain(error, found.request_id)


def explain(error: FleetError, request_id: str) -> FleetError:
    """Adds to tracebacks what the message does not say."""
    for name, text in (("hint", error.hint), ("request", request_id)):
        if text:
            error.add_note(f"{name}: {text}")
    return error


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder to a type of the caller's, whose calls may be answered in several threads at once."""
    with _ONE_AT_A_TIME:
        return msgspec.json.Decoder(kind)


def decode_value(name: str, content_type: str, body: bytes, returns: Any) -> Any:
    """Decodes an answer: JSON to `returns`, text to str, everything else to bytes. Errors: InvalidOutput."""
    kind = content_type.partition(";")[0].strip().lower()
    if returns is bytes:
        return body
    try:
        if kind == JSON or kind.endswith("+json"):
            return decoder_of(returns).decode(body)
        value = body.decode() if kind.startswith("text/") else body if body or kind else None
        if returns is Any:
            return value
        decoder_of(returns)
        return msgspec.convert(value, returns)
    except UNDECODABLE as error:
        raise InvalidOutput(
            f"the answer of function {name}, {len(body):,} bytes of {kind or 'no type'}, does not fit "
            f"`returns={_named(returns)}`: {error}"
        ) from error


def _named(kind: Any) -> str:
    """The type as it is written in code."""
    return kind.__name__ if type(kind) is type else str(kind)


class EventReader:
    """Decoder of a stream of events: gives its items, keeps its bill, raises the error that it ends with."""

    def __init__(self, name: str, returns: Any) -> None:
        self._name = name
        self._returns = returns
        self._parser = EventParser()
        self.bill: Bill | None = None
        self.read = 0
        """Number of events that were read."""
        self.last_id = ""
        """Id of the last event that was read: what `Last-Event-ID` continues after."""

    def restart(self) -> None:
        """Drops an event that has not ended: the stream is sent again after the last one that has."""
        self._parser = EventParser()

    def feed(self, block: bytes) -> list[tuple[Any, ServerSentEvent]]:
        """Takes a block of the stream; returns the items in it, each with its event.

        Errors: the platform's, InvalidOutput.
        """
        return [read for event in self._parser.feed(block) for read in self._read(event)]

    def end(self) -> list[tuple[Any, ServerSentEvent]]:
        event = self._parser.end()
        return self._read(event) if event else []

    def _read(self, event: ServerSentEvent) -> list[tuple[Any, ServerSentEvent]]:
        self.read += 1
        self.last_id = event.id
        if event.name == "error":
            raise decode_error(500, event.data)
        if event.name == BILL_EVENT:
            self.bill = _BILL.decode(event.data)
        elif event.name == "progress":
            return [(NO_ITEM, event)]
        elif event.data != "[DONE]":  # how streams in OpenAI's format end
            return [(self._item(event.data), event)]
        return []

    def _item(self, data: str) -> Any:
        try:
            return decoder_of(self._returns).decode(data)
        except msgspec.ValidationError as error:
            raise InvalidOutput(
                f"an item of function {self._name} does not fit `returns={_named(self._returns)}`: {error}"
            ) from error
        except UNDECODABLE:
            return data  # an app's own stream, whose events are text
