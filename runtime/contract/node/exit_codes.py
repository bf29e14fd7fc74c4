"""Exit codes of a worker, for the daemon that reaps it. A negative status is the signal that ended it."""

from __future__ import annotations

DRAINED = 0
"""The worker was drained, and finished its calls."""
START_FAILED = 1
"""The start failed; the reason was sent in a `StartError` if it could be."""
OVERRUN = 86
"""A call overran its deadline and would not end: the worker ended itself to free the slot. The log names the call."""
RANK_LOST = 88
"""A process of a tensor-parallel group ended, and so does the group: the log says which one and why."""
ORPHANED = 87
"""The control socket was closed: the daemon is gone, or has ended the worker."""
