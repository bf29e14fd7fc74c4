"""Dynamic batching: calls of one worker computed together, for `@batched(max_size=16, max_wait_ms=5)`.

The handler takes a list for each of its parameters and returns a list with one result for each item; each caller sends
and receives one item. A result that is an exception is that caller's error. One batch is computed at a time; the next
one fills meanwhile. `seconds_until_due` decides when a batch is full; the rest carries that out.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..contract.errors import HandlerFailed
from ..sdk.decorators import Batching
from ..worker_io.user_errors import as_exception
from .request_args import ArgumentDecoder, Arguments


def seconds_until_due(
    batching: Batching, *, waiting: int, oldest_s: float, now_s: float, free_slots: int, computing: bool
) -> float | None:
    """Seconds until the waiting calls should be computed, 0 for at once; None while there is nothing to decide."""
    if computing or not waiting:
        return None
    if waiting >= batching.max_size or free_slots <= 0:
        return 0.0
    return max(0.0, oldest_s + batching.max_wait_s - now_s)


@dataclass(slots=True)
class _PendingCall:
    """One call of a batch."""

    arguments: Arguments
    arrived_s: float
    result: asyncio.Future[Any]


class Batcher:
    """Batches the calls of one handler, in the loop of its worker."""

    def __init__(self, handler: Callable[..., Any], batching: Batching, inputs: ArgumentDecoder, *, slots: int) -> None:
        """Errors: TypeError for a handler that streams."""
        called = handler if inspect.isroutine(handler) else type(handler).__call__
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError("a batched handler returns a list; it cannot stream")
        self._handler = handler
        self._batching = batching
        self._names = [parameter.name for parameter in inputs.parameters if not parameter.positional_only]
        self._positional = len(inputs.parameters) - len(self._names)
        self._whole = inputs.mode != "fields"
        self._slots = slots
        self._pool = None if inspect.iscoroutinefunction(called) else ThreadPoolExecutor(1, "batch")
        self._waiting: list[_PendingCall] = []
        self._running: list[_PendingCall] = []
        self._batch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # A batch belongs to no single call: it runs in the context in which the worker was created.
        self._context = contextvars.copy_context()

    async def call(self, arguments: Arguments) -> Any:
        """One caller's result. Errors: what the handler raised, or returned as this item's result."""
        loop = asyncio.get_running_loop()
        item = _PendingCall(arguments, loop.time(), loop.create_future())
        self._waiting.append(item)
        self._schedule()
        try:
            return await item.result
        except asyncio.CancelledError:
            await self._cancel(item)
            raise

    def after_batch(self, arguments: Arguments, release: Callable[[], None]) -> None:
        """Releases what a call's arguments hold, once no batch computes them: the files of a caller that has left are
        still read with those of the others."""
        if self._batch is not None and any(item.arguments is arguments for item in self._running):
            self._batch.add_done_callback(lambda _: release())
        else:
            release()

    async def _cancel(self, item: _PendingCall) -> None:
        """Cancels one call; others are unaffected. The last one of a batch stops it, or waits for its thread to end."""
        if item in self._waiting:
            self._waiting.remove(item)
            self._schedule()
            return
        batch = self._batch
        if batch is None or item not in self._running or not all(one.result.done() for one in self._running):
            return
        if self._pool is None:
            batch.cancel()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.add_done_callback(lambda _: _set_result(ended))
        await wait_for_end(ended)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        wait_s = seconds_until_due(
            self._batching,
            waiting=len(self._waiting),
            oldest_s=self._waiting[0].arrived_s if self._waiting else 0.0,
            now_s=loop.time(),
            free_slots=self._slots - len(self._waiting),
            computing=self._batch is not None,
        )
        if wait_s == 0.0:
            self._start_batch()
        elif wait_s is not None:
            self._timer = loop.call_later(wait_s, self._schedule, context=self._context)

    def _start_batch(self) -> None:
        self._running = self._waiting[: self._batching.max_size]
        del self._waiting[: self._batching.max_size]
        self._batch = asyncio.get_running_loop().create_task(self._run(self._running), context=self._context)
        self._batch.add_done_callback(self._on_batch_end, context=self._context)

    def _on_batch_end(self, batch: asyncio.Task[None]) -> None:
        for item in self._running:
            if not item.result.done():
                item.result.set_exception(HandlerFailed("its batch was stopped"))
        self._batch, self._running = None, []
        self._schedule()

    async def _run(self, items: list[_PendingCall]) -> None:
        try:
            results = _as_list(await self._call(items), len(items))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            results = [as_exception(error)] * len(items)
        for item, result in zip(items, results, strict=True):
            if item.result.done():
                continue
            if isinstance(result, BaseException):
                item.result.set_exception(as_exception(result))
            else:
                item.result.set_result(result)

    async def _call(self, items: list[_PendingCall]) -> Any:
        positional = [[item.arguments[0][index] for item in items] for index in range(self._positional_count())]
        named = {} if self._whole else {name: [item.arguments[1][name] for item in items] for name in self._names}
        if self._pool is None:
            return await self._handler(*positional, **named)
        results = await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: _call_handler(self._handler, positional, named)
        )
        # A decorator around an asynchronous function returns what is to be awaited.
        return await results if inspect.isawaitable(results) else results

    def _positional_count(self) -> int:
        return 1 if self._whole else self._positional


def _call_handler(handler: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> Any:
    """SystemExit and StopIteration cannot pass through a future."""
    try:
        return handler(*positional, **named)
    except BaseException as error:
        raise as_exception(error) from error


def _as_list(results: Any, count: int) -> list[Any]:
    """The handler's results as a list. Errors: HandlerFailed for anything but one result for each item."""
    if isinstance(results, str | bytes | dict) or not hasattr(results, "__len__") or not hasattr(results, "__iter__"):
        what = f"a {type(results).__name__}"
    elif len(results) != count:
        what = f"{len(results)} results"
    else:
        return list(results)
    raise HandlerFailed(
        f"the batched handler was given {count} items and returned {what}",
        hint="return a list with one result for each item, in their order; an exception is that item's error",
    )


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_for_end(ended: asyncio.Future[None]) -> None:
    """Waits for the end even when cancelled, and raises the cancellation afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
