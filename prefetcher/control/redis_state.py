"""The node's Redis operations: reads and writes of structs, without retries and without decisions.

Every call may raise one of `REDIS_ERRORS`; the caller decides when to retry. Orders that cannot be decoded are
logged and skipped: one broken order must not keep the node from the others.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, WatchError

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.durability import on_disk
from fleetstart.runtime.contract.billing.ledger import APPEND_KEYS, LogLine, PhaseRow, append_args, append_script
from fleetstart.runtime.contract.billing.prices import PriceSheet, in_force, read_sheets
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import NotFound, Unavailable
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.volume import VolumeRecord, VolumeVersion, volume_name, with_version
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder, SealedPeerKey
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.node.sealed_secrets import Sealed
from fleetstart.runtime.contract.process.subscription import messages
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.sizes import MIB

log = logging.getLogger(__name__)

LEASE_MS = 3000
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
FSYNC_WAIT_MS = 2500
"""Longest wait for Redis to sync its log to disk, which it does once a second."""
LOG_LINES_KEPT = 10_000
"""Log lines kept of one function."""
LOG_BYTES_KEPT = 8 * MIB
"""Log bytes kept of one function: 10,000 lines of 800 bytes."""
PROJECT_LOG_BYTES_KEPT = 64 * MIB
"""Log bytes kept of all functions of a project. Who writes beyond them loses lines of its own."""
CROWDED_LOG_BYTES_KEPT = MIB // 4
"""Log bytes that a function keeps also in a project without room: enough for the last traceback."""

PUBLISH_TRIES = 20
"""Attempts to publish a version of a volume, each of which another change can spoil."""

EVENTS = ("subscribe", "message")
REDIS_ERRORS = (RedisError, OSError)
"""Errors of a Redis that is down, restarting or loading."""


def connect(url: str) -> redis.asyncio.Redis:
    """A client without retries: these are the caller's, since hidden ones would hide how long Redis has been away."""
    return redis.asyncio.Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
    )


@cache
def _append_logs_script() -> str:
    """The Lua that appends lines of logs; KEYS and ARGV are documented at its top."""
    return files(__package__).joinpath("append_logs.lua").read_text()


