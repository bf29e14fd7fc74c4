"""Calls of one worker, gathered and computed together: `@batched(max_size=16, max_wait_ms=5)`.

The handler takes a list for each of its parameters and gives a list with one answer for each item; each caller sends
and gets one item. An answer that is an exception is that caller's error. One batch is computed at a time: while it
runs, the next one gathers. When a batch is closed is decided by `seconds_until_due`; the rest is a thin shell.
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
from .request_args import ArgumentDecoder, Arguments
from .thread_calls import as_exception, wait_for_end


def seconds_until_due(
    batching: Batching, *, waiting: int, oldest_s: float, now_s: float, free_slots: int, computing: bool
) -> float | None:
    """Seconds until the calls that wait should be computed, 0 for at once; None while there is nothing to decide."""
    if computing or not waiting:
        return None
    if waiting >= batching.max_size or free_slots <= 0:
        return 0.0
    return max(0.0, oldest_s + batching.max_wait_s - now_s)


@dataclass(slots=True)
class _PendingCall:
    arguments: Arguments
    came_s: float
    answer: asyncio.Future[Any]


class Batcher:
    """Of one handler, in the loop of its worker."""

    def __init__(self, handler: Callable[..., Any], batching: Batching, inputs: ArgumentDecoder, *, slots: int) -> None:
        """Errors: TypeError for a handler that streams."""
        called = handler if inspect.isroutine(handler) else type(handler).__call__
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError("a batched handler returns a list; it cannot stream")
        self._handler = handler
        self._batching = batching
        self._names = [parameter.name for parameter in inputs.parameters if not parameter.positional_only]
        self._positional = len(inputs.parameters) - len(self._names)
        self._whole = inputs.form != "fields"
        self._slots = slots
        self._pool = None if inspect.iscoroutinefunction(called) else ThreadPoolExecutor(1, "batch")
        self._waiting: list[_PendingCall] = []
        self._computed: list[_PendingCall] = []
        self._batch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # A batch belongs to no one call: it runs in the context in which the worker was made.
        self._context = contextvars.copy_context()

    async def call(self, arguments: Arguments) -> Any:
        """One caller's answer. Errors: what the handler raised, or gave as this item's answer."""
        loop = asyncio.get_running_loop()
        item = _PendingCall(arguments, loop.time(), loop.create_future())
        self._waiting.append(item)
        self._look()
        try:
            return await item.answer
        except asyncio.CancelledError:
            await self._leave(item)
            raise

    async def _leave(self, item: _PendingCall) -> None:
        """Who leaves hurts nobody. The last to leave a batch stops it, or keeps its slot until the thread is done."""
        if item in self._waiting:
            self._waiting.remove(item)
            self._look()
            return
        batch = self._batch
        if batch is None or item not in self._computed or not all(one.answer.done() for one in self._computed):
            return
        if self._pool is None:
            batch.cancel()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.add_done_callback(lambda _: _set(ended))
        await wait_for_end(ended)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        wait_s = seconds_until_due(
            self._batching,
            waiting=len(self._waiting),
            oldest_s=self._waiting[0].came_s if self._waiting else 0.0,
            now_s=loop.time(),
            free_slots=self._slots - len(self._waiting),
            computing=self._batch is not None,
        )
        if wait_s == 0.0:
            self._begin()
        elif wait_s is not None:
            self._timer = loop.call_later(wait_s, self._look, context=self._context)

    def _begin(self) -> None:
        self._computed = self._waiting[: self._batching.max_size]
        del self._waiting[: self._batching.max_size]
        self._batch = asyncio.get_running_loop().create_task(self._run(self._computed), context=self._context)
        self._batch.add_done_callback(self._ended, context=self._context)

    def _ended(self, batch: asyncio.Task[None]) -> None:
        for item in self._computed:
            if not item.answer.done():
                item.answer.set_exception(HandlerFailed("its batch was stopped"))
        self._batch, self._computed = None, []
        self._look()

    async def _run(self, items: list[_PendingCall]) -> None:
        try:
            answers = _listed(await self._call(items), len(items))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            answers = [as_exception(error)] * len(items)
        for item, answer in zip(items, answers, strict=True):
            if item.answer.done():
                continue
            if isinstance(answer, BaseException):
                item.answer.set_exception(as_exception(answer))
            else:
                item.answer.set_result(answer)

    async def _call(self, items: list[_PendingCall]) -> Any:
        positional = [[item.arguments[0][index] for item in items] for index in range(self._columns())]
        named = {} if self._whole else {name: [item.arguments[1][name] for item in items] for name in self._names}
        if self._pool is None:
            return await self._handler(*positional, **named)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: _caught(self._handler, positional, named)
        )

    def _columns(self) -> int:
        return 1 if self._whole else self._positional


def _caught(handler: Callable[..., Any], positional: list[Any], named: dict[str, Any]) -> Any:
    """SystemExit and StopIteration cannot pass through a future."""
    try:
        return handler(*positional, **named)
    except BaseException as error:
        raise as_exception(error) from error


def _listed(answers: Any, count: int) -> list[Any]:
    """Errors: HandlerFailed for anything but one answer for each item."""
    if isinstance(answers, str | bytes | dict) or not hasattr(answers, "__len__") or not hasattr(answers, "__iter__"):
        what = f"a {type(answers).__name__}"
    elif len(answers) != count:
        what = f"{len(answers)} answers"
    else:
        return list(answers)
    raise HandlerFailed(
        f"the batched handler was given {count} items and returned {what}",
        hint="return a list with one answer for each item, in their order; an exception is that item's error",
    )


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
