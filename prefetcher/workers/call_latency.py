"""How quick the calls of each version are on this node, of all its workers together: told to the scheduler.

A worker tells running means and how many calls they come from; what it tells last is what counts.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.speed import Speed

VERSIONS_KEPT = 64
"""Called last; the scheduler has long learnt what it heard of others."""


class CallLatencies:
    """One owner, no threads."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[str, Speed] = OrderedDict()
        self._calls: dict[WorkerId, int] = {}

    def note(self, version: str, worker: WorkerId, speed: Speed) -> None:
        """`version` as name@version."""
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
        """It has ended."""
        self._calls.pop(worker, None)

    def report(self) -> dict[str, Speed]:
        return dict(self._speeds)
