"""Marks that a handler's file puts on its own functions: `@batched(...)` and `@on_exit`.

They only say what is wanted, as `declare` does: a marked function stays what it was.
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
    max_size: int
    max_wait_s: float


def batched(*, max_size: int, max_wait_ms: float = 10) -> Callable[[Target], Target]:
    """Declares that a function, or a class's `__call__`, takes lists: up to `max_size` calls are computed as one.

        @function
        @batched(max_size=16, max_wait_ms=5)
        def embed(texts: list[str]) -> list[list[float]]: ...

    A batch is computed when it is full, when no other call can come to it, or `max_wait_ms` after its first call came.
    The worker takes `concurrency` calls at a time (2 × max_size, if the function does not say).
    Errors: TypeError, ValueError for sizes that are none.
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
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    found = getattr(called, BATCHED, None)
    return found if isinstance(found, Batching) else None


def on_exit(target: Target) -> Target:
    """Declares a function of the handler's module that is called once, without arguments, before its worker ends.

    A class has `close(self)` for that. Errors: TypeError for what is no function.
    """
    if not inspect.isfunction(target):
        raise TypeError(f"on_exit declares a function, got {target!r}")
    setattr(target, ON_EXIT, True)
    return target
