"""Synchronises the view with Redis.

By publications, at once, and by a full resync once a second and after each reconnect, which makes up for lost ones.
Functions, projects and secrets may be thousands, and seldom change: they are read again when a change was published,
after a reconnect, and once in a while.
While Redis is unavailable the view stays as it was, `view.redis` has the error, and the next resync brings it up to
date.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import cast

import redis.asyncio as redis
from redis.asyncio.client import PubSub

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import FunctionName, NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import GatewayReport
from fleetstart.runtime.contract.process.subscription import messages
from fleetstart.runtime.contract.process.tasks import run_all, wait_at_most
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from .full_resync import AnotherHistory, FullResync, needed_versions
from .records import FunctionRecord, VersionKey, VersionRecord
from .redis_client import REDIS_ERRORS
from .unreadable import unreadable
from .view import View

log = logging.getLogger(__name__)

RESYNC_S = 1.0
READ_S = 30.0
"""Timeout for a read as a whole, which a busy machine makes long; each of its commands has two seconds."""
FUNCTIONS_NS = 10_000_000_000
"""Age of the functions' last read at which they are read again, although no change was published."""


class StateSync:
    """Owner of the view's synchronisation, and of the lock between resyncs and writes."""

    def __init__(
        self,
        client: redis.Redis,
        view: View,
        *,
        requests: redis.Redis | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ):
        """`requests`: the client of what people ask for, so that the view's reads never wait for it."""
        self._client = client
        self.client = requests or client
        self.view = view
        self._monotonic_ns = monotonic_ns
        self.writes = asyncio.Lock()
        """Lock between full resyncs and writes: a read from before a write would undo it in the view."""
        self._resync_now = asyncio.Event()
        self._functions_changed = True
        """True if functions, projects or secrets may have changed since they were read."""
        self._functions_read_ns = 0
        self._full = FullResync(client, view, monotonic_ns)
        self._reports = RecordDecoder(GatewayReport)
        self._functions = RecordDecoder(FunctionRecord)
        self._statuses = RecordDecoder(WorkerStatus)
        self._orders = RecordDecoder(WorkerOrder)

    # ── full reads ─────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        await run_all(self._listen(), self._resync())

    async def _resync(self) -> None:
        while True:
            try:
                async with asyncio.timeout(READ_S):
                    await self.resync(functions=self._functions_are_due())
            except AnotherHistory as another:
                log.warning("redis may lack its last writes", extra={"reason": str(another)})
                self._resync_now.set()
            except REDIS_ERRORS as error:
                self._failed(error)
            await wait_at_most(self._resync_now, RESYNC_S if self.view.redis == "ok" else 0.1)
            self._resync_now.clear()

    def _failed(self, error: BaseException) -> None:
        if self.view.redis == "ok":
            log.warning("redis is unavailable", extra={"error": str(error)})
        self.view.redis = f"{type(error).__name__}: {error}"
        for seen in self.view.nodes.values():
            seen.absent_since_ns = None
            """Nodes could not renew their leases either: their grace period starts again."""

    def _functions_are_due(self) -> bool:
        return self._functions_changed or self._monotonic_ns() - self._functions_read_ns > FUNCTIONS_NS

    async def resync(self, *, functions: bool = True) -> None:
        """Resyncs the view and calls its listeners."""
        view = self.view
        async with self.writes:
            view.touched.clear()
            view.touched_orders.clear()
            if functions:
                self._functions_changed, begun_ns = False, self._monotonic_ns()
            try:
                await self._full.read(functions=functions)
            except BaseException as error:
                self._functions_changed = self._functions_changed or functions or isinstance(error, AnotherHistory)
                raise
            if functions:
                self._functions_read_ns = begun_ns
        view.forget_gateways(self._monotonic_ns())
        view.synced = True
        view.synced_ns = self._monotonic_ns()
        if view.redis != "ok":
            log.info(
                "redis is available, and was read", extra={"functions": len(view.functions), "nodes": len(view.nodes)}
            )
        view.redis = "ok"
        view.changed()

    async def version(self, key: VersionKey) -> VersionRecord | None:
        """Loads any version, live or not; None if there is none, or only of an earlier function of that name.

        Versions are immutable, so each is read once. Errors: Unavailable for one that this release cannot read.
        """
        function = self.view.functions.get(key.name)
        if function is not None and key.version < function.first:
            return None
        if key not in self.view.versions:
            await self._full.load_versions([key])
            error = self.view.unreadable.error("version", str(key))
            if error is not None and key not in self.view.versions:
                raise unreadable(f"version {key.version} of {key.name}", error)
        return self.view.versions.get(key)

    async def function(self, name: FunctionName) -> FunctionRecord | None:
        """Loads a function from Redis, for a name that another controller may have deployed just now.

        Errors: Unavailable for one that this release cannot read.
        """
        raw = await cast(Awaitable[bytes | None], self.client.hget(keys.FUNCTIONS, name))
        if raw is None:
            return None
        try:
            record = self._functions.decode(raw)
        except UnreadableRecord as error:
            self.view.unreadable.note("function", name, error)
            raise unreadable(f"function {name}", error) from error
        await self._full.load_versions(needed_versions(record))
        self.view.functions[name] = record
        return record

    # ── publications ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        while True:
            pubsub = self._client.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(keys.EVENTS_OBSERVED, keys.EVENTS_GATEWAYS, keys.EVENTS_FUNCTIONS)
                await pubsub.psubscribe(keys.events_desired(NodeId("*")))
                self._functions_changed = True
                self._resync_now.set()
                await self._hear(pubsub)
            except REDIS_ERRORS as error:
                self._failed(error)
                await asyncio.sleep(0.05)
            finally:
                with contextlib.suppress(*REDIS_ERRORS):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _hear(self, pubsub: PubSub) -> None:
        async for message in messages(pubsub):
            self._event(message["channel"].decode(), message["data"])

    def _event(self, channel: str, data: bytes) -> None:
        view = self.view
        try:
            if channel == keys.EVENTS_OBSERVED:
                status = self._statuses.decode(data)
                order = view.orders.get(status.worker)
                wanted = order is not None and order.wanted == "run" and status.worker not in view.statuses
                if not view.put_status(status):
                    return
                if wanted and status.state == "gone":  # its node was started again, perhaps: read before the next order
                    self._resync_now.set()
            elif channel == keys.EVENTS_GATEWAYS:
                if not view.put_gateway(self._reports.decode(data), self._monotonic_ns()):
                    return
            elif channel == keys.EVENTS_FUNCTIONS:
                self._functions_changed = True
                self._resync_now.set()
                return
            else:
                order = self._orders.decode(data)
                known = view.orders.get(order.worker)
                if known is None or known.ordered_unix_ns < order.ordered_unix_ns:
                    view.put_order(order)
        except UnreadableRecord as error:
            view.unreadable.note("publication", channel, error)
            return
        view.changed()
