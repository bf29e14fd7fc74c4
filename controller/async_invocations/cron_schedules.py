"""Cron schedules: `schedule="*/5 * * * *"` of a live version becomes async invocations.

The holder of the scheduler's lease fires them. An invocation's id follows from the function and the time, and an id is
accepted once, so a change of leaders fires nothing twice. A time at which the store or Redis fails is tried again for a
minute. Times that passed without a leader are skipped and logged.
The expression is evaluated by cronsim, daylight saving included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError, InvalidSpec, StoreFailed, Unavailable
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName, InvocationId
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.worker_headers import SCHEDULED_HEADER

from ..state.invocation_records import Envelope
from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .request_options import QUEUE_S, TTL_S, fingerprint
from .submit import AsyncSubmitter

log = logging.getLogger(__name__)

LOOK_S = 1.0
LATE_S = 60
"""Delay up to which a missed time is still fired: a new leader takes seconds, a sleeping machine hours."""
LOOKED_BACK = 1_000
"""Missed times that are counted, at most, for the log line."""


class ScheduleMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    schedule: str
    timezone: str = ""
    looked_unix_s: int
    """Times up to here are done: the last one that was due, or when the schedule began."""
    last_unix_s: int = 0
    """The last time that was fired."""


_MARKS = RecordDecoder(ScheduleMark)


@dataclass(frozen=True, slots=True)
class ScheduleCheck:
    """Result of checking one function's schedule: the new mark, the time to fire, the number of missed times."""

    mark: ScheduleMark
    fire_unix_s: int | None = None
    missed: int = 0
    next_unix_s: int = 0
    """The next time after the mark, if none is due."""


def check_schedule(spec: FunctionSpec) -> None:
    """Checks a spec's schedule and timezone. Errors: InvalidSpec."""
    if spec.schedule:
        next_unix_s(spec.schedule, spec.timezone, 0)
    elif spec.timezone:
        raise InvalidSpec(f"function {spec.name}: a timezone needs a schedule", hint='write schedule="0 9 * * *"')


def next_unix_s(schedule: str, timezone: str, after_unix_s: int) -> int:
    """The next time of a schedule. Errors: InvalidSpec."""
    from cronsim import CronSim, CronSimError  # late: few have schedules

    zone = _zone(timezone)
    try:
        moments = CronSim(schedule, datetime.fromtimestamp(after_unix_s, zone))
        # In an hour that a clock shows twice, cronsim begins with the first of the two, which is over.
        return next(unix_s for moment in moments if (unix_s := int(moment.timestamp())) > after_unix_s)
    except (CronSimError, StopIteration) as error:
        raise InvalidSpec(
            f"schedule {schedule[:80]!r} is not a cron expression: {error or 'it is never due'}",
            hint='minute hour day month weekday: "*/5 * * * *" is every five minutes, "0 9 * * 1-5" weekdays at nine',
        ) from error


def _zone(timezone: str) -> tzinfo:
    try:
        return ZoneInfo(timezone) if timezone else UTC
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidSpec(
            f"timezone {timezone[:80]!r} is unknown",
            hint='write a name such as "Europe/Berlin", or leave it out',
        ) from error


def check_due(spec: FunctionSpec, mark: ScheduleMark | None, now_unix_s: int) -> ScheduleCheck:
    """Determines which time to fire now. A new or changed schedule begins with its next time.

    The mark is the last time that was due, and never a time at which nothing was: a clock that was ahead for a moment
    must not silence the schedule until then. One that lies ahead by more than clocks differ is begun anew; what it
    fired is not fired again, because invocations have their time for an id.
    """
    changed = mark is None or (mark.schedule, mark.timezone) != (spec.schedule, spec.timezone)
    if mark is None or changed or mark.looked_unix_s > now_unix_s + LATE_S:
        return ScheduleCheck(ScheduleMark(schedule=spec.schedule, timezone=spec.timezone, looked_unix_s=now_unix_s))
    due: list[int] = []
    moment = mark.looked_unix_s
    for _ in range(LOOKED_BACK):
        moment = next_unix_s(spec.schedule, spec.timezone, moment)
        if moment > now_unix_s:
            break
        due.append(moment)
    if not due:
        return ScheduleCheck(mark, next_unix_s=moment)
    looked_unix_s = due[-1] if len(due) < LOOKED_BACK else max(due[-1], now_unix_s - LATE_S)
    seen = msgspec.structs.replace(mark, looked_unix_s=looked_unix_s)
    if now_unix_s - due[-1] > LATE_S:
        return ScheduleCheck(seen, missed=len(due))
    return ScheduleCheck(msgspec.structs.replace(seen, last_unix_s=due[-1]), fire_unix_s=due[-1], missed=len(due) - 1)


