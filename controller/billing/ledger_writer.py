"""The ledger writer: writes rows in batches behind the calls, retries while Redis is unavailable, books each row once.

A call never waits for it: the journal keeps its row across a crash, until it is on Redis' disk. Accepted calls are
recorded in fs:open by the same writer, so that the scheduler can write rows of calls whose gateway died
(`close_abandoned`). The ledger takes an id once, and the id of a call is
the platform's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, cast

import msgspec
import redis.asyncio as redis
from redis.exceptions import NoScriptError

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.durability import on_disk
from fleetstart.runtime.contract.billing.ledger import (
    APPEND_KEYS,
    LOST_GATEWAY,
    InvocationRow,
    InvocationTrace,
    OpenInvocation,
    append_args,
    append_script,
)
from fleetstart.runtime.contract.ids import InvocationId
from fleetstart.runtime.contract.process.tasks import run_all
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.timeline import Timeline

from ..state.records import StartOutcome
from ..state.redis_client import REDIS_ERRORS, Script
from ..state.unreadable import UnreadableRecords
from .journal import Journal
from .journal_overflow import JournalOverflow
from .lost_gateways import LostGateways

log = logging.getLogger(__name__)

BATCH_S = 0.01
"""Batching interval: calls that end within it share one round trip."""
BATCH_ROWS = 500
BACKLOG_ROWS = 5_000
"""Rows of a round trip when more than a batch waits, as after an outage: Redis takes them within 100 ms."""
ROWS_HELD = 50_000
"""Maximum of rows in memory while Redis is away, some tens of MB. The rest waits in files (`journal_overflow`)."""
TRACE_KEPT_S = 24 * 3600
OUTCOMES_KEPT = 1000
"""Maximum of start outcomes waiting for the calibrator: without a scheduler, only the last of them matter."""
TRACES_HELD = 20_000
"""Maximum of timelines held while Redis is unavailable; timelines only inform people."""
PHASES_KEPT = 400
"""Phases kept of a trace, some tens of KB: a handler may call a million functions in one call, each of them a phase."""
CONFIRM_S = 0.5
DISK_MS = 1_400
"""Timeout for Redis to sync its log, which it does once a second; below the client's own timeout."""
REPLICA_MS = 300
"""Timeout for a replica to have what the log has; both together are below the client's own timeout."""
MARK_KEPT_S = 60
ABANDONED_NS = 10_000_000_000
"""Age from which a dead gateway's call is closed as lost: some leases long, since gateways may be away."""


