"""History of a run: what clients invoked and were told, what handlers did, and which faults there were, in JSON lines.

All times are seconds of one monotonic clock, that of the process that writes the history. An event is written when it
is known, so a history ends at the moment its writer ended, and can be checked up to there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["sync", "keyed", "async", "stream", "probe"]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    at_s: float


class Invoked(Event, frozen=True, tag="invoked"):
    """A request that a client was about to send."""

    call: str
    """Names the request in this history."""
    kind: Kind
    gateway: str
    request: str
    """Its X-Request-Id."""
    ticket: str
    """In its body; the handler writes it down. Requests with one idempotency key have one ticket."""
    key: str = ""
    """Its Idempotency-Key."""
    token: str = ""
    """Name of the API key that it was sent with, if it was not the administrator's."""


class Answered(Event, frozen=True, tag="answered"):
    """The end of a request as its client saw it."""

    call: str
    status: int
    """0: no answer, or a broken one."""
    request: str = ""
    """X-Request-Id of the answer: the earlier call's, if it is replayed."""
    run: int = 0
    """Number of the run that made the answer, as the answer says."""
    ticket: str = ""
    """As the answer says."""
    version: int = 0
    replayed: bool = False
    retaken: bool = False
    """True if the answer says that an earlier run of its key may have had effects."""
    cost: str = ""
    code: str = ""
    """Of the error."""
    text: str = ""
    """Beginning of what was not understood."""


class Streamed(Event, frozen=True, tag="streamed"):
    """What came of a stream, and how it ended."""

    call: str
    expected: list[str]
    got: list[str]
    whole: bool
    """True if it ended as a stream that is complete ends."""
    error: str = ""


class Ran(Event, frozen=True, tag="ran"):
    """A run of the handler, written down by the handler itself before it answers."""

    run: int
    ticket: str
    request: str
    version: int
    attempt: int = 0


class Deployed(Event, frozen=True, tag="deployed"):
    """A version that is live from now on: the deploy was acknowledged."""

    version: int
    function: str


class Revoked(Event, frozen=True, tag="revoked"):
    """An API key whose revocation was acknowledged."""

    token: str


class Led(Event, frozen=True, tag="led"):
    """Who held the scheduler's lease, with which fencing token, as read in one transaction."""

    fence: int
    gateway: str


class Settled(Event, frozen=True, tag="settled"):
    """How an accepted async call stood when the system had come to rest."""

    request: str
    status: str
    """As the API tells it; empty if the call is not known."""
    run: int = 0
    code: str = ""
    """Of the error that it ended with."""
    dead_letter: bool = False
    """True if its runs were lost so often that an operator is to decide."""


class Fault(Event, frozen=True, tag="fault"):
    """A fault that was injected, from `at_s` to `healed_s`."""

    kind: str
    targets: list[str]
    """Hosts and parts that it hit."""
    healed_s: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What the checker reads of a ledger's row of an invocation."""

    id: str
    status: int
    version: int
    cost: str


AnyEvent = Invoked | Answered | Streamed | Ran | Deployed | Revoked | Led | Settled | Fault
_DECODER = msgspec.json.Decoder(AnyEvent)


class Recorder:
    """Writes a history; any thread may."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._lock = threading.Lock()
        self.events: list[AnyEvent] = []

    def write(self, event: AnyEvent) -> None:
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            self.events.append(event)
            if not self._file.closed:
                self._file.write(line)
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def now_s() -> float:
    return round(time.monotonic(), 4)


def decode(lines: Iterable[bytes]) -> list[AnyEvent]:
    """Errors: msgspec.DecodeError, if a line is no event."""
    return [_DECODER.decode(line) for line in lines if line.strip()]
