"""Exit codes of a worker, for the daemon that reaps it. A negative status is the signal that ended it."""

from __future__ import annotations

DRAINED = 0
"""It finished its calls because it was asked to."""
START_FAILED = 1
"""It said why in a `StartError`, unless it could not."""
OVERRUN = 86
"""A call overran its deadline and would not end: the worker ended itself to free the slot. The log names the call."""
ORPHANED = 87
"""Its control socket ended: the daemon is gone, or wants it gone."""
