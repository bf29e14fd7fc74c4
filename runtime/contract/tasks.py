"""Ending the background tasks of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2
"""For a task to end in order before it is told again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels until every task has ended; what they raise is dropped. For tasks whose own end takes no time.

    Once is not enough: `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with its result,
    and redis-py sends with it. The task then goes on as if nobody had spoken.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=AGAIN_S)
        await asyncio.gather(*ended, return_exceptions=True)
