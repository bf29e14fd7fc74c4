"""Apportionment of a worker's busy time among its calls, in integers that add up exactly.

While n calls run on one worker, each is charged a n-th of the time that passes, so that a worker's busy second is
sold once. Nanoseconds that do not divide go to the calls that began first; what is left below a millisecond when
a call ends is carried to the worker's next. Hence the sum of the billed milliseconds is the worker's busy time.
"""

from __future__ import annotations

from collections.abc import Hashable


class Meter:
    """Apportions one worker's busy time among its calls. Times must not go back."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, int] = {}
        self._last_ns = 0
        self._carry_ns = 0

    def __len__(self) -> int:
        return len(self._shares)

    def begin(self, call: Hashable, now_ns: int) -> None:
        self._pass(now_ns)
        self._shares[call] = 0

    def end(self, call: Hashable, now_ns: int) -> int:
        """Ends a call and returns its billed milliseconds; 0 for an unknown one."""
        self._pass(now_ns)
        share_ns = self._shares.pop(call, None)
        if share_ns is None:
            return 0
        billed_ms, self._carry_ns = divmod(share_ns + self._carry_ns, 1_000_000)
        return billed_ms

    def waive(self, call: Hashable, now_ns: int) -> None:
        """Ends a call without billing it: its worker died, or never accepted it."""
        self._pass(now_ns)
        self._shares.pop(call, None)

    def _pass(self, now_ns: int) -> None:
        elapsed_ns = max(0, now_ns - self._last_ns)
        self._last_ns = max(now_ns, self._last_ns)
        if not self._shares:
            return
        each_ns, rest = divmod(elapsed_ns, len(self._shares))
        for i, call in enumerate(self._shares):
            self._shares[call] += each_ns + (i < rest)
