"""Lifecycle hooks of a handler: `load(weights)` and `warm()` before the first call, `close()` after the last.

A class has them as optional methods, synchronous or asynchronous. `warm()` runs after `load()`, for a first run that no
caller waits for; the worker is ready after it. Functions of the handler's module that are marked with `@on_exit` run
with `close()`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ..sdk.decorators import ON_EXIT
from ..worker_io import user_errors


def run_start_hooks(handler: Any, weights: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Runs `load()` and `warm()`, before the loop runs. Errors: what the hooks raise."""
    load = getattr(handler, "load", None)
    if load is not None:
        _finish(load(weights) if inspect.signature(load).parameters else load(), loop)
    warm = getattr(type(handler), "warm", None)
    if callable(warm):
        _finish(handler.warm(), loop)


def _finish(result: Any, loop: asyncio.AbstractEventLoop) -> None:
    if inspect.isawaitable(result):
        loop.run_until_complete(_awaited(result))


async def _awaited(result: Any) -> None:
    await result


def close_hook(handler: Any, entry: str, loop: asyncio.AbstractEventLoop) -> Callable[[], None] | None:
    """A function that runs the handler's close hooks, for a thread while the loop runs; None without hooks."""
    hooks: list[Callable[[], Any]] = []
    if callable(getattr(type(handler), "close", None)):
        hooks.append(handler.close)
    module = sys.modules.get(entry.partition(":")[0])
    hooks += [value for value in vars(module).values() if _is_marked(value)] if module is not None else []
    return (lambda: _close(hooks, loop)) if hooks else None


def _is_marked(value: Any) -> bool:
    return inspect.isfunction(value) and hasattr(value, ON_EXIT)


def _close(hooks: list[Callable[[], Any]], loop: asyncio.AbstractEventLoop) -> None:
    """Runs every hook; what one of them raises goes to the log."""
    for hook in hooks:
        try:
            result = hook()
            if inspect.isawaitable(result):
                asyncio.run_coroutine_threadsafe(_awaited(result), loop).result()
        except BaseException as error:
            user_errors.log(error, f"{getattr(hook, '__qualname__', hook)} failed while the worker was ending:")
