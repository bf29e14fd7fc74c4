"""Standby of a worker: calls end, then weights and KV memory are given back; a wake takes them again.

The changes run in a thread, one after the other, as the loop goes on to answer: a call that comes meanwhile is sent to
another worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from ..contract.errors import FleetError, InvalidSpec, StartFailed
from ..contract.node.messages import StandBy, StoodBy, Wake, Woken


class Standby(Protocol):
    """App that can give weights and KV memory back while its process stays. Both block."""

    def release(self) -> None: ...

    def regain(self) -> None:
        """Errors: those of loading."""
        ...


class Calls(Protocol):
    """Calls of a worker. `standby`: set while they go to another one."""

    standby: bool

    @property
    def running(self) -> int: ...


class WorkerStandby:
    """Standby of one worker's app. On the loop."""

    def __init__(
        self,
        app: Standby | None,
        calls: Calls,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[msgspec.Struct], object],
        failed: Callable[[FleetError], object],
    ) -> None:
        """`failed` is called with the error after which the worker can serve no more."""
        self._app = app
        self._calls = calls
        self._loop = loop
        self._send = send
        self._failed = failed
        self._ended = asyncio.Event()
        """Set when no call runs any more."""
        self._changes: asyncio.Task[None] | None = None

    def handle(self, message: StandBy | Wake) -> None:
        """Carries an order out once the earlier ones are."""
        if self._app is None:
            self._failed(InvalidSpec("this function cannot stand by: only language models give weights back"))
            return
        if isinstance(message, StandBy):
            self._calls.standby = True
            self._ended.clear()
            self.on_calls_changed()
        self._changes = self._loop.create_task(self._change(message, self._app, self._changes))

    def on_calls_changed(self) -> None:
        if not self._calls.running:
            self._ended.set()

    async def _change(self, message: StandBy | Wake, app: Standby, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            if isinstance(message, StandBy):
                await self._ended.wait()
                await self._loop.run_in_executor(None, _release, app)
                self._send(StoodBy())
            else:
                await self._loop.run_in_executor(None, app.regain)
                self._calls.standby = False
                self._send(Woken())
        except FleetError as error:
            self._failed(error)
        except Exception as error:
            self._failed(StartFailed(f"the weights could not be given back or taken again: {error!r}"))


def _release(app: Standby) -> None:
    """Releases, and returns freed memory to system and devices, which the allocators would keep for later."""
    app.release()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
