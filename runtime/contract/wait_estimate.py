"""Wait estimates: the predicted wait of a call with the figures behind it, sent to the caller with a rejection."""

from __future__ import annotations

import msgspec


class PendingStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that is starting, or the stages of one that start together."""

    ready_s: float
    """Time from now until it is expected to be ready."""
    slots: int = 1
    """Calls that it will serve concurrently."""
    fetched_bytes: int = 0
    """Fetched part of the weights that it needs before it is ready."""
    weight_bytes: int = 0
    bytes_per_s: float = 0.0
    """Observed fetch rate, or the planner's prediction until there are two reports; 0 if nothing is missing."""


class WaitEstimate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The predicted wait of a call that is accepted now, with the figures that it follows from."""

    seconds: float
    queued: int = 0
    """Calls ahead of it, over all gateways."""
    slots: int = 0
    """Concurrent calls of all ready workers together."""
    running: int = 0
    """Slots in use."""
    call_s: float = 0.0
    """Measured mean time that a call keeps its slot."""
    coming: list[PendingStart] = []
