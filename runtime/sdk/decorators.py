"""Decorators for functions of a handler's file: `@batched(...)` and `@on_exit`.

They only store settings, as `declarations` does: a decorated function stays unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])
BATCHED = "__fleetstart_batched__"
ON_EXIT = "__fleetstart_on_exit__"
SIZE_MAX = 1000
WAIT_MAX_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Settings of `@batched`."""

    max_size: int
    max_wait_s: float


def batched(*, max_size: int, max_wait_ms: float = 10) -> Callable[[Target], Target]:
    """Dynamic batching: up to `max_size` calls are computed as one, by a handler that takes and returns lists.

        @function
        @batched(max_size=16, max_wait_ms=5)
        def embed(texts: list[str]) -> list[list[float]]: ...

    Each caller sends and receives one item. An exception in the returned list is the error of that caller. A batch is
    computed when it is full, when no slot is free for another call, or `max_wait_ms` after its first call. The worker
    serves `concurrency` calls at a time, by default 2 x `max_size`. In a class, decorate `__call__`.

    Args:
        max_size: Largest batch, 1 to 1000.
        max_wait_ms: Longest wait for further calls in milliseconds, 0 to 60000.

    Raises:
        ValueError: For a size or a wait out of range.
        TypeError: If the target is not a function or method.
    """
    if isinstance(max_size, bool) or not isinstance(max_size, int) or not 1 <= max_size <= SIZE_MAX:
        raise ValueError(f"batched(max_size={max_size!r}): must be 1 to {SIZE_MAX}")
    if not 0 <= max_wait_ms <= WAIT_MAX_MS:
        raise ValueError(f"batched(max_wait_ms={max_wait_ms!r}): must be 0 to {WAIT_MAX_MS}")

    def declare(target: Target) -> Target:
        if not inspect.isfunction(target):
            raise TypeError(f"batched() declares a function or a method, got {target!r}: put it above __call__")
        setattr(target, BATCHED, Batching(max_size=max_size, max_wait_s=max_wait_ms / 1e3))
        return target

    return declare


def batching_of(handler: Any) -> Batching | None:
    """Settings of `@batched` on a handler; None without."""
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    found = getattr(called, BATCHED, None)
    return found if isinstance(found, Batching) else None


def on_exit(target: Target) -> Target:
    """Registers a function of the handler's module that runs once, without arguments, before its worker ends.

        @on_exit
        def close_connections() -> None: ...

    It may be asynchronous. A class has `close(self)` for that.

    Raises:
        TypeError: If the target is not a function.
    """
    if not inspect.isfunction(target):
        raise TypeError(f"on_exit declares a function, got {target!r}")
    setattr(target, ON_EXIT, True)
    return target
