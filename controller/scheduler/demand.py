"""Demand of versions: how many workers each needs and should have, by its calls and the windows of the autoscaler."""

from __future__ import annotations

import itertools

from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.node.reports import FunctionLoad

from ..peers.sources import DEFAULT_BYTES_PER_S, measured_bytes_per_s
from ..state.records import Failure, VersionKey
from ..state.traffic import in_service
from ..state.view import View
from .autoscaler import KeepAliveWindow, ScaleUpWindow, quiet_ns, workers_needed
from .quotas.limits import ObservedVersion
from .worker_pool import Member

LINKS_SEEN = 16
"""Nodes whose links are looked at to tell how long weights take: enough for a guess."""
WAITED_LEAST_S = 0.05
"""Minimum waiting time that counts: less is the latency of load reports."""


class Demand:
    """The autoscaling windows of all versions. Losing them costs some warm workers."""

    def __init__(self) -> None:
        self._windows: dict[VersionKey, KeepAliveWindow] = {}
        self._scale_ups: dict[VersionKey, ScaleUpWindow] = {}

    def window(self, key: VersionKey) -> KeepAliveWindow | None:
        """The keep-alive window of a version in service that has had calls."""
        return self._windows.get(key)

    def forget(self, key: VersionKey) -> None:
        """Drops the windows of a version of which nothing is expected."""
        self._windows.pop(key, None)
        self._scale_ups.pop(key, None)

    def workers(
        self,
        view: View,
        key: VersionKey,
        spec: FunctionSpec,
        load: FunctionLoad,
        members: list[Member],
        failure: Failure | None,
        now_ns: int,
    ) -> tuple[int, int]:
        """Needed and desired workers of a version.

        Out of service: current demand, no keep-alive. After failed starts: no more than current demand. In a rollout:
        at least one.
        """
        function = view.functions.get(key.name)
        need = _needed(load, spec) if function is not None else 0
        if function is not None and function.rollout is not None and function.rollout.version == key.version:
            need = max(need, 1)
        if function is None or key.version not in in_service(function):
            self._windows.pop(key, None)
            return need, need
        window = self._windows.get(key)
        if window is None:
            here = sum(m.wanted == "run" and not m.lost for m in members)
            window = self._windows[key] = KeepAliveWindow(here, now_ns)
        window.observe(need, now_ns)
        desired = window.desired(spec.scale, now_ns)
        if failure is not None:
            ready = sum(m.wanted == "run" and m.state == "ready" for m in members)
            desired = min(desired, max(spec.scale.min, need, ready))
        return need, desired

    def gathering_ns(self, view: View, one: ObservedVersion, missing: int, now_ns: int) -> int:
        """Time for which a scale-up waits for the other calls of its burst; 0: it does not.

        The first worker never waits, nor does one beyond which the function may have none, nor one without weights.
        """
        weights_bytes = one.record.segment_bytes if one.record is not None and one.spec.weights is not None else 0
        may_rise = one.load.queued and one.desired < one.spec.scale.max
        if not weights_bytes or not may_rise or not one.running:
            self._scale_ups.pop(one.key, None)
            return 0
        return self._scale_ups.setdefault(one.key, ScaleUpWindow()).wait_ns(
            missing=missing,
            calls=one.load.queued + one.load.running,
            now_ns=now_ns,
            quiet_ns=quiet_ns(weights_bytes, _link_bytes_per_s(view)),
        )


def waited_s_of(load: FunctionLoad, members: list[Member], now_unix_ns: int) -> float:
    """Time that the call behind a start has waited; 0 if another worker is starting, which serves the earlier calls."""
    starting = any(m.wanted == "run" and m.state in (None, "starting") and not (m.lost or m.helper) for m in members)
    if starting or not load.oldest_unix_ms:
        return 0.0
    waited_s = now_unix_ns / 1e9 - load.oldest_unix_ms / 1000
    return waited_s if waited_s >= WAITED_LEAST_S else 0.0


def _needed(load: FunctionLoad, spec: FunctionSpec) -> int:
    """Workers needed now. Recent calls count as long as there are calls at all: idle workers are kept by the keep-alive
    alone."""
    if not load.queued + load.running:
        return 0
    return workers_needed(
        queued=load.queued, running=load.running, predicted=load.recent, call_s=load.call_s, spec=spec
    )


def _link_bytes_per_s(view: View) -> float:
    """The usual rate of nodes' links, of a few of them that have measured theirs."""
    reports = (seen.report for seen in itertools.islice(view.nodes.values(), LINKS_SEEN))
    rates = sorted(rate for report in reports if (rate := measured_bytes_per_s(report)))
    return rates[len(rates) // 2] if rates else DEFAULT_BYTES_PER_S
