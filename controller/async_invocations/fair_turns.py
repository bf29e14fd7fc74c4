"""Fair turns of functions whose async calls are due: which one of them begins its next call. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleetstart.runtime.contract.ids import FunctionName

TOGETHER_MAX = 64
"""Concurrent executions of one gateway: each holds its request and its response in memory."""
FIRST_CALLS = 16
"""Executions of these that are left to functions with none under way: calls may take hours, and a function whose first
call comes meanwhile is not to wait for the end of one."""


def next_function(
    waiting: Collection[FunctionName],
    running: Mapping[FunctionName, int],
    limits: Mapping[FunctionName, int],
    last_begun: Mapping[FunctionName, int],
) -> FunctionName | None:
    """Chooses the function whose next call begins: that with the fewest executions, of several the one that has not
    begun any for longest. None if all have to wait.

    `running`: executions in this gateway, `limits`: the most of each function. `last_begun`: a number that rises with
    each call that begins; absent for a function that has begun none.
    """
    total = sum(running.values())

    def may_begin(name: FunctionName) -> bool:
        own = running.get(name, 0)
        return own < limits[name] and total < (TOGETHER_MAX - FIRST_CALLS if own else TOGETHER_MAX)

    return min(
        filter(may_begin, waiting), key=lambda name: (running.get(name, 0), last_begun.get(name, 0), name), default=None
    )
