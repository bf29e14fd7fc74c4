"""One execution of a claimed invocation: its call through the gateway, the renewal of its lease, and its outcome.

Three things can stop it: a cancellation, a takeover by another gateway (then its outcome is discarded), and the
shutdown of this process, which queues it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import redis.asyncio as redis

from fleetstart.runtime.contract.errors import FleetError, StoreFailed
from fleetstart.runtime.contract.process.tasks import end_tasks, wait_at_most

from ..http.asgi import Receive, Scope, Send
from ..http.scope import StoredCall
from ..state.invocation_records import Answer, Progress, ReportedProgress
from ..state.redis_client import REDIS_ERRORS
from .gateway_call import AnswerCapture, scope_of
from .idempotency.response_recorder import replay_receive
from .progress_split import progress_in
from .store import lifecycle
from .store.event_log import EventLog
from .store.event_writer import RETRY_S, EventWriter
from .store.invocations import InvocationStore, StoredInvocation
from .store.lifecycle import RunOutcome
from .store.payloads import PayloadStore
from .store.redis_clock import RedisClock

log = logging.getLogger(__name__)

RENEW_S = lifecycle.LEASE_MS / 4000
KEEP_S = 60.0
"""How long an answer is tried to be stored before its run counts as lost: longer than a store's restart takes."""
KEEP_EVERY_S = 0.5
"""Interval of these attempts: a store that refuses writes for being busy is not to be asked more often."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Execution:
    def __init__(
        self,
        entry: StoredInvocation,
        client: redis.Redis,
        invocations: InvocationStore,
        payloads: PayloadStore,
        gateway: App,
        clock: RedisClock,
    ) -> None:
        self._clock = clock
        self._entry = entry
        self._invocations = invocations
        self._payloads = payloads
        self._gateway = gateway
        self._events = EventWriter(EventLog(client, entry.envelope.id), entry.progress.claims)
        self._reported: ReportedProgress | None = None
        self._gone = asyncio.Event()
        """Set to cancel the call, for any reason."""
        self._look = asyncio.Event()
        self._stored = StoredCall(version=entry.envelope.version)
        self._lost = False
        self._back = False

    def look(self) -> None:
        """Wakes the lease task: the invocation has changed, and may be cancelled."""
        self._look.set()

    @property
    def sent(self) -> bool:
        """The call was sent to a worker, which may have run it."""
        return self._stored.sent

    def hand_back(self) -> None:
        """Ends the run, and queues the call again. The run is free: the call's bill is that of the next one."""
        self._back = self._stored.handed_back = True
        self._gone.set()

    async def run(self) -> None:
        envelope, claim = self._entry.envelope, self._entry.progress.claims
        capture = AnswerCapture(claim, self._stored, self._gone, self._on_events)
        keeper = asyncio.get_running_loop().create_task(self._keep())
        outcome: RunOutcome | None = None
        try:
            kept = await self._payloads.request(envelope.id)
            if kept is None:
                outcome = RunOutcome(
                    error=FleetError(f"invocation {envelope.id}: its request is not in the store any more").info()
                )
            else:
                left_ms = self._entry.progress.queue_until_unix_ms - self._clock.now_unix_ms()
                self._stored.queue_ends_ns = time.monotonic_ns() + max(0, left_ms) * 1_000_000
                scope = scope_of(envelope, self._entry.progress.runs, self._stored)
                await self._gateway(scope, replay_receive(kept[1], self._gone), capture)
                ended = capture.outcome(envelope.function)
                await self._events.wait_written(self._gone)  # so that a reader who sees the end finds all events
                if ended.answer is not None:
                    await self._keep_answer(ended.answer, bytes(capture.body))
                outcome = ended  # only now: a call that is cut off while its answer is being stored is queued again
        except StoreFailed as error:
            outcome = RunOutcome(error=error.info())
        except asyncio.CancelledError:
            self._back = True
            raise
        except Exception as error:
            log.exception("an invocation failed in the gateway", extra={"invocation": envelope.id})
            outcome = RunOutcome(error=FleetError(f"{type(error).__name__} in the gateway").info())
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await end_tasks([keeper])
            await self._events.close()
            if not self._lost:
                await self._settle(outcome)

    async def _keep_answer(self, answer: Answer, body: bytes) -> None:
        """Stores the answer, trying again while the store fails: the run is billed, and another one would be as well.

        Errors: StoreFailed, after `KEEP_S` or once the call is cancelled.
        """
        ends_s = time.monotonic() + KEEP_S
        while True:
            try:
                await self._payloads.keep_answer(self._entry.envelope.id, answer, body)
                return
            except StoreFailed as error:
                if self._gone.is_set() or time.monotonic() > ends_s:
                    raise
                log.debug("an answer waits for the store", extra={"invocation": self._id, "error": error.message})
            await asyncio.sleep(KEEP_EVERY_S)

    # ── its lease ──────────────────────────────────────────────────────────────────────────────────

    async def _keep(self) -> None:
        """Renews the lease until it is lost, and cancels the call if the invocation is marked for it."""
        while True:
            await wait_at_most(self._look, RENEW_S)
            self._look.clear()
            try:
                if not await self._change(
                    lambda progress, now_unix_ms: lifecycle.renewed(progress, now_unix_ms, self._reported)
                ):
                    log.warning("another gateway has taken an invocation over", extra={"invocation": self._id})
                    self._lost = True
                    self._gone.set()
                    return
            except REDIS_ERRORS:
                continue  # no other gateway can take it over meanwhile
            if self._entry.progress.cancelling:
                self._gone.set()

    @property
    def _id(self) -> str:
        return self._entry.envelope.id

    async def _change(self, change: Callable[[Progress, int], Progress], *, publish: bool = False) -> bool:
        """Writes a transition; False if the claim was lost. Errors: REDIS_ERRORS."""
        while True:
            progress = change(self._entry.progress, self._clock.now_unix_ms())
            written = await self._invocations.write(self._entry, progress, publish=progress.status if publish else "")
            if written is not None:
                self._entry = written
                return True
            now = await self._invocations.get(self._entry.envelope.id)
            if now is None or now.progress.status != "running" or now.progress.claims != self._entry.progress.claims:
                return False
            self._entry = now

    async def _settle(self, outcome: RunOutcome | None) -> None:
        """Writes the outcome, retrying while Redis does not answer: no other gateway can claim it meanwhile."""
        billed = replace(outcome or RunOutcome(), row=self._stored.row)

        def after(progress: Progress, now_unix_ms: int) -> Progress:
            if (self._back and (outcome is None or outcome.answer is None)) and not progress.cancelling:
                sent = self._stored.sent
                waits = lifecycle.waits_anew(progress, self._entry.envelope, now_unix_ms) if sent else progress
                return lifecycle.handed_back(waits, now_unix_ms)
            last = lifecycle.renewed(progress, now_unix_ms, self._reported)
            return lifecycle.ended(last, self._entry.envelope, billed, now_unix_ms)

        while True:
            try:
                answer = outcome.answer if outcome is not None else None
                if not await self._change(after, publish=True) and answer is not None and not await self._is_kept():
                    await self._drop(answer.claim)
                return
            except REDIS_ERRORS as error:
                if self._back:  # its lease runs out instead
                    return
                log.debug("an outcome waits for redis", extra={"invocation": self._id, "error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _is_kept(self) -> bool:
        """True if the stored outcome is ours: a write that seemed to fail may have been done. Errors: REDIS_ERRORS."""
        now = await self._invocations.get(self._entry.envelope.id)
        answer = now.progress.answer if now is not None else None
        return answer is not None and answer.claim == self._entry.progress.claims

    async def _drop(self, claim: int) -> None:
        with contextlib.suppress(StoreFailed):
            await self._payloads.drop_answer(self._entry.envelope.id, claim)

    async def _on_events(self, events: list[bytes]) -> None:
        """Appends events to the log. If Redis does not answer they are delayed; all but progress is in the response."""
        self._reported = progress_in(events, time.time_ns() // 1_000_000) or self._reported
        await self._events.add(events)
