"""Leader lease of the scheduler, and its fenced writes, which are rejected once another controller schedules."""

from __future__ import annotations

import secrets

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import NodeId

from ..schemas.history import SystemEvent
from ..state.records import Failure, VersionKey
from ..state.redis_client import Script
from ..state.sync import StateSync
from .step import Step
from .worker_pool import FAILURES_TO_BREAK

PLAN_KEPT_S = 24 * 3600
"""Expiry of plans, the same as that of traces."""
LEADER_LEASE_MS = 2_000
"""Length of the lease, four renewals: a busy machine keeps its scheduler, a dead one is replaced within two seconds."""
MESSAGE_CHARS = 300
FAILURES_KEPT = 5_000
"""Failed starts in the history, about: two a row of failures, so more than a month of most systems."""


class LeaderLease:
    def __init__(self, client: redis.Redis, state: StateSync) -> None:
        self.view = state.view
        self._client = client
        self._state = state
        self._seen = 0
        """The greatest fencing token that this controller had: one that Redis gives later is above it."""
        self._lease = Script(client, "leader_lease")
        self._apply = Script(client, "apply_scheduler_step")

    async def acquire_or_renew(self, gateway: str, fence: int) -> int:
        """Acquires or renews the lease. Returns the fencing token for writes, 0 if another controller schedules."""
        seen, chance = max(self._seen, fence), secrets.randbelow(1000)
        answer = await self._lease([keys.LEADER, keys.FENCE], [gateway, LEADER_LEASE_MS, fence, seen, chance])
        self.view.leader = answer[1].decode()
        self._seen = max(seen, int(answer[0]))
        return int(answer[0])

    async def catch_up(self) -> None:
        """Reads what earlier schedulers have written, of which publications may be lost or under way. After the lease
        was acquired they write nothing more. Errors: REDIS_ERRORS."""
        await self._state.resync(functions=False)

    async def release(self, gateway: str) -> None:
        await self._lease([keys.LEADER, keys.FENCE], [gateway, 0, 0, 0, 0])

    async def write(self, step: Step, fence: int) -> bool:
        """Writes a step to Redis and to the view; False, and nothing is written, if the fencing token is old."""
        names: list[str] = [keys.FENCE, keys.FAILING]
        args: list[str | bytes | int] = [fence]
        for key, failure in step.failures:
            names.append(keys.failures(key.name, key.version))
            if failure is None:
                args += ["clear", "", "", keys.EVENTS_FUNCTIONS, key.name]
            else:
                value = f"{failure.count}|{failure.last_unix_ms}"
                args += ["fail", msgspec.json.encode(failure.error), value, keys.EVENTS_FUNCTIONS, key.name]
        for order in step.orders:
            raw = msgspec.json.encode(order)
            names.append(keys.desired(order.node))
            args += ["set", order.worker, raw, keys.events_desired(order.node), raw]
        for order in step.deleted_orders:
            names.append(keys.desired(order.node))
            args += ["del", order.worker, "", "", ""]
        for copy in step.pool.copies:
            raw = msgspec.json.encode(copy)
            names.append(keys.copies(copy.node))
            args += ["set", copy.checkpoint, raw, keys.events_copies(copy.node), raw]
        for copy in step.pool.deleted_copies:
            names.append(keys.copies(copy.node))
            args += ["del", copy.checkpoint, "", "", ""]
        for made in step.pool.peer_keys:
            node = NodeId(made.record.node)
            names += [keys.PEER_KEYS, keys.peer_key(node)]
            args += ["set", node, msgspec.json.encode(made.record), "", ""]
            args += ["put", "", msgspec.json.encode(made.sealed), "", ""]
        if len(names) == 2:
            return True
        async with self._state.writes:
            if not await self._apply(names, args):
                return False
            self._written(step)
        await self._keep_records(step)
        return True

    async def _keep_records(self, step: Step) -> None:
        """Writes what is only read by people: plans, and failed starts for the history."""
        events = [failure_event(key, failure) for key, failure in step.failures if failure is not None]
        if not step.plans and not any(events):
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for worker, plan in step.plans.items():
                pipe.set(keys.plan(worker), msgspec.json.encode(plan), ex=PLAN_KEPT_S)
            for event in filter(None, events):
                pipe.xadd(
                    keys.HISTORY_FAILURES,
                    {b"event": msgspec.json.encode(event)},
                    maxlen=FAILURES_KEPT,
                    approximate=True,
                )
            await pipe.execute()

    def _written(self, step: Step) -> None:
        view = self.view
        for key, failure in step.failures:
            if failure is None:
                view.failures.pop(key, None)
            else:
                view.failures[key] = failure
        for order in step.orders:
            view.put_order(order)
        for order in step.deleted_orders:
            view.drop_order(order.worker)
        for copy in step.pool.copies:
            view.copies[copy.node, copy.checkpoint] = copy
        for copy in step.pool.deleted_copies:
            view.copies.pop((copy.node, copy.checkpoint))
        view.peer_keys |= {NodeId(made.record.node): made.record for made in step.pool.peer_keys}
        if step.failures:
            view.changed()


def failure_event(key: VersionKey, failure: Failure) -> SystemEvent | None:
    """The event of a failed start: the first of some in a row, and the one that breaks the version. Pure."""
    if failure.count not in (1, FAILURES_TO_BREAK):
        return None
    what = "a start failed" if failure.count == 1 else "a start failed, and no more are tried for now"
    return SystemEvent(
        unix_ms=failure.last_unix_ms,
        kind="failure",
        function=key.name,
        version=key.version,
        text=f"{what}: {failure.error.message[:MESSAGE_CHARS]}",
    )
