"""Simulated processes: each has its clocks, its source of ids and its queue of ready callbacks, and can stop or die.

A process is what the operating system would run: a controller, a node daemon, a client. The product's code runs in it
unchanged: while a simulation runs, `time` and `secrets` answer by the process whose callback runs.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from asyncio import Task
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol

EPOCH_NS = 1_790_000_000_000_000_000
"""Time of day at which a simulation begins, in autumn 2026."""


class SimulatedTime(Protocol):
    """A clock that simulated processes read: the loop's."""

    now_ns: int


class Process:
    """One simulated process. Callbacks of one process run in the order in which they became ready, as asyncio has it;
    whose turn it is among processes is drawn."""

    def __init__(self, name: str, time: SimulatedTime, chance: random.Random) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        """True if it is stopped, as by SIGSTOP: its clocks go on, and its callbacks wait."""
        self.ready: deque[Any] = deque()
        """Handles of the loop."""
        self.listed = False
        """True if the loop has it among the processes that can run."""
        self.tasks: list[Task[Any]] = []
        self.clock_error_ns = 0
        """What its clock of the day is wrong by. Steps change it; its monotonic clock never steps."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called when it is stopped."""
        self.time = time
        self._chance = chance

    def unix_ns(self) -> int:
        return EPOCH_NS + self.time.now_ns + self.clock_error_ns

    def token(self, count: int) -> str:
        return f"{self._chance.getrandbits(8 * count):0{2 * count}x}"

    def below(self, bound: int) -> int:
        return int(self._chance.random() * bound)

    def choice(self, items: Sequence[Any]) -> Any:
        return items[int(self._chance.random() * len(items))]


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process whose callback runs."""

_monotonic_ns, _time_ns = time.monotonic_ns, time.time_ns
_token_hex, _choice, _randbelow = secrets.token_hex, secrets.choice, secrets.randbelow


def monotonic_ns() -> int:
    process = CURRENT.get()
    return process.time.now_ns if process is not None else _monotonic_ns()


def unix_ns() -> int:
    process = CURRENT.get()
    return process.unix_ns() if process is not None else _time_ns()


def _hex(count: int | None = None) -> str:
    process = CURRENT.get()
    return process.token(count or 32) if process is not None else _token_hex(count)


def _drawn(items: Sequence[Any]) -> Any:
    process = CURRENT.get()
    return process.choice(items) if process is not None else _choice(items)


def _below(bound: int) -> int:
    process = CURRENT.get()
    return process.below(bound) if process is not None else _randbelow(bound)


def install() -> None:
    """From now on `time` and `secrets` answer by the simulated process that asks, and as ever outside of one.

    Called before the product is imported, which keeps `time.monotonic_ns` in default arguments.
    """
    if any(name.startswith("fleetstart.controller") for name in sys.modules):
        raise RuntimeError("the product was imported before its clocks were replaced")
    replaced: dict[ModuleType, dict[str, Callable[..., Any]]] = {
        time: {
            "monotonic_ns": monotonic_ns,
            "monotonic": lambda: monotonic_ns() / 1e9,
            "time_ns": unix_ns,
            "time": lambda: unix_ns() / 1e9,
        },
        secrets: {
            "token_hex": _hex,
            "token_urlsafe": _hex,
            "token_bytes": lambda count=None: bytes.fromhex(_hex(count)),
            "choice": _drawn,
            "randbelow": _below,
        },
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            setattr(module, name, function)
