"""Fair turns of functions whose async calls or webhooks are due: which one of them begins its next one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

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


DELIVERIES_MAX = 256
"""Concurrent deliveries of webhooks of one gateway: each has a connection, and so a descriptor."""
DELIVERIES_OF_ONE = 32
"""Concurrent deliveries of one function: eight whose receivers do not answer must be there before others wait."""
SLOW_S = 1.0
"""Age from which a delivery is slow: where all of a function's are, its further ones make way for those of others."""


def delivery_turn(
    function: FunctionName, under_way: Collection[tuple[FunctionName, float]], now_s: float
) -> Literal["begin", "wait", "later"]:
    """Decides about a function's due delivery: it begins, waits for the end of another one, or is to be looked at
    later, as its receiver is slow. `under_way`: functions of deliveries, and when they began."""
    own = [since_s for name, since_s in under_way if name == function]
    if len(own) < DELIVERIES_OF_ONE and len(under_way) < DELIVERIES_MAX:
        return "begin"
    slow = sum(1 for since_s in own if now_s - since_s >= SLOW_S)
    return "later" if slow >= DELIVERIES_OF_ONE else "wait"
