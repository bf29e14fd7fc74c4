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
    while True:
        if poll.poll(tick_ms):
            end_process(exit_codes.ORPHANED)
        call = meter.overrun(time.monotonic_ns(), grace_ns)
        if call is not None:
            _log_overrun(call)
            end_process(exit_codes.OVERRUN)


def end_process(code: int) -> NoReturn:
    """Ends the process at once. A handler may hold any lock, so nothing is joined and no stream is flushed:
    the log streams are line-buffered, so that at most an unfinished line is lost."""
    os._exit(code)


def _log_overrun(call: RunningCall) -> None:
    now_ns = time.monotonic_ns()
    text = (
        f"call {call.request} ran {(now_ns - call.started_ns) / 1e9:.1f} s and is {(now_ns - call.ends_ns) / 1e9:.1f} s"
        " past its deadline: this worker ends, because the call holds its slot and cannot be stopped\n"
    )
    os.write(2, text.encode())
