"""Call with an idempotency key: where it runs, for a gateway that goes on with another one's call.

The layer for idempotency leaves it in the scope; the gateway's dispatch goes by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import InvocationId, Version, WorkerId

KEYED_CALL = "fs.keyed"
"""Scope key of the `KeyedCall` of a call with an idempotency key."""


class NotAttached(Exception):
    """A call could not be gone on with at its worker, and nothing was sent. What became of it is not known here: its
    row is another's, and the client's answer has an id and a row of its own.

    `error`: what the client is told; None if the worker never had the call, which may run.
    """

    def __init__(self, error: FleetError | None) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedCall:
    sent_to: Callable[[WorkerId, Version, float], Awaitable[None]]
    """To be awaited before it is sent to a worker, with the seconds that it has left."""
    worker: WorkerId | None = None
    """The worker that runs it already; None for a call that has not run."""
    invocation: InvocationId | None = None
    """The id under which that worker has it: this call's own, unless that one's row is written."""
    version: Version | None = None
    """The version of that worker."""
    gateway: str = ""
    """The gateway that sent it to that worker."""
    lost: FleetError | None = None
    """The error to answer with: another call with its key was lost, and may have run."""
    resumed: bool = False
    """Its client has a part of the answer: it cannot run again."""
    partial: bool = False
    """What that worker has is not the beginning of its stream: another one had that."""
