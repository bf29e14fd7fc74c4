"""User ids of functions: each function with workers on this node has one that no other function has. Pure.

The kernel counts some of its resources by user (inotify instances, pipes' memory, keys): functions cannot use up each
other's. An id that was given back is given out again after all others, since processes may still be dying.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import FunctionName


@dataclass(slots=True)
class _Held:
    """The id of one function, and by how many workers it is held."""

    user: int
    workers: int = 0


class WorkerUids:
    """The ids of one range; 0 for everyone if it is empty."""

    def __init__(self, uids: range) -> None:
        self._uids = uids
        self._unused = iter(uids)
        self._given_back: deque[int] = deque()
        self._held: dict[FunctionName, _Held] = {}

    def take(self, function: FunctionName) -> int:
        """The id for one more worker of a function. Errors: Unavailable if all are in use."""
        if not self._uids:
            return 0
        held = self._held.get(function)
        if held is None:
            held = self._held[function] = _Held(self._next())
        held.workers += 1
        return held.user

    def give_back(self, function: FunctionName) -> None:
        """Counts one worker of a function less."""
        held = self._held.get(function)
        if held is None:
            return
        held.workers -= 1
        if held.workers == 0:
            del self._held[function]
            self._given_back.append(held.user)

    def _next(self) -> int:
        user = next(self._unused, 0)
        if user or self._given_back:
            return user or self._given_back.popleft()
        raise Unavailable(
            f"{len(self._held):,} functions have workers on this node, as many as FS_ISOLATION_UIDS has user ids",
            hint="give the node a wider range",
        )