def schedule_id(function: FunctionName, unix_s: int) -> InvocationId:
    return InvocationId(f"cron-{function}-{datetime.fromtimestamp(unix_s, UTC):%Y%m%dT%H%M%SZ}")


class CronScheduler:
    def __init__(self, client: redis.Redis, view: View, submitter: AsyncSubmitter, fence: Callable[[], int]) -> None:
        self._client = client
        self._view = view
        self._submitter = submitter
        self._fence = fence
        self._changes = view.follow()
        self._changes.functions.update(view.functions)
        self._specs: dict[FunctionName, FunctionSpec] = {}
        """Specs of live versions that have a schedule."""
        self._waiting: dict[FunctionName, tuple[FunctionSpec, ScheduleMark, int]] = {}
        """Schedules of which nothing was due, with their next time: finding it takes longer than all else, and every
        schedule is looked at every second."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._fence() or not self._view.synced:
                continue
            try:
                await self.step(int(time.time()))
            except REDIS_ERRORS as error:
                log.debug("schedules wait for redis", extra={"error": str(error)})

    def scheduled(self) -> list[FunctionSpec]:
        """Lists the specs of live versions that have a schedule."""
        for name in self._changes.take_functions():
            live = self._view.live(name)
            if live is not None and live.spec.schedule:
                self._specs[name] = live.spec
            else:
                self._specs.pop(name, None)
        return list(self._specs.values())

    async def marks(self) -> dict[FunctionName, ScheduleMark]:
        """The marks. A schedule whose mark cannot be read begins anew: no moment has two invocations."""
        raw = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(keys.SCHEDULES))
        found: dict[FunctionName, ScheduleMark] = {}
        problems: dict[str, str] = {}
        for field, data in raw.items():
            name = FunctionName(field.decode(errors="replace"))
            try:
                found[name] = _MARKS.decode(data)
            except UnreadableRecord as error:
                problems[name] = str(error)
        self._view.unreadable.replace("schedule mark", problems)
        return found

    async def step(self, now_unix_s: int) -> list[InvocationId]:
        """Fires due schedules; returns the invocations. Errors: REDIS_ERRORS."""
        marks, fired = await self.marks(), []
        specs = self.scheduled()
        for spec in specs:
            mark = marks.get(spec.name)
            waits = self._waiting.get(spec.name)
            if waits is not None and waits[:2] == (spec, mark) and waits[1].looked_unix_s <= now_unix_s < waits[2]:
                continue
            due = check_due(spec, mark, now_unix_s)
            if due.next_unix_s:
                self._waiting[spec.name] = (spec, due.mark, due.next_unix_s)
            if due.fire_unix_s is not None:
                try:
                    invocation = await self._fire(spec, due.fire_unix_s)
                except (StoreFailed, Unavailable) as error:
                    extra = {"function": spec.name, "error": error.message}
                    log.warning("a scheduled call waits for the store or redis", extra=extra)
                    continue  # its mark stays, so the next step tries again until this time is too late
                if invocation is not None:
                    fired.append(invocation)
            if due.missed:
                log.warning("a schedule missed times", extra={"function": spec.name, "missed": due.missed})
            if due.mark != mark:
                await self._client.hset(keys.SCHEDULES, spec.name, msgspec.json.encode(due.mark).decode())
        for name in self._waiting.keys() - self._specs.keys():
            del self._waiting[name]
        gone = marks.keys() - {spec.name for spec in specs}
        if gone:
            await self._client.hdel(keys.SCHEDULES, *gone)
        return fired

    async def _fire(self, spec: FunctionSpec, unix_s: int) -> InvocationId | None:
        """Submits the invocation, before the mark is written; a rejection (a spent budget, say) skips this time.

        Errors: StoreFailed, Unavailable: the same call may be accepted a second later.
        """
        at = f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
        target = f"/fn/{spec.name}"
        envelope = Envelope(
            id=schedule_id(spec.name, unix_s),
            function=spec.name,
            method="POST",
            target=target,
            headers=[(SCHEDULED_HEADER, at)],
            body_bytes=0,
            fingerprint=fingerprint("", "POST", target, [], at.encode()),
            accepted_unix_ms=time.time_ns() // 1_000_000,
            queue_s=QUEUE_S,
            ttl_s=TTL_S,
            origin="schedule",
            source=at,
        )
        try:
            kept = await self._submitter.accept(envelope, b"")
        except (StoreFailed, Unavailable):
            raise
        except FleetError as error:
            log.warning("a scheduled call was rejected", extra={"function": spec.name, "error": error.message})
            return None
        return kept.id
