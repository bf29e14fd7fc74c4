"""Whether calls that wait will ever get a worker, and the error for those that will not.

Decided from the view, a route and `now`; all that is kept, on the route, is since when no node could take a worker.
The gateway asks at the door, and at each change while calls wait.
"""

from __future__ import annotations

from fleetstart.controller.placement import never_fits, place
from fleetstart.controller.pool import broken
from fleetstart.controller.reconcile import Room
from fleetstart.controller.routes import Route
from fleetstart.controller.view import View
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, NotFound, error_from

UNPLACED_NS = 10_000_000_000
"""How long calls wait for a node to have room, or to come back: a restarted node needs a second or two."""


def start_failure(view: View, route: Route, now_unix_ms: int) -> FleetError | None:
    """The error of its starts, if they are given up and there is no worker from before."""
    failure = view.failures.get(route.key)
    if route.workers or failure is None or not broken(failure, now_unix_ms):
        return None
    error = error_from(failure.error)
    error.hint = error.hint or f"`fs logs {route.key.name}` tells more; it is tried again after a minute, or a deploy"
    return error


def hopeless(view: View, route: Route, now_ns: int, now_unix_ms: int) -> tuple[FleetError, int] | None:
    """The error for the calls of the route that were accepted until then, or None: they may wait on."""
    if view.synced and route.key.name not in view.functions:
        return NotFound(f"function {route.key.name} was deleted while the call waited"), now_ns
    error = start_failure(view, route, now_unix_ms)
    if error is not None:
        return error, now_ns
    reason, never = _unplaced(view, route, now_ns)
    if reason is None:
        route.unplaced_since_ns = None
        return None
    if route.unplaced_since_ns is None:
        route.unplaced_since_ns = now_ns
    if never:
        return error_from(reason), now_ns
    if now_ns - route.unplaced_since_ns > UNPLACED_NS:
        return error_from(reason), now_ns - UNPLACED_NS
    return None


def _unplaced(view: View, route: Route, now_ns: int) -> tuple[ErrorInfo | None, bool]:
    """Why no node could take a worker now, if there is none to come; and whether none ever could."""
    if route.workers or view.redis != "ok":
        return None, False
    for order in view.orders.values():
        ours = order.version == route.key.version and order.spec.name == route.key.name
        if ours and order.wanted == "run" and not view.worker_lost(order.worker, order.node, order.epoch, now_ns):
            return None, False
    candidates = Room(view, now_ns).candidates()
    placed = place(route.spec, route.record.segment_bytes, candidates)
    if not isinstance(placed, ErrorInfo):
        return None, False
    return placed, never_fits(route.spec, route.record.segment_bytes, candidates)
