"""Retention: deletes expired invocations, and recovers those that Redis lost. Runs under the scheduler's lease.

A killed Redis may lose its last writes. Accepted calls are in the object store before they are in Redis, so each new
run of Redis is compared with the store: an invocation that only the store has is queued again, or, if it was answered,
can be read again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError, Unavailable
from fleetstart.runtime.contract.ids import InvocationId
from fleetstart.runtime.contract.process.tasks import in_parallel
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER

from ..state.invocation_records import Answer, Envelope, Progress
from ..state.redis_client import REDIS_ERRORS
from .gateway_call import ERROR_MAX_BYTES, error_in
from .idempotency.store import IdempotencyKeys
from .store import lifecycle
from .store.invocations import InvocationStore
from .store.lifecycle import RunOutcome
from .store.payloads import REQUEST, PayloadStore
from .store.redis_clock import RedisClock

log = logging.getLogger(__name__)

EVERY_S = 1.0
BATCH = 1_000
DELETES = 16
"""Deletions under way: a store answers in 10 to 50 ms, so that several hundred calls a second are kept up with."""
GRACE_MS = 5_000
"""Age below which objects may belong to a call or a response that is being written."""
COMPARE_EVERY_S = 600.0
"""Interval of comparisons without a restart of Redis: finds what a killed controller left half done."""


class RetentionSweeper:
    def __init__(
        self,
        client: redis.Redis,
        invocations: InvocationStore,
        payloads: PayloadStore,
        claims: IdempotencyKeys,
        fence: Callable[[], int],
    ) -> None:
        self._client = client
        self._invocations = invocations
        self._payloads = payloads
        self._claims = claims
        self._fence = fence
        self._clock = RedisClock(client)
        self._compared_s = time.monotonic()
        self._fresh: tuple[str, float] | None = None
        """A run of Redis that is not compared yet, and the time to do so, when young objects are old enough."""
        self._young: frozenset[InvocationId] = frozenset()
        """Invocations that the first comparison with that run left, as too young by the clocks of store and Redis,
        which may be apart: the second one, a grace period later, takes them."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._fence():
                continue
            try:
                await self.look()
            except REDIS_ERRORS as error:
                log.debug("nothing is swept without redis", extra={"error": str(error)})
            except FleetError as error:
                log.warning("invocations are not swept", extra={"error": error.message})

    async def look(self) -> None:
        """One round, by Redis' clock: this machine's may be hours ahead, and what is deleted is lost."""
        await self._clock.refresh()
        await self.compare_if_due()
        now_unix_ms = self._clock.now_unix_ms()
        while await self.sweep(now_unix_ms) == BATCH and self._fence():
            pass
        await self._claims.sweep(now_unix_ms)

    async def sweep(self, now_unix_ms: int) -> int:
        """Deletes expired invocations; returns their number. One that has not ended by then never will."""
        overdue = await self._invocations.overdue(now_unix_ms, BATCH)
        swept: list[InvocationId] = []

        async def sweep_one(invocation: InvocationId) -> None:
            try:
                entry = await self._invocations.get(invocation)
            except Unavailable:
                return  # of another release, which sweeps it
            await self._payloads.drop(invocation)
            if entry is None:
                await self._invocations.forget(None, invocation)
            else:
                await self._invocations.delete(entry)
            swept.append(invocation)

        await in_parallel(DELETES, overdue, sweep_one)
        return len(swept)

    async def compare_if_due(self) -> None:
        """Compares store and Redis once for each run of Redis, and every `COMPARE_EVERY_S`."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            pipe.get(keys.INVOCATIONS_ADOPTED)
            server, known = await pipe.execute()
        run, now_s = str(server["run_id"]), time.monotonic()
        if known is not None and known.decode() == run:
            self._fresh = None
            if now_s - self._compared_s < COMPARE_EVERY_S:
                return
        elif self._fresh is None or self._fresh[0] != run:
            self._fresh, self._young = (run, now_s + GRACE_MS / 1000 + 1.0), frozenset()
            return
        elif now_s < self._fresh[1]:
            return
        first = self._fresh is not None and not self._young
        await self.compare(self._clock.now_unix_ms(), grace_ms=GRACE_MS)
        if first and self._young:
            self._fresh = (run, now_s + GRACE_MS / 1000 + 1.0)
            return
        self._young = frozenset()
        self._compared_s = now_s
        await self._client.set(keys.INVOCATIONS_ADOPTED, run)

    async def compare(self, now_unix_ms: int, *, grace_ms: int) -> int:
        """Restores invocations that the store has and Redis does not; returns their number."""
        adopted, young = 0, set[InvocationId]()
        for invocation, objects in (await self._payloads.contents()).items():
            try:
                if await self._invocations.get(invocation) is not None:
                    continue
            except Unavailable:
                continue  # it is there, though this release cannot read it
            if max(objects.values()) > now_unix_ms - grace_ms and invocation not in self._young:
                young.add(invocation)
                continue
            envelope = await self._envelope(invocation) if REQUEST in objects else None
            progress = await self._progress(envelope, objects, now_unix_ms) if envelope is not None else None
            if envelope is None or progress is None:
                await self._payloads.drop(invocation)
            elif await self._invocations.create(envelope, progress):
                adopted += 1
                log.warning("an invocation that redis lost is restored", extra={"invocation": invocation})
        self._young = frozenset(young)
        return adopted

    async def _envelope(self, invocation: InvocationId) -> Envelope | None:
        try:
            kept = await self._payloads.request(invocation)
        except FleetError as error:
            log.warning("a stored request is dropped", extra={"invocation": invocation, "error": error.message})
            return None
        return kept[0] if kept is not None else None

    async def _progress(self, envelope: Envelope, objects: dict[str, int], now_unix_ms: int) -> Progress | None:
        """The state that follows from the stored objects; None if the invocation has expired."""
        claims = [int(name.partition("-")[2]) for name in objects if name.startswith("answer-")]
        progress = lifecycle.accepted(envelope)
        if claims:
            claim = max(claims)
            kept = await self._payloads.answer(envelope.id, claim)
            answered = msgspec.structs.replace(progress, claims=claim)
            outcome = _outcome(*kept) if kept is not None else RunOutcome()
            progress = lifecycle.ended(answered, envelope, outcome, objects[f"answer-{claim}"])
        elif envelope.origin == "sync":
            return None
        return progress if lifecycle.kept_until_unix_ms(progress, envelope) > now_unix_ms else None


def _outcome(answer: Answer, body: bytes) -> RunOutcome:
    """The outcome of a stored response. One of the platform, such as 503, is no answer: the call is to run again."""
    code = dict(answer.headers).get(ERROR_HEADER, "")
    return RunOutcome(answer=answer, error=error_in(code, answer.http_status, body[:ERROR_MAX_BYTES]))
