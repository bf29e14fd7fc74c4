"""The full resync: reads all state from Redis into the view, in a few round trips. Unchanged entries are not decoded.

`sync` decides when, and keeps the process's own writes out meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport

from ..planner.estimates import NodeMeasures, VersionMeasures
from .access_table import read_table
from .records import Failure, FunctionRecord, VersionKey, VersionRecord, parse_version_key
from .traffic import tracked_versions
from .view import NodeSeen, View

log = logging.getLogger(__name__)


class _DecodeCache(dict[bytes, Any]):
    """A cache of decoded structs by their bytes, so that a resync decodes only what has changed."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._next: dict[bytes, Any] = {}

    def read(self, raw: bytes) -> Any:
        """Decodes a struct; None (and a log line) if it cannot be decoded."""
        value = self.get(raw)
        if value is None:
            try:
                value = self._decoder.decode(raw)
            except msgspec.DecodeError as error:
                log.warning("an entry in Redis cannot be decoded", extra={"error": str(error)})
                return None
        self._next[raw] = value
        return value

    def turn(self) -> None:
        """Forgets entries that the last resync did not see."""
        self.clear()
        self.update(self._next)
        self._next = {}


class FullResync:
    def __init__(self, client: redis.Redis, view: View, monotonic_ns: Callable[[], int]) -> None:
        self._client = client
        self._view = view
        self._monotonic_ns = monotonic_ns
        self._functions = _DecodeCache(FunctionRecord)
        self._versions = msgspec.json.Decoder(VersionRecord)
        self._nodes = _DecodeCache(NodeReport)
        self._orders = _DecodeCache(WorkerOrder)
        self._statuses = _DecodeCache(WorkerStatus)
        self._measures: dict[bytes, bytes] = {}

    async def read(self) -> None:
        """Reads everything and applies it to the view at once."""
        view = self._view
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.FUNCTIONS)
            pipe.hkeys(keys.NODES)
            pipe.hkeys(keys.NODES_DRAINING)
            pipe.get(keys.LEADER)
            pipe.hgetall(keys.MEASURES)
            pipe.hgetall(keys.KEYS)
            pipe.hgetall(keys.PROJECTS)
            pipe.hgetall(keys.SECRETS)
            functions, node_names, draining, leader, measures, *access = await pipe.execute()
        nodes = [NodeId(name.decode()) for name in node_names]
        async with self._client.pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.get(keys.node(node))
                pipe.hgetall(keys.desired(node))
                pipe.hgetall(keys.observed(node))
            answers = await pipe.execute()
        by_node = {node: answers[3 * i : 3 * i + 3] for i, node in enumerate(nodes)}
        records = {record.name: record for raw in functions.values() if (record := self._functions.read(raw))}
        await self.load_versions([key for record in records.values() for key in needed_versions(record)])
        view.functions = records
        view.node_names = frozenset(nodes)
        view.draining = frozenset(NodeId(name.decode()) for name in draining)
        view.access = read_table(access[0], access[1], access[2], view.access)
        self._apply(by_node)
        await self._load_failures()
        view.leader = leader.decode() if leader else ""
        self._apply_measures(measures)
        for cache in (self._functions, self._nodes, self._orders, self._statuses):
            cache.turn()

    def _apply(self, by_node: dict[NodeId, list[Any]]) -> None:
        view, now_ns = self._view, self._monotonic_ns()
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
        view.shell_orders = {worker: order for worker, order in orders.items() if order.shell}
        for worker in view.shell_orders:
            del orders[worker]
        for worker in (view.orders.keys() | orders.keys()) - view.touched:
            if worker in orders:
                view.orders[worker] = orders[worker]
            else:
                del view.orders[worker]
        for status in statuses.values():
            view.put_status(status, touch=False)
        for worker in view.statuses.keys() - statuses.keys() - view.touched:
            view.drop_status(worker)
        for worker in view.shell_statuses.keys() - statuses.keys() - view.touched:
            del view.shell_statuses[worker]

    def _apply_measures(self, raw: dict[bytes, bytes]) -> None:
        if raw != self._measures:
            self._measures = raw
            self._view.node_measures, self._view.version_measures = read_measures(raw)

    async def load_versions(self, wanted: list[VersionKey]) -> None:
        missing = [key for key in wanted if key not in self._view.versions]
        if not missing:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for key in missing:
                pipe.hget(keys.versions(key.name), str(key.version))
            for key, raw in zip(missing, await pipe.execute(), strict=True):
                if raw:
                    self._view.versions[key] = self._versions.decode(raw)

    async def _load_failures(self) -> None:
        view = self._view
        wanted = sorted(
            {key for record in view.functions.values() for key in needed_versions(record)}
            | {VersionKey(order.spec.name, order.version) for order in view.orders.values()}
            | view.failures.keys()
        )
        async with self._client.pipeline(transaction=False) as pipe:
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


def needed_versions(record: FunctionRecord) -> list[VersionKey]:
    return [VersionKey(record.name, version) for version in sorted(tracked_versions(record))]


_NODE, _VERSION = msgspec.json.Decoder(NodeMeasures), msgspec.json.Decoder(VersionMeasures)


def read_measures(
    raw: Mapping[bytes, bytes],
) -> tuple[dict[NodeId, NodeMeasures], dict[VersionKey, VersionMeasures]]:
    """Decodes fs:measures. Entries that cannot be decoded are left out, and learned again."""
    nodes: dict[NodeId, NodeMeasures] = {}
    versions: dict[VersionKey, VersionMeasures] = {}
    for field, value in raw.items():
        kind, _, name = field.decode(errors="replace").partition(":")
        key = parse_version_key(name)
        try:
            if kind == "node":
                nodes[NodeId(name)] = _NODE.decode(value)
            elif kind == "version" and key is not None:
                versions[key] = _VERSION.decode(value)
        except msgspec.DecodeError:
            continue
    return nodes, versions
