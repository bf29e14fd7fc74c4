"""Which calls are under way in a worker: its slots, its busy time, its overrun deadlines.

Plain values and `now_ns` go in, decisions come out; `server` and `watchdog` carry them out. The watchdog
reads from its own thread, so the table of calls is only ever replaced in single steps that the
interpreter's lock makes whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.node.messages import Usage
from ..contract.node.speed import Speed


@dataclass(frozen=True, slots=True)
class RunningCall:
    """One call under way. `ends_ns` is when its caller stops waiting; 0 if it never does."""

    request: str
    started_ns: int
    ends_ns: int


class Meter:
    """The calls of one worker. `busy_ns` is the time with at least one of them under way."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.draining = False
        self._calls: dict[int, RunningCall] = {}
        self._begun = 0
        self._busy_before_ns = 0
        self._busy_since_ns = 0
        self._speed: Speed | None = None

    @property
    def running(self) -> int:
        return len(self._calls)

    def begin(self, request: str, now_ns: int, timeout_ns: int | None) -> int | Literal["draining", "busy"]:
        """A number to `end` the call with, or why it is not taken."""
        if self.draining:
            return "draining"
        if len(self._calls) >= self.slots:
            return "busy"
        if not self._calls:
            self._busy_since_ns = now_ns
        self._begun += 1
        self._calls[self._begun] = RunningCall(request, now_ns, now_ns + timeout_ns if timeout_ns is not None else 0)
        return self._begun

    def end(self, number: int, now_ns: int) -> None:
        call_s = (now_ns - self._calls.pop(number).started_ns) / 1e9
        self._speed = Speed(calls=1, call_s=call_s, prefill_s=call_s).folded_into(self._speed)
        if not self._calls:
            self._busy_before_ns += now_ns - self._busy_since_ns

    def usage(self, now_ns: int) -> Usage:
        busy_ns = self._busy_before_ns + (now_ns - self._busy_since_ns if self._calls else 0)
        return Usage(calls=self._begun, running=len(self._calls), busy_ns=busy_ns, speed=self._speed)

    def overrun(self, now_ns: int, grace_ns: int) -> RunningCall | None:
        """The call that should have ended longest ago, if that is more than `grace_ns` ago."""
        late = [call for call in tuple(self._calls.values()) if call.ends_ns and now_ns > call.ends_ns + grace_ns]
        return min(late, key=lambda call: call.ends_ns, default=None)
