"""Call with an idempotency key: where it runs, for a gateway that goes on with another one's call.

The layer for idempotency leaves it in the scope; the gateway's dispatch goes by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import Version, WorkerId

KEYED_CALL = "fs.keyed"
"""Scope key of the `KeyedCall` of a call with an idempotency key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedCall:
    sent_to: Callable[[WorkerId, Version, float], Awaitable[None]]
    """To be awaited before it is sent to a worker, with the seconds that it has left."""
    worker: WorkerId | None = None
    """The worker that runs it already; None for a call that has not run."""
    version: Version | None = None
    """The version of that worker."""
    resumed: bool = False
    """Its client has a part of the answer: it cannot run again."""
    partial: bool = False
    """What that worker has is not the beginning of its stream: another one had that."""
