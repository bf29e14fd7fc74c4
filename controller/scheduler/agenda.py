"""The agenda of the scheduler: which versions it looks at now. Pure but for the changes that it takes from the view.

A version is looked at when something of it has changed, when the time has come that its last decision named, and once
in a while anyway. Those that are idle, without workers and without a minimum of them, are not looked at at all until
they change. So a step costs what has changed, and not what is deployed.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Literal

from fleetstart.runtime.contract.node.reports import FunctionLoad

from ..state.records import VersionKey, parse_version_key
from ..state.traffic import tracked_versions
from ..state.view import View

MOVING_NS = 1_000_000_000
"""Interval for versions with workers that start or end, or calls that wait: what time alone changes of them."""
STEADY_NS = 60_000_000_000
"""Interval for versions with workers of which nothing is expected: it makes up for a change that was not noticed, of
which none is known. At ten seconds they were a third of what a controller with two thousand and no calls needed."""
TOGETHER_NS = 100_000_000
"""Versions of which something is expected, and that are due within it, are looked at together."""
STEADY_TOGETHER_NS = 1_000_000_000
"""The same for the others."""
STEP_VERSIONS = 25
"""Versions of one step, a millisecond or two: the loop that runs it serves calls between two steps."""

Rest = Literal["inert", "steady", "moving"]
"""What is to be expected of a version: nothing, nothing soon, or something any second."""


class Agenda:
    def __init__(self, view: View) -> None:
        self._view = view
        self._changes = view.follow()
        self._pending = dict.fromkeys(sorted(all_versions(view)))
        """Versions that are to be looked at, in the order in which they came."""
        self._due_ns: dict[VersionKey, int] = {}
        self._heap: list[tuple[int, VersionKey]] = []
        """Due times, the next one first; one that is not in `_due_ns` any more is over."""
        self._unplaced: set[VersionKey] = set()
        """Versions whose workers found no room."""

    def take(self, now_ns: int) -> list[VersionKey]:
        """The versions of the next step: those with the oldest waiting calls first, then those that came first."""
        self.again(sorted(self._changes.take_versions()))
        if self._changes.take_nodes():
            self.again(sorted(self._unplaced))  # there may be room now
        while (next_ns := self._next_ns()) is not None and next_ns <= now_ns:
            self._pending[heapq.heappop(self._heap)[1]] = None
        if not self._pending:
            return []
        called = waiting_versions(self._view.loads())
        waiting = [key for key in called if key in self._pending][:STEP_VERSIONS]
        first = dict.fromkeys(waiting) | dict.fromkeys(islice(self._pending, STEP_VERSIONS))
        taken = list(first)[:STEP_VERSIONS]
        for key in taken:
            del self._pending[key]
            self._due_ns.pop(key, None)
        return taken

    def done(
        self, rests: Mapping[VersionKey, tuple[Rest, int | None]], unplaced: Collection[VersionKey], now_ns: int
    ) -> None:
        """Notes when each version is due again: by what is expected of it, and the monotonic time that was named."""
        self._unplaced = (self._unplaced - rests.keys()) | set(unplaced)
        for key, (rest, again_ns) in rests.items():
            if rest == "inert" and again_ns is None:
                self._due_ns.pop(key, None)
                continue
            moves = rest == "moving"
            usual_ns = now_ns + (MOVING_NS if moves else STEADY_NS - _spread_ns(key))
            usual_ns += -usual_ns % (TOGETHER_NS if moves else STEADY_TOGETHER_NS)
            due_ns = min(usual_ns, max(again_ns, now_ns + 1)) if again_ns is not None else usual_ns
            self._due_ns[key] = due_ns
            heapq.heappush(self._heap, (due_ns, key))

    def again(self, keys: Iterable[VersionKey]) -> None:
        """Has versions looked at with the next steps, such as those of a step that was not written."""
        self._pending.update(dict.fromkeys(keys))

    def wait_ns(self, now_ns: int) -> int | None:
        """Time until the next step has something to do; None if only a change can bring it."""
        if self._pending:
            return 0
        next_ns = self._next_ns()
        return max(0, next_ns - now_ns) if next_ns is not None else None

    def _next_ns(self) -> int | None:
        """When the next version is due."""
        while self._heap and self._due_ns.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


def all_versions(view: View) -> set[VersionKey]:
    """The versions that are deployed, ordered or called."""
    functions = view.functions.items()
    found = {VersionKey(name, version) for name, record in functions for version in tracked_versions(record)}
    return found | called_versions(view) | set(view.ordered_versions())


def called_versions(view: View) -> set[VersionKey]:
    """The versions that gateways have calls of."""
    return {key for text in view.loads() if (key := parse_version_key(text)) is not None}


def waiting_versions(loads: Mapping[str, FunctionLoad]) -> list[VersionKey]:
    """The versions with calls that wait, that of the oldest call first."""
    found = [(load.oldest_unix_ms, key) for text, load in loads.items() if load.oldest_unix_ms
             if (key := parse_version_key(text)) is not None]  # fmt: skip
    return [key for _, key in sorted(found)]


def start_order(key: VersionKey, loads: Mapping[str, FunctionLoad]) -> tuple[float, VersionKey]:
    """Sort key of versions: that with the oldest waiting call starts first."""
    load = loads.get(str(key))
    return (load.oldest_unix_ms if load is not None and load.oldest_unix_ms else float("inf")), key


def _spread_ns(key: VersionKey) -> int:
    """Different for each version, so that those that were looked at together are not due together for ever."""
    return zlib.crc32(str(key).encode()) % (STEADY_NS // 2)
