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
LATER_LEAST_S, LATER_MOST_S = 0.1, 60.0
"""How long a delivery for which its function has no place is put off: long enough that looking at it again is no work
to speak of, and not so long that a receiver which has recovered would be left waiting."""
LATER_EACH_S = 0.002
"""Least distance of deliveries that are put off: those of the quickest receiver."""


def delivery_turn(function: FunctionName, under_way: Mapping[FunctionName, int]) -> Literal["begin", "wait", "later"]:
    """Decides about a function's due delivery: it begins, waits until any other one has ended, or is put off until
    some of its own function have, and those of other functions come first. `under_way`: deliveries of each function."""
    if under_way.get(function, 0) >= DELIVERIES_OF_ONE:
        return "later"
    return "begin" if sum(under_way.values()) < DELIVERIES_MAX else "wait"


def later_s(begun_s: Collection[float], before_s: float, now_s: float) -> float:
    """When a delivery that is put off is due again: when it may have its turn, if its receiver takes half as long as it
    does. `begun_s`: when its function's deliveries under way began; `before_s`: when the one put off last is due."""
    age_s = sum(now_s - one_s for one_s in begun_s) / len(begun_s)  # on average half of what they take
    each_s = max(LATER_EACH_S, age_s / DELIVERIES_OF_ONE)
    return min(max(before_s, now_s + LATER_LEAST_S) + each_s, now_s + LATER_MOST_S)
