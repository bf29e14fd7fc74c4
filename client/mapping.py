"""Maps a call over inputs, with so many calls at a time: results in the order of the inputs, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .errors import FleetError, InputFailed

T = TypeVar("T")
AHEAD = 2
"""Inputs that are taken ahead of the oldest missing result, as a multiple of the concurrency: one slow call does not
leave the others idle, and an endless iterable is read no further."""


def map_calls(
    call: Callable[[int, Any], T], inputs: Iterable[Any], *, concurrency: int, return_exceptions: bool
) -> Iterator[T | InputFailed]:
    """Yields a result for each input; calls that run when it is left are waited for.

    Errors: InputFailed for the first input that failed, unless they are returned.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency} must be 1 or more")
    waiting: deque[tuple[int, Any, Future[T]]] = deque()
    numbered = enumerate(inputs)
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="fleetstart-map")
    try:
        while True:
            while len(waiting) < AHEAD * concurrency and (following := next(numbered, None)) is not None:
                waiting.append((*following, pool.submit(call, *following)))
            if not waiting:
                return
            index, input, future = waiting.popleft()
            try:
                result: T | InputFailed = future.result()
            except FleetError as error:
                result = InputFailed(index, input, error)
                if not return_exceptions:
                    raise result from error
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


async def map_calls_async(
    call: Callable[[int, Any], Awaitable[T]],
    inputs: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int,
    return_exceptions: bool,
) -> AsyncIterator[T | InputFailed]:
    """Yields a result for each input. Errors: as `map_calls`. Calls that run when it is left are cancelled."""
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency} must be 1 or more")
    slots = asyncio.Semaphore(concurrency)
    waiting: deque[tuple[int, Any, asyncio.Task[T]]] = deque()
    numbered = _numbered(inputs)

    async def in_slot(index: int, input: Any) -> T:
        async with slots:
            return await call(index, input)

    try:
        while True:
            while len(waiting) < AHEAD * concurrency and (following := await anext(numbered, None)) is not None:
                waiting.append((*following, asyncio.create_task(in_slot(*following))))
            if not waiting:
                return
            index, input, task = waiting[0]
            try:
                result: T | InputFailed = await task
            except FleetError as error:
                result = InputFailed(index, input, error)
                if not return_exceptions:
                    raise result from error
            waiting.popleft()
            yield result
    finally:
        for _, _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in waiting), return_exceptions=True)
        await numbered.aclose()


async def _numbered(inputs: Iterable[Any] | AsyncIterable[Any]) -> Any:
    index = 0
    if isinstance(inputs, AsyncIterable):
        async for input in inputs:
            yield index, input
            index += 1
        return
    for input in inputs:
        yield index, input
        index += 1
