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


COUNT_MAX = 2**53
"""Largest count that JSON's readers take exactly."""


class CallLatencies:
    """Latest means by version. Not thread-safe."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[str, Speed] = OrderedDict()
        self._last: dict[WorkerId, Speed] = {}

    def is_new(self, worker: WorkerId, speed: Speed) -> bool:
        """True if a worker's report includes calls that it did not report before."""
        before = self._last.get(worker)
        return speed.calls > (before.calls if before is not None else 0)

    def note(self, version: str, worker: WorkerId, speed: Speed) -> None:
        """Records a worker's report. `version` is name@version."""
        if not self.is_new(worker, speed):
            return
        before = self._last.get(worker)
        self._last[worker] = speed
        known = self._speeds.pop(version, None)
        counts = {name: _total(name, speed, before, known) for name in ("calls", "prompt_tokens", "cached_tokens")}
        self._speeds[version] = msgspec.structs.replace(speed, **counts)
        if len(self._speeds) > VERSIONS_KEPT:
            self._speeds.popitem(last=False)

    def forget(self, worker: WorkerId) -> None:
        """Drops the call count of a worker that has ended."""
        self._last.pop(worker, None)

    def report(self) -> dict[str, Speed]:
        return dict(self._speeds)


def _total(name: str, speed: Speed, before: Speed | None, known: Speed | None) -> int:
    """A version's count with what its worker's has grown by. A worker's code may lie: a count never falls."""
    grown: int = getattr(speed, name) - (getattr(before, name) if before is not None else 0)
    total: int = getattr(known, name) if known is not None else 0
    return min(total + max(0, grown), COUNT_MAX)
