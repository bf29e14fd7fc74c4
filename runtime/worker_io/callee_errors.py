"""Errors of functions that a handler called: raised in the handler by their own types, and the handler's fault outside.

A callee that does not exist, or is busy, is no "not found" and no "try again" to the client that called the caller: its
own call failed in the handler.
"""

from __future__ import annotations

from typing import TypeVar

from ..contract.errors import FleetError, HandlerFailed

Kind = TypeVar("Kind", bound=FleetError)
_MARK = "callee"


def mark_callee(error: Kind, function: str) -> Kind:
    """Notes in an error which function it is of."""
    vars(error)[_MARK] = function
    return error


def as_seen_outside(error: FleetError) -> FleetError:
    """The error for the handler's own client, if the handler let this one pass."""
    callee = vars(error).get(_MARK, "")
    if not callee:
        return error
    return HandlerFailed(f"its call of function {callee} failed with {error.code}: {error.message}", hint=error.hint)
