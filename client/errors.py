"""Errors that calls raise: those of the platform by their codes, and a few of the client's own.

All are FleetErrors: `code`, `status`, `message`, `hint`, `retryable`. A traceback shows the hint and the request's id.
"""

from __future__ import annotations

from typing import Any

from fleetstart.runtime.contract.call_format import SHOWN_CHARS, HandlerResponse, explain
from fleetstart.runtime.contract.errors import (
    BudgetSpent,
    ChecksumMismatch,
    DeadlineExceeded,
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


class Unreachable(Unavailable):
    """No server answered at the URL."""

    code = "unreachable"


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
        explain(self, "")
