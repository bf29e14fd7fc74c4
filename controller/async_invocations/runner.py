"""Runner of async invocations: finds due ones, claims them, executes them through the gateway, stores the outcome.

Every controller has one. A claim is a lease that is renewed while the call runs; when a dead gateway's leases expire,
its calls run again elsewhere. Execution is at least once; response and bill count once (their state names the claim,
and the ledger takes a run's row once).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import redis.asyncio as redis

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.process.tasks import end_tasks, wait_at_most

from ..http.asgi import Receive, Scope, Send
from ..state.invocation_records import run_id
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .execution import Execution
from .fair_turns import TOGETHER_MAX, delivery_turn, later_s, next_function
from .store import lifecycle
from .store.invocations import InvocationStore, StoredInvocation
from .store.payloads import PayloadStore
from .store.redis_clock import RedisClock, UnchangedFor
from .webhooks.delivery import WebhookDelivery

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Polling interval for due invocations: a published event may be lost, and leases of dead gateways expire."""
PER_FUNCTION_MAX = 32
"""Concurrent executions of one function in one gateway, for fairness."""
RETRY_S = 0.25
"""Pause of an invocation whose transition could not be written, before it is looked at again."""
CLOSE_S = 2.0
"""Time after the drain in which executions that were stopped are queued again, and webhooks end."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class InvocationRunner:
    def __init__(
        self,
        gateway_id: str,
        client: redis.Redis,
        view: View,
        invocations: InvocationStore,
        payloads: PayloadStore,
        webhook_delivery: WebhookDelivery,
        gateway: App,
        *,
        trace: Callable[[InvocationId], Awaitable[InvocationTrace]],
    ) -> None:
        self._id = gateway_id
        self._client = client
        self._view = view
        self._invocations = invocations
        self._payloads = payloads
        self._webhooks = webhook_delivery
        self._gateway = gateway
        self._trace = trace
        self._clock = RedisClock(client)
        self._unchanged = UnchangedFor()
        self._wake = asyncio.Event()
        self._tasks: dict[InvocationId, asyncio.Task[None]] = {}
        self._functions: dict[InvocationId, FunctionName | None] = {}
        self._deliveries: dict[InvocationId, tuple[FunctionName, float]] = {}
        """Webhooks under way, separate from executions: of which function, and when they began."""
        self._put_off_s: dict[FunctionName, float] = {}
        """Of functions with more due webhooks than may be under way: when the one that was put off last is due."""
        self._executions: dict[InvocationId, Execution] = {}
        self._last_begun: dict[FunctionName, int] = {}
        """Of functions whose calls were due when it was looked last: the number of their last call that began here."""
        self._begun = 0
        self._draining = False
        """No run is begun any more; webhooks and queue timeouts go on."""
        self._closed = False
        """There is one more round, for the webhooks of the calls that ended last."""
        self._rounds_over = asyncio.Event()
        self._rounds_over.set()
        invocations.on_event(self._heard)

    def _heard(self, status: str, invocation: InvocationId) -> None:
        if status == "queued" or (status != "running" and invocation not in self._tasks):
            self._wake.set()
        execution = self._executions.get(invocation)
        if execution is not None and status == "cancelling":
            execution.look()

    async def run(self) -> None:
        self._rounds_over.clear()
        try:
            last = False
            while not last:
                last = self._closed
                wait_s = await self._round()
                if not last:
                    await wait_at_most(self._wake, wait_s)
                    self._wake.clear()
            self._rounds_over.set()
            await asyncio.Event().wait()  # nothing more is begun; the owner cancels this task
        finally:
            self._rounds_over.set()
            await end_tasks(self._tasks.values())

    def stop(self) -> None:
        """Begins no more runs. Calls that wait for a worker are handed back: they can wait at another gateway."""
        self._draining = True
        for execution in self._executions.values():
            if not execution.sent:
                execution.hand_back()

    async def hand_back(self, drain_s: float = 0.0) -> None:
        """Waits so long for executions to end, then stops those left, and queues them again for other gateways.

        Takes up to `CLOSE_S` longer than the drain.
        """
        self.stop()
        if running := [self._tasks[invocation] for invocation in self._executions]:
            await asyncio.wait(running, timeout=drain_s)
        for execution in self._executions.values():
            execution.hand_back()
        ends_s = time.monotonic() + CLOSE_S
        self._closed = True
        self._wake.set()
        await wait_at_most(self._rounds_over, CLOSE_S)
        if self._tasks:
            tasks = list(self._tasks.values())
            await asyncio.wait(tasks, timeout=max(0.0, ends_s - time.monotonic()))
            await end_tasks(task for task in tasks if not task.done())

    async def _round(self) -> float:
        """Begins due invocations within capacity; returns the time until the next round."""
        try:
            await self._clock.refresh()
            now_unix_ms = self._clock.now_unix_ms()
            due = await self._invocations.due(now_unix_ms, TOGETHER_MAX + len(self._tasks))
            self._view.async_calls = due.counts
            await self._begin_runs(due.runs)
            await self._begin_timers(due.timers, now_unix_ms)
        except REDIS_ERRORS as error:
            log.debug("invocations wait for redis", extra={"error": str(error)})
            return LOOK_S
        wait_s = LOOK_S if due.next_unix_ms is None else (due.next_unix_ms - now_unix_ms) / 1000
        return max(0.01, min(LOOK_S, wait_s))

    async def _begin_runs(self, runs: dict[FunctionName, list[InvocationId]]) -> None:
        waiting = {name: deque(one for one in due if one not in self._tasks) for name, due in runs.items()}
        limits = {name: self._limit(name) for name in waiting}
        self._last_begun = {name: self._last_begun.get(name, 0) for name in waiting}
        while not self._draining:
            running = Counter(name for name in self._functions.values() if name is not None)
            names = [name for name, due in waiting.items() if due]
            function = next_function(names, running, limits, self._last_begun)
            if function is None:
                return
            entry = await self._due_entry(function, waiting[function].popleft())
            if entry is not None:
                self._begin(function, entry)
                self._begun += 1
                self._last_begun[function] = self._begun

    async def _begin_timers(self, invocations: list[InvocationId], now_unix_ms: int) -> None:
        """Begins what is due regardless of capacity. A receiver that does not answer delays no other function's."""
        for invocation in invocations:
            entry = await self._due_entry(None, invocation) if invocation not in self._tasks else None
            if entry is None:
                continue
            if lifecycle.next_step(entry.progress, now_unix_ms) == "deliver":
                function = entry.envelope.function
                turn = delivery_turn(function, Counter(name for name, _ in self._deliveries.values()))
                if turn == "wait":
                    return
                if turn == "later":
                    await self._put_off(function, invocation, now_unix_ms)
                    continue
                self._deliveries[invocation] = (function, time.monotonic())
            self._begin(None, entry)

    async def _put_off(self, function: FunctionName, invocation: InvocationId, now_unix_ms: int) -> None:
        """Puts a due delivery of a function off that has no place for it: those of others are found behind it."""
        now_s = time.monotonic()
        begun_s = [since_s for name, since_s in self._deliveries.values() if name == function]
        due_s = later_s(begun_s, self._put_off_s.get(function, 0.0), now_s)
        self._put_off_s = {name: one_s for name, one_s in self._put_off_s.items() if one_s > now_s} | {function: due_s}
        await self._invocations.look_later(invocation, now_unix_ms + round((due_s - now_s) * 1000))
        self._wake.set()

    async def _due_entry(self, function: FunctionName | None, invocation: InvocationId) -> StoredInvocation | None:
        """A due invocation, for a run of its function or a timer; None if it has no step that is due here."""
        try:
            entry = await self._invocations.get(invocation)
        except FleetError as error:  # of another release, whose gateways run it
            self._view.unreadable.note("async invocation", invocation, error.message)
            return None
        if entry is None:
            await self._invocations.forget(function, invocation)
            return None
        if entry.progress.status == "running" and not self._seems_abandoned(entry):
            return None
        return entry

    def _begin(self, function: FunctionName | None, entry: StoredInvocation) -> None:
        """Begins the due step of an invocation."""
        invocation = entry.envelope.id
        task = asyncio.get_running_loop().create_task(self._step(entry))
        self._tasks[invocation] = task
        self._functions[invocation] = function
        task.add_done_callback(lambda _: self._done(invocation))

    def _done(self, invocation: InvocationId) -> None:
        self._tasks.pop(invocation, None)
        self._functions.pop(invocation, None)
        self._deliveries.pop(invocation, None)
        self._wake.set()

    def _limit(self, function: FunctionName) -> int:
        """Limit of one function: what its workers can serve. More would only fill the queue of synchronous calls."""
        live = self._view.live(function)
        if live is None:
            return 1
        return max(1, min(PER_FUNCTION_MAX, live.spec.scale.max * live.spec.concurrency))

    # ── one invocation ─────────────────────────────────────────────────────────────────────────────

    async def _step(self, entry: StoredInvocation) -> None:
        now_unix_ms = self._clock.now_unix_ms()
        progress, envelope = entry.progress, entry.envelope
        try:
            match lifecycle.next_step(progress, now_unix_ms):
                case "claim" if not self._draining:
                    await self._execute(entry)
                case "expire":
                    expired = lifecycle.expired(progress, envelope, now_unix_ms)
                    await self._invocations.write(entry, expired, publish="expired")
                case "cancel":
                    cancelled = lifecycle.ended(progress, envelope, lifecycle.RunOutcome(), now_unix_ms)
                    await self._invocations.write(entry, cancelled, publish="cancelled")
                case "deliver":
                    await self._webhooks.deliver(entry)
                case _:
                    pass
        except REDIS_ERRORS as error:
            log.warning("an invocation waits for redis", extra={"invocation": envelope.id, "error": str(error)})
            await asyncio.sleep(RETRY_S)
        except FleetError as error:
            log.warning("an invocation waits", extra={"invocation": envelope.id, "error": error.message})
        except Exception:
            log.exception("an invocation could not be processed", extra={"invocation": envelope.id})

    def _seems_abandoned(self, entry: StoredInvocation) -> bool:
        """Checks whether the lease of a run that is due has not been renewed while this process looked at it."""
        since_ms = self._unchanged.ms(entry.envelope.id, entry.raw)
        if since_ms < lifecycle.UNCHANGED_MS:
            return False
        self._unchanged.forget(entry.envelope.id)
        return True

    async def _execute(self, entry: StoredInvocation) -> None:
        now_unix_ms = self._clock.now_unix_ms()
        fresh_run = entry.progress.status == "running" and await self._is_closed(entry)
        progress = entry.progress
        if progress.status == "running":  # at a gateway that is gone, and perhaps at a worker
            progress = lifecycle.waits_anew(progress, entry.envelope, now_unix_ms)
        claimed = lifecycle.claimed(progress, self._id, now_unix_ms, fresh_run=fresh_run)
        mine = await self._invocations.write(entry, claimed, publish="running")
        if mine is None:
            return
        execution = Execution(mine, self._client, self._invocations, self._payloads, self._gateway, self._clock)
        self._executions[mine.envelope.id] = execution
        try:
            await execution.run()
        finally:
            del self._executions[mine.envelope.id]

    async def _is_closed(self, entry: StoredInvocation) -> bool:
        """Checks whether the ledger has closed a dead gateway's run as failed and free of charge."""
        try:
            trace = await self._trace(run_id(entry.envelope.id, entry.progress.runs))
        except FleetError:
            return False
        return trace.row.status >= 400 and trace.row.cost_nusd == 0
