"""Passes of a model that concurrent calls share: while one pass computes, the calls of the next one gather.

The batching is that of `@batched`. A call that comes while nothing computes waits for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ..handlers.batching import Batcher
from ..handlers.request_args import argument_decoder
from ..sdk.decorators import Batching

CALLS = 64
"""Calls that are computed together at most; each may bring several inputs."""
ROWS = 32
"""Inputs of one pass of the model: enough to fill the cores, few enough that a pass stays short."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Row = TypeVar("Row")


class SharedPass(Generic[Item, Result]):
    """Computes the items of concurrent calls together, in a thread of its own."""

    def __init__(self, compute: Callable[[list[Item]], Sequence[Result | Exception]]) -> None:
        """`compute` returns a result for each item; an exception is the error of that item's call."""

        def items_together(items: list[Any], /) -> list[Any]:
            return list(compute(items))

        batching = Batching(max_size=CALLS, max_wait_s=0.0)
        self._batcher = Batcher(items_together, batching, argument_decoder(items_together, batched=True), slots=CALLS)

    async def call(self, item: Item) -> Result:
        """The result of one call's item. Errors: what `compute` raised, or returned for it."""
        result: Result = await self._batcher.call(((item,), {}))
        return result


def in_rows(
    calls: Sequence[Sequence[Row]],
    size: Callable[[Row], int],
    compute: Callable[[list[Row]], Iterable[Result]],
    *,
    together: bool,
) -> list[list[Result]]:
    """Results for each call's rows, over all calls: ROWS at a time, or one by one if not `together`.

    Rows of like size share a pass, because short ones are padded to the longest.
    """
    most = ROWS if together else 1
    rows = [row for call in calls for row in call]
    order = sorted(range(len(rows)), key=lambda place: size(rows[place]))
    results: dict[int, Result] = {}
    for begin in range(0, len(order), most):
        places = order[begin : begin + most]
        results.update(zip(places, compute([rows[place] for place in places]), strict=True))
    ends = [0]
    for call in calls:
        ends.append(ends[-1] + len(call))
    return [[results[place] for place in range(ends[at], ends[at + 1])] for at in range(len(calls))]
