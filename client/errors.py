"""Errors that calls raise: those of the platform by their codes, and a few of the client's own.

All are FleetErrors: `code`, `status`, `message`, `hint`, `retryable`. A traceback shows the hint and the request's id.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import (
    BudgetSpent,
    ChecksumMismatch,
    DeadlineExceeded,
    ErrorBody,
    ErrorInfo,
    FleetError,
    Forbidden,
    HandlerFailed,
    InvalidInput,
    InvalidOutput,
    NotFound,
    OutOfMemory,
    Overloaded,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
    RateLimited,
    Refused,
    StartFailed,
    StoreFailed,
    TooLarge,
    Unauthorized,
    Unavailable,
    WorkerLost,
    error_from,
)

__all__ = [
    "BudgetSpent",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "FleetError",
    "Forbidden",
    "HandlerFailed",
    "HandlerResponse",
    "InputFailed",
    "InvalidInput",
    "InvalidOutput",
    "NotFound",
    "OutOfMemory",
    "Overloaded",
    "QueueFull",
    "QueueTimeout",
    "QuotaExceeded",
    "RateLimited",
    "Refused",
    "StartFailed",
    "StoreFailed",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
    "WorkerLost",
]

SHOWN_CHARS = 200
"""How much of an input or of a body an error shows."""


class Unreachable(Unavailable):
    """No server answered at the URL."""

    code = "unreachable"


class HandlerResponse(FleetError):
    """The handler itself answered with an HTTP status of 400 or more; `status`, `headers` and `body` are its own."""

    code = "handler_response"

    def __init__(self, message: str, *, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(message)
        vars(self)["status"] = status
        self.headers = headers
        self.body = body


class InputFailed(FleetError):
    """The call of one input of a `map` failed; its error is the `__cause__`."""

    def __init__(self, index: int, input: Any, error: FleetError) -> None:
        shown = repr(input)
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}…"
        super().__init__(f"input {index}, {shown}: {error.message}", hint=error.hint, retry_after_s=error.retry_after_s)
        vars(self).update(code=error.code, status=error.status, retryable=error.retryable)
        self.index = index
        self.input = input
        self.__cause__ = error
        _explain(self, "")


def decode_error(status: int, body: bytes | str) -> FleetError:
    """Builds the error of a platform's response; an unknown code keeps its text."""
    try:
        found = msgspec.json.decode(body, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:SHOWN_CHARS].decode(errors="replace") if isinstance(body, bytes) else body[:SHOWN_CHARS]
        info = ErrorInfo(code="not_found" if status == 404 else "internal", message=f"HTTP {status}: {text.strip()}")
        return error_from(info)
    error = error_from(found.error)
    if error.code != found.error.code:  # of a part of the server, which has no class here
        vars(error).update(code=found.error.code, status=status)
    return _explain(error, found.request_id)


def _explain(error: FleetError, request_id: str) -> FleetError:
    """Adds to tracebacks what the message does not say."""
    for name, text in (("hint", error.hint), ("request", request_id)):
        if text:
            error.add_note(f"{name}: {text}")
    return error
