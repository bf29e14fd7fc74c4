"""Decision how a stream whose connection broke is gone on with: after its last event, by its idempotency key."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import httpx

from fleetstart.runtime.contract.call_format import EventReader

from .request import CallRequest
from .retry import RetryPolicy
from .transport import BROKEN, broken_off


class Resumption:
    """State of one stream over its connections. The time of the call bounds all of them together."""

    def __init__(self, call: CallRequest, reader: EventReader, policy: RetryPolicy) -> None:
        self._call = call
        self._reader = reader
        self._policy = policy
        self._ends_s = time.monotonic() + call.timeout_s
        self._breaks = 0
        """Breaks since the last event that came."""
        self._read = 0

    def request(self) -> CallRequest:
        """The call at first; then the rest of its stream."""
        if not self._reader.last_id:
            return self._call
        headers = {**self._call.headers, "last-event-id": self._reader.last_id}
        return replace(self._call, headers=headers, timeout_s=max(0.001, self._ends_s - time.monotonic()))

    def after_break(self, error: httpx.TransportError, *, is_stream: bool) -> float:
        """Seconds until the rest is asked for. Errors: WorkerLost or DeadlineExceeded if it cannot be."""
        if self._reader.read > self._read:
            self._read, self._breaks = self._reader.read, 0
        unnumbered = self._reader.read > 0 and not self._reader.last_id
        left_s = self._ends_s - time.monotonic()
        pause_s = None
        if self._call.repeatable and isinstance(error, BROKEN) and is_stream and not unnumbered:
            pause_s = self._policy.pause_s(self._breaks, asked_s=0.0, left_s=left_s, jitter=random.random())
        if pause_s is None:
            raise broken_off(error, self._call.name) from error
        self._breaks += 1
        self._reader.restart()
        return pause_s
