"""Mean call latencies of each version on this node, over all its workers; reported to the scheduler.

A worker reports running means and the number of calls behind them; the latest report counts.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.speed import Speed

VERSIONS_KEPT = 64
"""Versions reported: those called last. The scheduler has learnt the others' latencies long before."""


class CallLatencies:
    """Latest means by version. Not thread-safe."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[str, Speed] = OrderedDict()
        self._calls: dict[WorkerId, int] = {}

    def note(self, version: str, worker: WorkerId, speed: Speed) -> None:
        """Records a worker's report. `version` is name@version."""
        new = speed.calls - self._calls.get(worker, 0)
        if new <= 0:
            return
        self._calls[worker] = speed.calls
        known = self._speeds.pop(version, None)
        calls = new + (known.calls if known is not None else 0)
        self._speeds[version] = msgspec.structs.replace(speed, calls=calls)
        if len(self._speeds) > VERSIONS_KEPT:
            self._speeds.popitem(last=False)

    def forget(self, worker: WorkerId) -> None:
        """Drops the call count of a worker that has ended."""
        self._calls.pop(worker, None)

    def report(self) -> dict[str, Speed]:
        return dict(self._speeds)
