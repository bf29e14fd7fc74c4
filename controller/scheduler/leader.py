"""The scheduler's lease, and its fenced writes: refused as soon as another one schedules."""

from __future__ import annotations

import asyncio

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys

from ..state.redis_client import Script
from ..state.view import View
from .reconcile import Step

PLAN_KEPT_S = 24 * 3600
"""As long as traces."""
LEADER_LEASE_MS = 2_000
"""Four renewals long: a busy machine keeps its scheduler, a dead one is replaced within two seconds."""


class LeaderLease:
    def __init__(self, client: redis.Redis, view: View, writes: asyncio.Lock) -> None:
        """`writes` keeps full reads of the view out while something is written."""
        self.view = view
        self._client = client
        self._writes = writes
        self._lead = Script(client, "leader_lease")
        self._schedule = Script(client, "apply_step")

    async def lead(self, gateway: str, fence: int) -> int:
        """Takes or renews the scheduler's lease; the fence to write with, 0 if another one schedules."""
        answer = await self._lead([keys.LEADER, keys.FENCE], [gateway, LEADER_LEASE_MS, fence])
        self.view.leader = answer[1].decode()
        return int(answer[0])

    async def stop(self, gateway: str) -> None:
        await self._lead([keys.LEADER, keys.FENCE], [gateway, 0, 0])

    async def write(self, step: Step, fence: int) -> bool:
        """Carries a step out in Redis and in the view; False if the fence is old, and nothing was written."""
        names: list[str] = [keys.FENCE]
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
        for order in step.taken_back:
            names.append(keys.desired(order.node))
            args += ["del", order.worker, "", "", ""]
        if len(names) == 1:
            return True
        async with self._writes:
            if not await self._schedule(names, args):
                return False
            self._written(step)
        await self._keep_plans(step)
        return True

    async def _keep_plans(self, step: Step) -> None:
        if not step.plans:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for worker, plan in step.plans.items():
                pipe.set(keys.plan(worker), msgspec.json.encode(plan), ex=PLAN_KEPT_S)
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
        for order in step.taken_back:
            view.drop_order(order.worker)
        if step.failures:
            view.changed()
