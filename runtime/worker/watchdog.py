"""Watchdog thread: ends the worker process if a call overruns its deadline, or if the node is gone and the main
thread is busy.

Either a call overran its deadline and keeps its slot (the gateway has answered 504; a Python thread cannot be stopped
from outside), or the control socket was closed while the main thread was busy in user code. The thread needs no event
loop, so it also covers a loop that a handler blocks.
"""

from __future__ import annotations

import _thread
import os
import select
import time
from typing import NoReturn

from ..contract.node import exit_codes
from .call_gate import Meter, RunningCall

OVERRUN_GRACE_S = 2.0
"""Time past its deadline that a call may run, for a cancelled handler to clean up."""
LATE_NS = 50_000_000
"""Time past its deadline from which a call is said to be late: most that are cancelled have ended by then."""
TICK_S = 1.0
"""Interval of the check. One wake-up a second costs an idle worker about 0.01 % of a core."""


def watch(control_fd: int, meter: Meter, *, grace_s: float = OVERRUN_GRACE_S, tick_s: float = TICK_S) -> None:
    """Starts the thread. It ends the process with `exit_codes.ORPHANED` or `OVERRUN`, or never."""
    arguments = (control_fd, meter, round(grace_s * 1e9), round(tick_s * 1e3))
    # Without threading.Thread: that waits until the thread runs, half a millisecond of every start.
    _thread.start_new_thread(_watch, arguments)


def _watch(control_fd: int, meter: Meter, grace_ns: int, tick_ms: int) -> None:
    poll = select.poll()
    poll.register(control_fd, select.POLLRDHUP)
    told: RunningCall | None = None
    while True:
        if poll.poll(_wait_ms(meter, tick_ms)):
            end_process(exit_codes.ORPHANED)
        call = meter.overrun(time.monotonic_ns(), LATE_NS)
        if call is not None and call is not told:
            told = call
            _log(
                call, f"is past its deadline and still runs: this worker ends in {grace_ns / 1e9:.0f} s unless it stops"
            )
        call = meter.overrun(time.monotonic_ns(), grace_ns)
        if call is not None:
            _log(call, "is past its deadline: this worker ends, because the call holds its slot and cannot be stopped")
            end_process(exit_codes.OVERRUN)


def _wait_ms(meter: Meter, tick_ms: int) -> int:
    """Until the next tick, or until a call is late, if that is sooner."""
    now_ns = time.monotonic_ns()
    ends_ns = meter.next_deadline_ns(now_ns - LATE_NS)
    return tick_ms if ends_ns is None else min(tick_ms, (ends_ns + LATE_NS - now_ns) // 1_000_000 + 1)


def end_process(code: int) -> NoReturn:
    """Ends the process at once. A handler may hold any lock, so nothing is joined and no stream is flushed:
    the log streams are line-buffered, so that at most an unfinished line is lost."""
    os._exit(code)


def _log(call: RunningCall, text: str) -> None:
    os.write(2, f"call {call.request} ran {(time.monotonic_ns() - call.started_ns) / 1e9:.1f} s, {text}\n".encode())
