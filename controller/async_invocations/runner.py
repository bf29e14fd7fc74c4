"""Runs kept invocations: finds what is due, claims it, carries it through the gateway, writes down what came of it.

Every controller has one. A claim is a lease that is renewed while the call runs; a gateway that dies is noticed by the
others when its leases run out, and what it ran is run again: at least once, therefore, while the answer and the bill
count once (the state that they are written into names the claim; the ledger takes a run's row once).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import redis.asyncio as redis

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.process.tasks import end_tasks

from ..http.asgi import Receive, Scope, Send
from ..state.invocation_records import run_id
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .execution import Execution
from .store import lifecycle
from .store.invocations import InvocationStore, StoredInvocation
from .store.payloads import PayloadStore
from .webhooks.delivery import WebhookDelivery

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""At least so often it looks for what is due: an announcement may be lost, and leases of the dead run out."""
TOGETHER_MAX = 64
"""Executions of one gateway at one time: each holds its request and its answer in memory."""
TIMERS_MAX = 16
"""Deliveries of one gateway at one time: slow receivers keep nothing else waiting."""
PER_FUNCTION_MAX = 32
"""Of one function: others get their turn."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class InvocationRunner:
    def __init__(
        self,
        gateway_id: str,
        client: redis.Redis,
        view: View,
        book: InvocationStore,
        vault: PayloadStore,
        courier: WebhookDelivery,
        gateway: App,
        *,
        trace: Callable[[InvocationId], Awaitable[InvocationTrace]],
    ) -> None:
        self._id = gateway_id
        self._client = client
        self._view = view
        self._book = book
        self._vault = vault
        self._courier = courier
        self._gateway = gateway
        self._trace = trace
        self._wake = asyncio.Event()
        self._tasks: dict[InvocationId, asyncio.Task[None]] = {}
        self._functions: dict[InvocationId, FunctionName | None] = {}
        self._executions: dict[InvocationId, Execution] = {}
        self._closing = False
        book.on_event(self._heard)

    def _heard(self, status: str, invocation: InvocationId) -> None:
        if status == "queued" or (status != "running" and invocation not in self._tasks):
            self._wake.set()
        execution = self._executions.get(invocation)
        if execution is not None and status == "cancelling":
            execution.look()

    async def run(self) -> None:
        try:
            while not self._closing:
                wait_s = await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                self._wake.clear()
            await asyncio.Event().wait()  # nothing more is begun; whoever runs this ends it
        finally:
            await end_tasks(self._tasks.values())

    async def hand_back(self) -> None:
        """Stops what runs here, and puts it into the queue again for other gateways."""
        self._closing = True
        self._wake.set()
        for execution in self._executions.values():
            execution.hand_back()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=2.0)
            await end_tasks(late)

    async def _round(self) -> float:
        """Begins what is due and there is room for; how long to wait before the next look."""
        now_unix_ms = time.time_ns() // 1_000_000
        try:
            due = await self._book.due(now_unix_ms, TOGETHER_MAX + len(self._tasks))
            for function, invocations in due.runs.items():
                await self._begin(function, invocations, limit=self._limit(function))
            await self._begin(None, due.timers, limit=TIMERS_MAX)
        except REDIS_ERRORS as error:
            log.debug("invocations wait for redis", extra={"error": str(error)})
            return LOOK_S
        wait_s = LOOK_S if due.next_unix_ms is None else (due.next_unix_ms - now_unix_ms) / 1000
        return max(0.01, min(LOOK_S, wait_s))

    async def _begin(self, function: FunctionName | None, invocations: list[InvocationId], *, limit: int) -> None:
        """Without a function: timers, which have room of their own."""
        room = limit - Counter(self._functions.values())[function]
        if function is not None:
            room = min(room, TOGETHER_MAX - sum(1 for taken in self._functions.values() if taken is not None))
        for invocation in invocations:
            if self._closing or room <= 0:
                return
            if invocation in self._tasks:
                continue
            room -= 1
            entry = await self._book.get(invocation)
            if entry is None:
                await self._book.forget(function, invocation)
                continue
            task = asyncio.get_running_loop().create_task(self._step(entry))
            self._tasks[invocation] = task
            self._functions[invocation] = function
            task.add_done_callback(lambda _, done=invocation: self._done(done))  # type: ignore[misc]

    def _done(self, invocation: InvocationId) -> None:
        self._tasks.pop(invocation, None)
        self._functions.pop(invocation, None)
        self._wake.set()

    def _limit(self, function: FunctionName) -> int:
        """As many as its workers could serve: more would only fill the queue that calls with a caller wait in."""
        live = self._view.live(function)
        if live is None:
            return 1
        return max(1, min(PER_FUNCTION_MAX, live.spec.scale.max * live.spec.concurrency))

    # ── one invocation ─────────────────────────────────────────────────────────────────────────────

    async def _step(self, entry: StoredInvocation) -> None:
        now_unix_ms = time.time_ns() // 1_000_000
        progress, envelope = entry.progress, entry.envelope
        try:
            match lifecycle.next_step(progress, now_unix_ms):
                case "claim":
                    await self._execute(entry)
                case "expire":
                    expired = lifecycle.expired(progress, envelope, now_unix_ms)
                    await self._book.write(entry, expired, tell="expired")
                case "cancel":
                    cancelled = lifecycle.ended(progress, envelope, lifecycle.RunOutcome(), now_unix_ms)
                    await self._book.write(entry, cancelled, tell="cancelled")
                case "deliver":
                    await self._courier.deliver(entry)
                case None:
                    pass
        except REDIS_ERRORS as error:
            log.warning("an invocation waits for redis", extra={"invocation": envelope.id, "error": str(error)})
        except FleetError as error:
            log.warning("an invocation waits", extra={"invocation": envelope.id, "error": error.message})
        except Exception:
            log.exception("an invocation could not be carried on", extra={"invocation": envelope.id})

    async def _execute(self, entry: StoredInvocation) -> None:
        now_unix_ms = time.time_ns() // 1_000_000
        fresh_run = entry.progress.status == "running" and await self._is_closed(entry)
        claimed = lifecycle.claimed(entry.progress, self._id, now_unix_ms, fresh_run=fresh_run)
        mine = await self._book.write(entry, claimed, tell="running")
        if mine is None:
            return
        execution = Execution(mine, self._client, self._book, self._vault, self._gateway)
        self._executions[mine.envelope.id] = execution
        try:
            await execution.run()
        finally:
            del self._executions[mine.envelope.id]

    async def _is_closed(self, entry: StoredInvocation) -> bool:
        """Whether the run that a dead gateway had is in the ledger as one that came to nothing."""
        try:
            trace = await self._trace(run_id(entry.envelope.id, entry.progress.runs))
        except FleetError:
            return False
        return trace.row.status >= 400 and trace.row.cost_nusd == 0