class NodeState:
    """The state of one node in Redis. Closes the client."""

    def __init__(self, client: redis.asyncio.Redis, node: NodeId) -> None:
        self._node = node
        self._redis: Any = client
        self._append = append_script()
        self._append_logs = _append_logs_script()
        self._orders = RecordDecoder(WorkerOrder)
        self._copies = RecordDecoder(CopyOrder)
        self._reports = RecordDecoder(NodeReport)

    async def read_report(self) -> NodeReport | None:
        data = await self._redis.get(keys.node(self._node))
        try:
            return self._reports.decode(data) if data else None
        except UnreadableRecord:
            return None

    async def lease_left_ms(self) -> int:
        """Time until the lease under this node's name expires; 0 if there is none."""
        return max(0, int(await self._redis.pttl(keys.node(self._node))))

    async def delete_statuses(self) -> None:
        await self._redis.delete(keys.observed(self._node))

    async def read_orders(self) -> dict[WorkerId, WorkerOrder]:
        found: dict[WorkerId, WorkerOrder] = {}
        for worker, data in (await self._redis.hgetall(keys.desired(self._node))).items():
            order = self._decode(data)
            if order is not None and order.worker == worker.decode(errors="replace"):
                found[order.worker] = order
        return found

    async def orders(self) -> AsyncIterator[WorkerOrder | None]:
        """Yields orders as they are published. Yields None first, once the subscription stands: time for a full
        read."""
        pubsub = self._redis.pubsub()
        try:
            await pubsub.subscribe(keys.events_desired(self._node))
            async for message in messages(pubsub):
                if message["type"] == "subscribe":
                    yield None
                elif message["type"] == "message" and (order := self._decode(message["data"])) is not None:
                    yield order
        finally:
            await pubsub.aclose()

    async def read_copies(self) -> dict[CheckpointId, CopyOrder]:
        found: dict[CheckpointId, CopyOrder] = {}
        for checkpoint, data in (await self._redis.hgetall(keys.copies(self._node))).items():
            try:
                order = self._copies.decode(data)
            except UnreadableRecord as error:
                log.error("cannot decode an order for a copy", extra={"error": str(error)})
                continue
            if order.node == self._node and order.checkpoint == checkpoint.decode(errors="replace"):
                found[order.checkpoint] = order
        return found

    async def copy_events(self) -> AsyncIterator[None]:
        """Yields when an order for a copy was published, and once the subscription stands."""
        pubsub = self._redis.pubsub()
        try:
            await pubsub.subscribe(keys.events_copies(self._node))
            async for message in messages(pubsub):
                if message["type"] in EVENTS:
                    yield
        finally:
            await pubsub.aclose()

    async def written_workers(self) -> list[WorkerId]:
        """The workers of which Redis has a status of this node."""
        names = await self._redis.hkeys(keys.observed(self._node))
        return [WorkerId(name.decode(errors="replace")) for name in names]

    async def write_statuses(self, changes: Mapping[WorkerId, WorkerStatus | None]) -> None:
        """Writes and publishes statuses together; None deletes one."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker, status in changes.items():
                if status is None:
                    pipe.hdel(keys.observed(self._node), worker)
                    continue
                data = msgspec.json.encode(status)
                pipe.hset(keys.observed(self._node), worker, data)
                pipe.publish(keys.EVENTS_OBSERVED, data)
            await pipe.execute()

    async def renew(self, report: NodeReport) -> bytes:
        """Writes the node's lease; returns what was written."""
        data = msgspec.json.encode(report)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(keys.node(self._node), data, px=LEASE_MS)
            pipe.hset(keys.NODES, self._node, "1")
            await pipe.execute()
        return data

    async def write_logs(self, lines: Sequence[tuple[FunctionName, LogLine]]) -> None:
        by_function: dict[FunctionName, list[bytes]] = {}
        for function, line in lines:
            by_function.setdefault(function, []).append(msgspec.json.encode(line))
        limits = (LOG_LINES_KEPT, LOG_BYTES_KEPT, PROJECT_LOG_BYTES_KEPT, CROWDED_LOG_BYTES_KEPT)
        async with self._redis.pipeline(transaction=False) as pipe:
            for function, encoded in by_function.items():
                owned = (keys.logs(function), keys.log_bytes(project_of(function)))
                pipe.eval(self._append_logs, len(owned), *owned, function, *limits, keys.LOGS, *encoded)
            await pipe.execute()

    async def write_rows(self, rows: Sequence[PhaseRow], *, durably: bool = True) -> None:
        """Appends rows to the ledger. Returns when they are on Redis' disk: a Redis killed before may have lost
        them."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for row in rows:
                pipe.eval(self._append, len(APPEND_KEYS), *APPEND_KEYS, *append_args(row))
            pipe.execute_command("WAITAOF", 1 if durably else 0, 0, FSYNC_WAIT_MS)
            *answers, waited = await pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        if on_disk(waited) == "not yet" and durably:
            raise TimeoutError(f"{len(rows)} rows are not on Redis' disk after {FSYNC_WAIT_MS} ms")

    async def read_rates(self, now_unix_ms: int) -> tuple[PriceSheet, frozenset[WorkerId]]:
        """The price sheet in force, and the workers (of all nodes) whose idle time is billed by it."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hvals(keys.PRICES)
            pipe.hkeys(keys.KEPT)
            raw, kept = await pipe.execute()
        try:
            sheets = read_sheets(raw)
        except UNDECODABLE as error:
            log.error("cannot decode a price sheet", extra={"error": str(error)})
            sheets = []
        return in_force(sheets, now_unix_ms), frozenset(WorkerId(name.decode(errors="replace")) for name in kept)

    async def read_peer_key(self, epoch: str) -> Sealed | None:
        """The sealed key of grants to read from this node, of its present epoch."""
        data = await self._redis.get(keys.peer_key(self._node))
        try:
            found = msgspec.json.decode(data, type=SealedPeerKey) if data else None
        except UNDECODABLE as error:
            log.error("cannot decode the key of peers' grants", extra={"error": str(error)})
            return None
        return found.sealed if found is not None and found.epoch == epoch else None

    async def volume(self, project: str, name: str) -> VolumeRecord | None:
        data = await self._redis.hget(keys.VOLUMES, volume_name(project, name))
        return msgspec.json.decode(data, type=VolumeRecord) if data else None

    async def publish_volume(self, project: str, name: str, base: int, version: VolumeVersion) -> VolumeRecord:
        """Adds a version to a volume's record; returns the record. Files that the newest version has make none.

        Errors: NotFound, Conflict, InvalidInput, Unavailable.
        """
        field = volume_name(project, name)
        for _ in range(PUBLISH_TRIES):
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(keys.VOLUMES)
                data = await pipe.hget(keys.VOLUMES, field)
                if not data:
                    raise NotFound(f"volume {name} of project {project} was removed")
                known = msgspec.json.decode(data, type=VolumeRecord)
                if known.latest is not None and known.latest.tree == version.tree:
                    return known
                new = with_version(known, base, version)
                pipe.multi()
                pipe.hset(keys.VOLUMES, field, msgspec.json.encode(new))
                pipe.publish(keys.EVENTS_FUNCTIONS, field)
                try:
                    await pipe.execute()
                    return new
                except WatchError:
                    continue  # another change of some volume came between
        raise Unavailable(f"volume {name}: other changes kept coming first", retry_after_s=1)

    async def release_lease(self, epoch: str) -> None:
        """Deletes the lease and the statuses, unless a successor has taken the lease."""
        report = await self.read_report()
        if report is None or report.epoch == epoch:
            await self._redis.delete(keys.node(self._node), keys.observed(self._node))

    async def close(self) -> None:
        await self._redis.aclose()

    def _decode(self, data: bytes) -> WorkerOrder | None:
        try:
            order = self._orders.decode(data)
        except UnreadableRecord as error:
            log.error("cannot decode an order", extra={"error": str(error)})
            return None
        return order if order.node == self._node else None
