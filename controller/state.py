"""Everything that this process reads from Redis for its view, and the scheduler's fenced writes.

Two ways in: publications, at once, and a full read once a second and after each reconnect, which makes up for
lost ones. While Redis is away nothing ends: the view stays, `view.redis` tells why, and the next full read mends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, TypeVar, cast

import msgspec
import redis.asyncio as redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from fleetstart.controller.access.table import read_table
from fleetstart.controller.learning import read_measures
from fleetstart.controller.reconcile import Step
from fleetstart.controller.records import Failure, FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.versions import needed
from fleetstart.controller.view import NodeSeen, View
from fleetstart.runtime.contract import keys
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.reports import GatewayReport, NodeReport

log = logging.getLogger(__name__)

RESYNC_S = 1.0
PLAN_KEPT_S = 24 * 3600
"""As long as traces."""
LEADER_LEASE_MS = 2_000
"""Four renewals long: a busy machine keeps its scheduler, a dead one is replaced within two seconds."""
REDIS_DOWN = (RedisError, OSError, asyncio.TimeoutError)

Struct = TypeVar("Struct")


def connect(url: str) -> redis.Redis:
    """One quick second try hides a connection that broke while idle; more would only make callers wait."""
    return redis.Redis.from_url(
        url,
        socket_timeout=2.0,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 1),
        retry_on_error=[redis.ConnectionError],
    )


class Script:
    """A Lua file that loads itself again after Redis was restarted."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._text = files("fleetstart.controller").joinpath("lua", f"{name}.lua").read_text()
        self._sha = ""

    async def __call__(self, script_keys: list[str], args: list[str | bytes | int]) -> Any:
        if not self._sha:
            self._sha = await self._client.script_load(self._text)
        try:
            return await self._client.evalsha(self._sha, len(script_keys), *script_keys, *args)
        except NoScriptError:
            self._sha = ""
            return await self(script_keys, args)


