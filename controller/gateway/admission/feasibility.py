"""Feasibility of waiting calls: whether they will ever get a worker, and the error for those that will not.

A decision from the view, a backend and `now`. The planner says whether there is room, for one worker or a pipeline.
Links that other fetches use are no lack of room: they will be free. The backend keeps since when there was no room. The
router checks at each change while calls wait.
"""

from __future__ import annotations

from dataclasses import replace

from fleetstart.runtime.contract.errors import ErrorInfo, FleetError, NotFound, error_from

from ...planner.cluster import Cluster
from ...planner.constraints import admits
from ...planner.devices import with_bytes
from ...planner.node_state import NodeState
from ...planner.selection import make_plan
from ...scheduler.live_cluster import LiveCluster
from ...scheduler.start_orders import UNPLACED_NS, request_of
from ...scheduler.worker_pool import broken
from ...state.view import View
from ..dispatch.version_backend import VersionBackend

NODE_STATES_KEPT_NS = 250_000_000
"""Lifetime of the nodes' cached states: changes come in hundreds a second, and each checks each function."""


def start_failure(view: View, backend: VersionBackend, now_unix_ms: int) -> FleetError | None:
    """The error of the version's starts, if they are given up and no worker is left."""
    failure = view.failures.get(backend.key)
    if backend.workers or failure is None or not broken(failure, now_unix_ms):
        return None
    error = error_from(failure.error)
    error.hint = error.hint or f"`fs logs {backend.key.name}` tells more; it is tried again after a minute, or a deploy"
    return error


class FeasibilityCheck:
    """Decides for a gateway which waiting calls are unschedulable."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._live = LiveCluster(view)
        self._states: list[NodeState] = []
        self._idle: Cluster | None = None
        self._empty: Cluster | None = None
        """Clusters of these states with idle links, and with nothing on them; made when they are asked for."""
        self._made_ns: int | None = None

    def unschedulable(self, backend: VersionBackend, now_ns: int, now_unix_ms: int) -> tuple[FleetError, int] | None:
        """The error for waiting calls, and until when they were accepted to get it; None if they may wait on."""
        if self._view.synced and backend.key.name not in self._view.functions:
            return NotFound(f"function {backend.key.name} was deleted while the call waited"), now_ns
        error = start_failure(self._view, backend, now_unix_ms)
        if error is not None:
            return error, now_ns
        reason, never = self._unplaced(backend, now_ns, now_unix_ms)
        if reason is None:
            backend.unplaced_since_ns = None
            return None
        if backend.unplaced_since_ns is None:
            backend.unplaced_since_ns = now_ns
        if never:
            return error_from(reason), now_ns
        if now_ns - backend.unplaced_since_ns > UNPLACED_NS:
            return error_from(reason), now_ns - UNPLACED_NS
        return None

    def _unplaced(self, backend: VersionBackend, now_ns: int, now_unix_ms: int) -> tuple[ErrorInfo | None, bool]:
        """The planner's error if no worker comes and no node has room for one now; and whether none ever will."""
        view = self._view
        if backend.workers or view.redis != "ok":
            return None, False
        for order in view.orders_of(backend.key).values():
            if order.wanted == "run" and not view.worker_lost(order.worker, order.node, order.epoch, now_ns):
                return None, False
        request = replace(request_of(view, backend.key, backend.record, 1), slo=None)
        states = self.nodes(now_ns, now_unix_ms)
        reason = make_plan(request, self._idle_links(), 0.0).error
        if reason is None:
            return None, False
        # In a region without nodes, one may be about to come back: it is waited for, as if it were the only one.
        fitting = any(admits(request.wanted, state) for state in states)
        return reason, fitting and make_plan(request, self._emptied(), 0.0).error is not None

    def _idle_links(self) -> Cluster:
        """The nodes as they will be when other fetches have ended."""
        if self._idle is None:
            self._idle = Cluster(replace(state, link=replace(state.link, fetches=())) for state in self._states)
        return self._idle

    def _emptied(self) -> Cluster:
        """The nodes as if nothing ran on them."""
        if self._empty is None:
            self._empty = Cluster(
                replace(
                    state,
                    link=replace(state.link, fetches=()),
                    free_bytes=state.memory_bytes,
                    held={},
                    devices=tuple(with_bytes(device, 0) for device in state.devices),
                )
                for state in self._states
            )
        return self._empty

    def nodes(self, now_ns: int, now_unix_ms: int) -> list[NodeState]:
        """States of the nodes for the planner, from the cache while they are fresh."""
        if self._made_ns is None or now_ns - self._made_ns > NODE_STATES_KEPT_NS:
            self._made_ns = now_ns
            self._states = list(self._live.refreshed(now_ns, now_unix_ms * 1_000_000))
            self._idle = self._empty = None
        return self._states

    def cluster(self, now_ns: int, now_unix_ns: int) -> Cluster:
        """The nodes for the planner, as they are now. Not to be changed."""
        return self._live.refreshed(now_ns, now_unix_ns)
