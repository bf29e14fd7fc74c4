"""An asyncio event loop whose time is simulated, and whose choice among ready processes is drawn from a seed.

Time stands while callbacks run, and jumps to the next timer when none is left: a minute takes as long as its
callbacks. Callbacks of one process keep asyncio's order, which code may rely on; between processes any order can be,
and one is drawn. Nothing else decides what runs next, so a seed is a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from asyncio import Task
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from math import ceil
from operator import methodcaller
from typing import Any

from tests.simulation.processes import CURRENT, Process

TURNS_AT_ONE_TIME = 200_000
"""Callbacks without a step of the clock after which something turns in a circle."""


ENDS_NS = 600_000_000_000
"""No simulation is that long."""


class Stuck(Exception):
    """Nothing is ready and no timer is set, or callbacks go on for ever without a step of the clock."""


process_of: Callable[[Context], Process | None] = methodcaller("get", CURRENT)
"""The process that a callback belongs to; None for the simulation's own."""


class Handle:
    """A callback that will run: what asyncio's handles are for those who hold one, without what a debugger asks of
    them."""

    __slots__ = ("args", "callback", "cancelled_", "context", "when_ns")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, when_ns: int) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.when_ns = when_ns
        self.cancelled_ = False

    def cancel(self) -> None:
        """Timers are dropped when their time comes."""
        self.cancelled_ = True

    def cancelled(self) -> bool:
        return self.cancelled_

    def when(self) -> float:
        return self.when_ns / 1e9


Entry = Handle | tuple[Context, Callable[..., object], tuple[Any, ...]]
"""A callback that is ready or will be, with a handle where someone may cancel it."""
Timer = tuple[int, float, Entry, Process]
"""When, and a draw that decides among those of one time; two equal draws of one time are not to be expected."""


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.now_ns = 0
        self._draw = chance.random
        self._timers: list[Timer] = []
        self._runnable: list[Process] = []
        self.errors: list[str] = []
        """What callbacks raised that nobody awaits."""
        self.world = Process("world", self, random.Random(0))
        """Whoever runs the simulation: it is never stopped."""

    # ── what asyncio asks of a loop ────────────────────────────────────────────────────────────────

    def time(self) -> float:
        return self.now_ns / 1e9

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle | None:
        """Returns no handle to those who name a context: tasks and futures, which take none, and the simulation."""
        entry: Entry
        if context is None:
            context = copy_context()
            entry = handle = Handle(callback, args, context, self.now_ns)
        else:
            entry, handle = (context, callback, args), None
        process = process_of(context) or self.world
        if process.alive:
            process.ready.append(entry)
            if not process.listed and not process.stopped:
                process.listed = True
                self._runnable.append(process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if context is None:
            context = copy_context()
        when_ns = self.now_ns + ceil(delay * 1e9) if delay > 0 else self.now_ns
        handle = Handle(callback, args, context, when_ns)
        heappush(self._timers, (when_ns, self._draw(), handle, process_of(context) or self.world))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if context is None:
            context = copy_context()
        when_ns = max(self.now_ns, ceil(when * 1e9))
        handle = Handle(callback, args, context, when_ns)
        heappush(self._timers, (when_ns, self._draw(), handle, process_of(context) or self.world))
        return handle

    def arrive(
        self, delay_s: float, process: Process, context: Context, callback: Callable[..., object], *args: Any
    ) -> None:
        """Calls back in a process, whose context it is, after a while: what `call_later` does, for messages, which are
        most of what there is and are never cancelled."""
        when_ns = self.now_ns + ceil(delay_s * 1e9) if delay_s > 0 else self.now_ns
        heappush(self._timers, (when_ns, self._draw(), (context, callback, args), process))

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> Task[Any]:
        task: Task[Any] = Task(coro, loop=self, name=name, context=context)
        (CURRENT.get() or self.world).tasks.append(task)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs it now: a thread of its own would end at a time that no seed decides."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Generators of dead processes end with them; those of living ones are closed by their owners."""

    # ── turns ──────────────────────────────────────────────────────────────────────────────────────

    def _run_once(self) -> None:
        runnable, timers, draw = self._runnable, self._timers, self._draw
        turns = 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._advance(timers, runnable)
                turns = 0
                continue
            turns += 1
            if turns > TURNS_AT_ONE_TIME:
                raise Stuck(f"{TURNS_AT_ONE_TIME:,} callbacks ran while the clock stood at {self.time():.6f} s")
            index = int(draw() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[index]
            if not process.ready or process.stopped or not process.alive:
                process.listed = False
                runnable[index] = runnable[-1]
                runnable.pop()
                continue
            entry = process.ready.popleft()
            if type(entry) is tuple:
                context, callback, args = entry
            elif entry.cancelled_:
                continue
            else:
                context, callback, args = entry.context, entry.callback, entry.args
            try:
                context.run(callback, *args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"in {callback!r}", "exception": error})

    def _advance(self, timers: list[Timer], runnable: list[Process]) -> None:
        """Sets the clock to the next timer, and makes ready what is due then."""
        now_ns = -1
        while timers and (now_ns < 0 or timers[0][0] <= now_ns):
            when_ns, _, entry, process = heappop(timers)
            if not process.alive or (isinstance(entry, Handle) and entry.cancelled_):
                continue
            if now_ns < 0:
                self.now_ns = now_ns = when_ns
                if now_ns > ENDS_NS:
                    raise Stuck(f"it goes on for more than {ENDS_NS // 1_000_000_000} s")
            process.ready.append(entry)
            if not process.listed and not process.stopped:
                process.listed = True
                runnable.append(process)
        if now_ns < 0:
            raise Stuck(f"nothing is ready and no timer is set at {self.time():.6f} s")

    # ── processes ──────────────────────────────────────────────────────────────────────────────────

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> Task[Any]:
        """Starts a task in a process."""
        context = copy_context()
        context.run(CURRENT.set, process)
        task: Task[Any] = context.run(self.create_task, work)
        return task

    def stop_process(self, process: Process) -> None:
        """As SIGSTOP does."""
        process.stopped = True
        process.on_stop()

    def resume_process(self, process: Process) -> None:
        process.stopped = False
        if process.ready and process.alive and not process.listed:
            process.listed = True
            self._runnable.append(process)

    def kill_process(self, process: Process) -> None:
        """As SIGKILL does: no callback of it runs any more, neither `finally` nor `except`."""
        process.alive = False
        process.ready.clear()

    def bury(self, process: Process) -> None:
        """Frees the tasks of a process that is dead, after the run: closing them would run their `finally`."""
        for task in process.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        process.tasks.clear()