class LedgerWriter:
    def __init__(
        self,
        client: redis.Redis,
        journal: Journal | None = None,
        unreadable: UnreadableRecords | None = None,
        overflow: JournalOverflow | None = None,
    ) -> None:
        self._client = client
        self._unreadable = unreadable
        self._open_decoder = RecordDecoder(OpenInvocation)
        self._journal = journal
        self.trace_kept_s: Callable[[InvocationRow], int] = lambda row: TRACE_KEPT_S
        """How long a call's trace is kept; 0: not at all."""
        self._overflow = overflow
        self._script = append_script()
        self._sha = ""
        self._open_script = Script(client, "open_calls")
        self._open_sha = ""
        self._open: dict[InvocationId, OpenInvocation] = {}
        self._ended: dict[InvocationId, InvocationTrace] = {}
        self._outcomes: deque[StartOutcome] = deque(maxlen=OUTCOMES_KEPT)
        self._wake = asyncio.Event()
        self._listeners: list[Callable[[InvocationRow], None]] = []
        self._trace_listeners: list[Callable[[InvocationTrace], None]] = []
        self._written: dict[InvocationId, InvocationTrace] = {}
        """Traces that Redis has, but perhaps not on its disk."""
        self._seen_open: dict[InvocationId, int] = {}
        """Monotonic time at which each open call was first seen here."""
        self._redis_run = ""
        """Run id of the Redis process that last confirmed that everything was on its disk."""
        self._replicas = 0
        """Replicas of Redis when it was last asked."""
        self._lost_gateways = LostGateways()
        self._mark = keys.durable(secrets.token_hex(6))

    def on_row(self, listener: Callable[[InvocationRow], None]) -> None:
        """Called for each call that ends here, once."""
        self._listeners.append(listener)

    def on_trace(self, listener: Callable[[InvocationTrace], None]) -> None:
        """Called for each call that ends here, once, with its timeline."""
        self._trace_listeners.append(listener)

    def opened(self, invocation: OpenInvocation) -> None:
        self._open[invocation.id] = invocation
        self._wake.set()

    def recover(self) -> None:
        """Takes over rows that earlier controllers in this home had not written yet."""
        for row in self._journal.recover() if self._journal is not None else ():
            self.ended(InvocationTrace(row=row, timeline=Timeline()))

    def ended(self, trace: InvocationTrace, outcome: StartOutcome | None = None) -> None:
        """Records the end of a call; its row is safe from a crash when this returns. An unwritten opening is dropped.

        `outcome`: the outcome of its worker's start, written with the row for the calibrator.
        """
        if outcome is not None:
            self._outcomes.append(outcome)
        self._open.pop(trace.row.id, None)
        if len(self._ended) >= TRACES_HELD:
            trace = InvocationTrace(row=trace.row, timeline=Timeline())
        known = trace.row.id in self._ended
        if len(self._ended) >= ROWS_HELD and not known and self._overflow is not None:
            self._overflow.add(trace.row)
        else:
            self._hold(trace)
        if not known:
            for listener in self._listeners:
                listener(trace.row)
            for on_trace in self._trace_listeners:
                on_trace(trace)
        self._wake.set()

    def _hold(self, trace: InvocationTrace) -> None:
        if self._journal is not None:
            self._journal.append(trace.row)
        self._ended.setdefault(trace.row.id, trace)

    def _take_overflow(self) -> None:
        """Takes rows back that found no room in memory, once there is some."""
        if self._overflow and len(self._ended) < ROWS_HELD // 2:
            for row in self._overflow.oldest():
                self._hold(InvocationTrace(row=row, timeline=Timeline()))
            self._overflow.drop_oldest()

    @property
    def pending(self) -> int:
        return len(self._open) + len(self._ended) + bool(self._overflow)

    @property
    def unwritten(self) -> Iterable[InvocationRow]:
        """Rows that are not in Redis yet."""
        return (trace.row for trace in self._ended.values())

    async def run(self) -> None:
        await run_all(self._write_batches(), self._confirm_batches())

    async def _write_batches(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_S)
            self._wake.clear()
            try:
                await self._write_batch()
            except REDIS_ERRORS as error:
                log.warning(
                    "ledger rows cannot be written: redis is unavailable",
                    extra={"rows": len(self._ended), "error": str(error)},
                )
                await asyncio.sleep(0.2)

    async def flush(self) -> None:
        """Writes all pending rows; failed ones stay pending, and those not confirmed on disk stay in the journal."""
        while self.pending:
            await self._write_batch()

    async def _confirm_batches(self) -> None:
        while True:
            await asyncio.sleep(CONFIRM_S)
            if self._written:
                with contextlib.suppress(*REDIS_ERRORS):
                    await self.confirm()

    async def confirm(self) -> None:
        """Waits until written rows are on Redis' disk, and shortens the journal; rows that may be lost are written
        again.

        With replicas, one of them must have the rows, too: it may be promoted.

        Redis may hold a write's log back for up to two seconds while its disk is slow, and a kill -9 loses it. So rows
        count as written when a later write of ours is on the disk, and the Redis that says so is the one that took
        them: it has said so before them, too.
        """
        confirmed = dict(self._written)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            pipe.set(self._mark, 1, ex=MARK_KEPT_S)
            pipe.execute_command("WAITAOF", 1, 0, DISK_MS)
            pipe.info("replication")
            pipe.execute_command("WAIT", min(1, self._replicas), REPLICA_MS)
            server, mark, on_local_disk, replication, replicas = await pipe.execute(raise_on_error=False)
        for answer in (server, mark, replication, replicas):
            if isinstance(answer, Exception):
                raise answer
        waited_for, self._replicas = min(1, self._replicas), int(replication.get("connected_slaves", 0))
        if on_disk(on_local_disk) == "not yet" or replicas < waited_for:
            return
        run, self._redis_run = self._redis_run, str(server["run_id"])
        if run != self._redis_run:  # also those that the earlier one took while this answer was under way
            for name, trace in (confirmed | self._written).items():
                self._ended.setdefault(name, trace)
            self._written.clear()
            self._wake.set()
        for name, trace in confirmed.items():
            if self._written.get(name) is trace:
                del self._written[name]
        if self._journal is not None:
            await self._journal.settle(
                lambda: [trace.row for trace in (*self._ended.values(), *self._written.values())]
            )

    async def _write_batch(self) -> None:
        self._take_overflow()
        most = BACKLOG_ROWS if len(self._ended) > BATCH_ROWS else BATCH_ROWS
        opened = list(islice(self._open.values(), BATCH_ROWS))
        ended = list(islice(self._ended.values(), most))
        outcomes = list(self._outcomes)
        try:
            await self._write(opened, ended, outcomes)
        except BaseException:
            self._wake.set()
            raise
        for invocation in opened:
            if self._open.get(invocation.id) is invocation:
                del self._open[invocation.id]
        for trace in ended:
            if self._ended.get(trace.row.id) is trace:
                del self._ended[trace.row.id]
                self._written[trace.row.id] = trace
        for outcome in outcomes:
            with contextlib.suppress(ValueError):  # others have pushed it out meanwhile
                self._outcomes.remove(outcome)
        if self.pending:
            self._wake.set()

    async def _write(
        self, opened: list[OpenInvocation], ended: list[InvocationTrace], outcomes: list[StartOutcome]
    ) -> None:
        if not self._sha:
            self._open_sha = await self._open_script.load()
            self._sha = await self._client.script_load(self._script)
        if not self._redis_run:
            self._redis_run = str((await self._client.info("server"))["run_id"])
        run = self._redis_run
        async with self._client.pipeline(transaction=False) as pipe:
            if opened:
                named = [part for call in opened for part in (call.id, msgspec.json.encode(call))]
                pipe.evalsha(self._open_sha, 2, keys.OPEN, keys.LEDGER_IDS, *named)
            for trace in ended:
                self._append(pipe, trace.row)
                # Of a row from a journal only the row is left: its trace may have been written before.
                only_new = not trace.timeline.phases
                kept_s = self.trace_kept_s(trace.row)
                if kept_s:
                    pipe.set(keys.trace(trace.row.id), msgspec.json.encode(bounded(trace)), ex=kept_s, nx=only_new)
            if outcomes:
                pipe.rpush(keys.OUTCOMES, *map(msgspec.json.encode, outcomes))
                pipe.ltrim(keys.OUTCOMES, -OUTCOMES_KEPT, -1)
            try:
                await pipe.execute()
            except NoScriptError as error:
                self._sha = ""
                raise redis.ConnectionError("redis was restarted") from error
        if run != self._redis_run:  # this answer was under way when a later Redis confirmed what it has
            raise redis.ConnectionError("redis was restarted")

    def _append(self, pipe: Any, row: InvocationRow) -> None:
        pipe.evalsha(self._sha, len(APPEND_KEYS), *APPEND_KEYS, *append_args(row))

    async def close_abandoned(self, *, own: str, now_ns: int) -> int:
        """Closes old calls of lost gateways with a row as lost; returns their number. `own`: id of this gateway."""
        raw = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(keys.OPEN))
        calls = self._open_calls(raw)
        named = sorted({call.gateway for call in calls} | {own})
        async with self._client.pipeline(transaction=False) as pipe:
            for name in named:
                pipe.exists(keys.gateway(name))
            alive = {name for name, there in zip(named, await pipe.execute(), strict=True) if there}
        gone = self._lost_gateways.look(set(named), alive, own=own, now_ns=now_ns)
        # Not by when they were accepted: that is told by a clock which steps.
        self._seen_open = {call.id: self._seen_open.get(call.id, now_ns) for call in calls}
        lost = [call for call in calls if call.gateway in gone and now_ns - self._seen_open[call.id] >= ABANDONED_NS]
        for call in lost:
            self.ended(InvocationTrace(row=_lost_row(call), timeline=Timeline()))
        if lost:
            log.warning("calls of lost gateways are closed", extra={"calls": len(lost), "gateways": sorted(gone)})
            self._wake.set()
        return len(lost)

    def _open_calls(self, raw: dict[bytes, bytes]) -> list[OpenInvocation]:
        """The open calls. Those that cannot be read are left to the release that wrote them."""
        found: list[OpenInvocation] = []
        problems: dict[str, str] = {}
        for name, value in raw.items():
            try:
                found.append(self._open_decoder.decode(value))
            except UnreadableRecord as error:
                problems[name.decode(errors="replace")] = str(error)
        if self._unreadable is not None:
            self._unreadable.replace("open call", problems)
        return found


def bounded(trace: InvocationTrace) -> InvocationTrace:
    """The trace without the middle of its timeline, if it has more phases than are kept."""
    phases = trace.timeline.phases
    if len(phases) <= PHASES_KEPT:
        return trace
    half = PHASES_KEPT // 2
    kept = Timeline(origin_unix_ns=trace.timeline.origin_unix_ns, phases=[*phases[:half], *phases[-half:]])
    return msgspec.structs.replace(trace, timeline=kept)


def _lost_row(call: OpenInvocation) -> InvocationRow:
    return InvocationRow(
        id=call.id,
        function=call.function,
        version=call.version,
        status=502,
        error=LOST_GATEWAY,
        accepted_unix_ms=call.accepted_unix_ms,
        queue_ms=0,
        billed_ms=0,
        key=call.key,
        project=call.project,
        parent=call.parent,
        caller=call.caller,
        request_id=call.request_id,
        tags=call.tags,
        memory_bytes=0,
        cost_nusd=0,
        attempts=0,
    )
