"""Notices a client that leaves before its answer has come."""

from __future__ import annotations

import asyncio

from ..http.asgi import Receive
from .dispatch.backend import Call

WATCH_AFTER_S = 0.05
"""Calls that take longer are watched; shorter ones end before it would matter."""


class DisconnectWatch:
    """Cancels the call's task when its client leaves. Costs a timer; a task only for calls that take a while."""

    def __init__(self, call: Call, receive: Receive) -> None:
        self.gone = False
        self._call = call
        self._receive = receive
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._call.finished and self._task is not None:
            self.gone = True
            self._task.cancel()

    def clear_cancellation(self) -> None:
        """The cancellation was ours and is dealt with."""
        if self._task is not None:
            self._task.uncancel()

    def stop(self) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
