"""Readiness of a controller, for load balancers: why calls should go to another one. Pure.

Hot functions are served without Redis too, so a controller that is not ready still answers what reaches it. The
reasons are for strangers as well, and name nothing of the system; `fs status` has the errors.
"""

from __future__ import annotations

from .view import View

STALE_NS = 5_000_000_000
"""Age of a view, or of the last write, that is too much: both are renewed once a second, and a busy machine is late."""


def problems(view: View, *, stopping: bool, now_ns: int) -> list[str]:
    """The reasons; empty if it is ready."""
    if stopping:
        return ["it is shutting down"]
    if not view.synced:
        return ["Redis has not been read yet"]
    found = []
    if view.redis != "ok":
        found.append("Redis cannot be read")
    if now_ns - view.synced_ns > STALE_NS:
        found.append(f"what it knows is {(now_ns - view.synced_ns) // 1_000_000_000} s old")
    if now_ns - view.written_ns > STALE_NS:
        found.append("Redis takes no writes")
    return found