class _Decoded(dict[bytes, Any]):
    """Structs by the bytes that they came from: a full read decodes only what has changed."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._next: dict[bytes, Any] = {}

    def read(self, raw: bytes) -> Any:
        """The struct, or None (and a log line) if the bytes are not one."""
        value = self.get(raw)
        if value is None:
            try:
                value = self._decoder.decode(raw)
            except msgspec.DecodeError as error:
                log.warning("an entry in Redis is not understood", extra={"error": str(error)})
                return None
        self._next[raw] = value
        return value

    def turn(self) -> None:
        """Forgets what the last full read did not see."""
        self.clear()
        self.update(self._next)
        self._next = {}


class State:
    def __init__(self, client: redis.Redis, view: View, *, monotonic_ns: Callable[[], int] = time.monotonic_ns):
        self.client = client
        self.view = view
        self._monotonic_ns = monotonic_ns
        self._lead = Script(client, "lead")
        self._schedule = Script(client, "schedule")
        self._writes = asyncio.Lock()
        """A full read and a write exclude each other: a read from before the write would undo it in the view."""
        self._resync_now = asyncio.Event()
        self._functions = _Decoded(FunctionRecord)
        self._versions = msgspec.json.Decoder(VersionRecord)
        self._nodes = _Decoded(NodeReport)
        self._orders = _Decoded(WorkerOrder)
        self._statuses = _Decoded(WorkerStatus)
        self._reports = msgspec.json.Decoder(GatewayReport)
        self._measures: dict[bytes, bytes] = {}

    # ── reading ────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._resync())

    async def _resync(self) -> None:
        while True:
            try:
                async with asyncio.timeout(5):
                    await self.resync()
            except REDIS_DOWN as error:
                self._failed(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_S if self.view.redis == "ok" else 0.1):
                    await self._resync_now.wait()
            self._resync_now.clear()

    def _failed(self, error: BaseException) -> None:
        if self.view.redis == "ok":
            log.warning("redis is away", extra={"error": str(error)})
        self.view.redis = f"{type(error).__name__}: {error}"
        for seen in self.view.nodes.values():
            seen.absent_since_ns = None
            """Nodes could not renew either: they get their grace anew."""

    async def resync(self) -> None:
        """One full read, applied at once, then listeners are told."""
        async with self._writes:
            view = self.view
            view.touched.clear()
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hgetall(keys.FUNCTIONS)
                pipe.hkeys(keys.NODES)
                pipe.get(keys.LEADER)
                pipe.hgetall(keys.MEASURES)
                pipe.hgetall(keys.KEYS)
                pipe.hgetall(keys.PROJECTS)
                pipe.hgetall(keys.SECRETS)
                functions, node_names, leader, measures, *access = await pipe.execute()
            nodes = [NodeId(name.decode()) for name in node_names]
            async with self.client.pipeline(transaction=False) as pipe:
                for node in nodes:
                    pipe.get(keys.node(node))
                    pipe.hgetall(keys.desired(node))
                    pipe.hgetall(keys.observed(node))
                answers = await pipe.execute()
            by_node = {node: answers[3 * i : 3 * i + 3] for i, node in enumerate(nodes)}
            records = {record.name: record for raw in functions.values() if (record := self._functions.read(raw))}
            await self._load_versions([key for record in records.values() for key in _needed(record)])
            view.functions = records
            view.access = read_table(access[0], access[1], access[2], view.access)
            self._apply(by_node)
            await self._load_failures()
            view.leader = leader.decode() if leader else ""
            self._apply_measures(measures)
            for cache in (self._functions, self._nodes, self._orders, self._statuses):
                cache.turn()
        view.forget_gateways(self._monotonic_ns())
        view.synced = True
        if view.redis != "ok":
            log.info("redis is read", extra={"functions": len(view.functions), "nodes": len(view.nodes)})
        view.redis = "ok"
        view.changed()

    def _apply(self, by_node: dict[NodeId, list[Any]]) -> None:
        view, now_ns = self.view, self._monotonic_ns()
        orders: dict[WorkerId, WorkerOrder] = {}
        statuses: dict[WorkerId, WorkerStatus] = {}
        for node, (lease, desired, observed) in by_node.items():
            seen = view.nodes.get(node)
            report = self._nodes.read(lease) if lease else None
            if report is not None:
                view.nodes[node] = NodeSeen(report)
            elif seen is not None and seen.absent_since_ns is None:
                seen.absent_since_ns = now_ns
            orders.update({o.worker: o for raw in desired.values() if (o := self._orders.read(raw))})
            if node in view.nodes and not view.nodes[node].lost(now_ns):
                statuses.update({s.worker: s for raw in observed.values() if (s := self._statuses.read(raw))})
        for gone in view.nodes.keys() - by_node.keys():
            del view.nodes[gone]
        for worker in (view.orders.keys() | orders.keys()) - view.touched:
            if worker in orders:
                view.orders[worker] = orders[worker]
            else:
                del view.orders[worker]
        for status in statuses.values():
            view.put_status(status, touch=False)
        for worker in view.statuses.keys() - statuses.keys() - view.touched:
            view.drop_status(worker)

    def _apply_measures(self, raw: dict[bytes, bytes]) -> None:
        if raw != self._measures:
            self._measures = raw
            self.view.node_measures, self.view.version_measures = read_measures(raw)

    async def _load_versions(self, wanted: list[VersionKey]) -> None:
        missing = [key for key in wanted if key not in self.view.versions]
        if not missing:
            return
        async with self.client.pipeline(transaction=False) as pipe:
            for key in missing:
                pipe.hget(keys.versions(key.name), str(key.version))
            for key, raw in zip(missing, await pipe.execute(), strict=True):
                if raw:
                    self.view.versions[key] = self._versions.decode(raw)

    async def _load_failures(self) -> None:
        view = self.view
        wanted = sorted(
            {key for record in view.functions.values() for key in _needed(record)}
            | {VersionKey(order.spec.name, order.version) for order in view.orders.values()}
            | view.failures.keys()
        )
        async with self.client.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.hgetall(keys.failures(key.name, key.version))
            answers = await pipe.execute()
        view.failures = {
            key: Failure(
                count=int(raw[b"count"]),
                last_unix_ms=int(raw[b"last_unix_ms"]),
                error=msgspec.json.decode(raw[b"error"], type=ErrorInfo),
            )
            for key, raw in zip(wanted, answers, strict=True)
            if raw
        }

    async def version(self, key: VersionKey) -> VersionRecord | None:
        """A version that need not be live; immutable, so read once."""
        if key not in self.view.versions:
            await self._load_versions([key])
        return self.view.versions.get(key)

    async def function(self, name: FunctionName) -> FunctionRecord | None:
        """Asks Redis itself: for a name that was deployed a moment ago through another controller."""
        raw = await cast(Awaitable[bytes | None], self.client.hget(keys.FUNCTIONS, name))
        if raw is None:
            return None
        record = msgspec.json.decode(raw, type=FunctionRecord)
        await self._load_versions(_needed(record))
        self.view.functions[name] = record
        return record

    # ── publications ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        while True:
            pubsub = self.client.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(keys.EVENTS_OBSERVED, keys.EVENTS_GATEWAYS, keys.EVENTS_FUNCTIONS)
                await pubsub.psubscribe(keys.events_desired(NodeId("*")))
                self._resync_now.set()
                await self._hear(pubsub)
            except REDIS_DOWN as error:
                self._failed(error)
                await asyncio.sleep(0.05)
            finally:
                with contextlib.suppress(*REDIS_DOWN):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _hear(self, pubsub: PubSub) -> None:
        while True:
            message = await pubsub.get_message(timeout=5.0)
            if message is not None:
                self._event(message["channel"].decode(), message["data"])

    def _event(self, channel: str, data: bytes) -> None:
        view = self.view
        try:
            if channel == keys.EVENTS_OBSERVED:
                if not view.put_status(msgspec.json.decode(data, type=WorkerStatus)):
                    return
            elif channel == keys.EVENTS_GATEWAYS:
                view.put_gateway(self._reports.decode(data), self._monotonic_ns())
            elif channel == keys.EVENTS_FUNCTIONS:
                self._resync_now.set()
                return
            else:
                order = msgspec.json.decode(data, type=WorkerOrder)
                known = view.orders.get(order.worker)
                if known is None or known.ordered_unix_ns < order.ordered_unix_ns:
                    view.put_order(order)
        except msgspec.DecodeError as error:
            log.warning("a publication is not understood", extra={"channel": channel, "error": str(error)})
            return
        view.changed()

    # ── writing ────────────────────────────────────────────────────────────────────────────────────

    async def lead(self, gateway: str, fence: int) -> int:
        """Takes or renews the scheduler's lease; the fence to write with, 0 if another one schedules."""
        answer = await self._lead([keys.LEADER, keys.FENCE], [gateway, LEADER_LEASE_MS, fence])
        self.view.leader = answer[1].decode()
        return int(answer[0])

    async def stop_leading(self, gateway: str) -> None:
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
        async with self.client.pipeline(transaction=False) as pipe:
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


def _needed(record: FunctionRecord) -> list[VersionKey]:
    return [VersionKey(record.name, version) for version in sorted(needed(record))]
