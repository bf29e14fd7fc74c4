"""Messages of a Redis subscription, until its connection is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

POLL_S = 5.0
EMPTY_MAX = 16
"""Reads in a row that end at once without a message. Confirmations of subscriptions are such: four at most."""


class Subscription(Protocol):
    async def get_message(self, *, timeout: float) -> Any: ...


async def messages(subscription: Subscription) -> AsyncIterator[Any]:
    """Yields messages as redis-py has them.

    Errors: ConnectionError if the connection is lost and reads end at once. Where the kernel gave it up (ETIMEDOUT),
            redis-py takes that for the end of the read's own timeout, which is the same class in Python: each read
            ends without a message, a wait or an error, and a loop of them never lets another task run.
    """
    loop = asyncio.get_running_loop()
    empty = 0
    while empty <= EMPTY_MAX:
        began_s = loop.time()
        message = await subscription.get_message(timeout=POLL_S)
        if message is not None:
            empty = 0
            yield message
        else:
            empty = empty + 1 if loop.time() - began_s < POLL_S / 2 else 0
    raise ConnectionError("the connection of a subscription was lost")
