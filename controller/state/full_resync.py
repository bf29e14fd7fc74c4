"""The full resync: reads all state from Redis into the view, in a few round trips. Unchanged entries are not decoded.

`sync` decides when, whether functions are read too, and keeps the process's own writes out meanwhile. The loop is free
between two parts of a read.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio as redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from .access_table import Raw, read_table
from .identity_records import NodeIdentity, PeerKeyRecord
from .records import Failure, FunctionRecord, VersionKey, VersionRecord, measured, read_measures
from .redis_client import script_text
from .traffic import tracked_versions
from .unreadable import DecodeCache
from .view import CopyKey, NodeSeen, View

WRITES_NS = 2_000_000_000
"""Age of the last write that Redis took from this process, which writes once a second: beyond it, it takes none."""
EXEMPTED_AT_ONCE = 1_000
"""New records of functions after which they are exempted from garbage collection."""
VERSIONS_KEPT = 1_000
"""Old versions in the view that nothing needs, the last ones read. Each deploy leaves one; `NAME@3` reads it again."""
READ_NODES = script_text("read_nodes")
"""Four commands for each node would cost twice the processor time of what they bring."""
NODES_AT_ONCE = 25
FUNCTIONS_AT_ONCE = 500
"""What is read in one round trip: some milliseconds of the loop."""
FAILURES_AT_ONCE = 50
"""Failures of versions that no index names: only releases before the index write such ones."""


class AnotherHistory(redis.ConnectionError):
    """Another Redis answers than the one that was read, or the same one after a start."""


def pairs(answer: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Fields and values of a hash, as Redis answers them to a script."""
    return zip(answer[::2], answer[1::2], strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeRecords:
    """What Redis has of a node, decoded; what cannot be decoded is left out."""

    leased: bool
    report: NodeReport | None
    orders: dict[WorkerId, WorkerOrder]
    statuses: dict[WorkerId, WorkerStatus]
    copies: dict[CopyKey, CopyOrder]


class FullResync:
    def __init__(self, client: redis.Redis, view: View, monotonic_ns: Callable[[], int]) -> None:
        self._client = client
        self._view = view
        self._monotonic_ns = monotonic_ns
        self._functions = DecodeCache("function", FunctionRecord)
        self._versions = RecordDecoder(VersionRecord)
        self._unreadable_versions: dict[VersionKey, str] = {}
        self._nodes = DecodeCache("node", NodeReport)
        self._identities = DecodeCache("identity", NodeIdentity)
        self._orders = DecodeCache("order", WorkerOrder)
        self._statuses = DecodeCache("status", WorkerStatus)
        self._copies = DecodeCache("copy", CopyOrder)
        self._peer_keys = DecodeCache("peer key", PeerKeyRecord)
        self._errors = RecordDecoder(ErrorInfo)
        self._turn = 0
        self._history = ""
        """Replication id of the Redis that was read: a start or a promotion of a replica begins another one."""
        self._exempted = 0
        self._measures: dict[bytes, bytes] = {}

    async def read(self, *, functions: bool) -> None:
        """Reads the nodes' states and the keys, and with `functions` also functions, projects, secrets and
        volumes, of which each change is published."""
        view = self._view
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hkeys(keys.NODES)
            pipe.hkeys(keys.NODES_DRAINING)
            pipe.hgetall(keys.NODES_IDENTITIES)
            pipe.hgetall(keys.PEER_KEYS)
            pipe.get(keys.LEADER)
            pipe.hgetall(keys.MEASURES)
            pipe.smembers(keys.FAILING)
            pipe.hgetall(keys.KEYS)
            pipe.info("replication")
            if functions:
                pipe.hgetall(keys.PROJECTS)
                pipe.hgetall(keys.SECRETS)
                pipe.hgetall(keys.VOLUMES)
            (
                node_names,
                draining,
                identities,
                peer_keys,
                leader,
                measures,
                failing,
                raw_keys,
                server,
                *others,
            ) = await pipe.execute()
        raw_projects, raw_secrets, raw_volumes = others or view.access.raw[1:]
        nodes = [NodeId(name.decode()) for name in node_names]
        failures = [] if functions else self._wanted_failures(failing)
        by_node, raw_failures = await self._read_nodes(nodes, failures)
        history = str(server.get("master_replid", ""))
        if functions:
            await self._read_functions(again=history != self._history)
            self._history = history
            failures = self._wanted_failures(failing)  # also of versions that were read just now
            _, raw_failures = await self._read_some([], failures)
        elif history != self._history:
            raise AnotherHistory("another Redis answers, or it was started again: it is read as a whole")
        view.node_names = frozenset(nodes)
        view.draining = frozenset(NodeId(name.decode()) for name in draining)
        self._apply_identities(identities, peer_keys)
        self._apply_access(raw_keys, raw_projects, raw_secrets, raw_volumes)
        self._apply(by_node)
        self._apply_failures(failures, raw_failures)
        view.leader = leader.decode() if leader else ""
        self._apply_measures(measures)
        for cache in (self._nodes, self._identities, self._orders, self._statuses, self._copies, self._peer_keys):
            cache.turn(view.unreadable)
        self._spare_collector()

    def _apply_identities(self, raw: Mapping[bytes, bytes], raw_keys: Mapping[bytes, bytes]) -> None:
        found = {NodeId(name.decode()): self._identities.read(name, data) for name, data in raw.items()}
        self._view.identities = {node: record for node, record in found.items() if record is not None}
        peer_keys = {NodeId(name.decode()): self._peer_keys.read(name, data) for name, data in raw_keys.items()}
        self._view.peer_keys = {node: record for node, record in peer_keys.items() if record is not None}

    def _spare_collector(self) -> None:
        """Exempts what was read from garbage collection, which would go through it for 100 ms again and again: records
        have no cycles, and are freed when they are replaced. Seldom, because cycles that are garbage by then stay."""
        if self._functions.decoded - self._exempted >= EXEMPTED_AT_ONCE:
            self._exempted = self._functions.decoded
            gc.collect(1)
            gc.freeze()

    async def _read_nodes(
        self, nodes: list[NodeId], failures: list[VersionKey]
    ) -> tuple[dict[NodeId, _NodeRecords], list[Raw]]:
        """Records of each node, and these versions' failed starts, which are read with the first nodes: a round
        trip of their own would cost what they do. Nodes are decoded some at a time; what they change in the view is
        then done at once."""
        found, raw_failures = await self._read_some(nodes[:NODES_AT_ONCE], failures)
        for begin in range(NODES_AT_ONCE, len(nodes), NODES_AT_ONCE):
            others, _ = await self._read_some(nodes[begin : begin + NODES_AT_ONCE], [])
            found |= others
        return found, raw_failures

    async def _read_some(
        self, nodes: list[NodeId], failures: list[VersionKey]
    ) -> tuple[dict[NodeId, _NodeRecords], list[Raw]]:
        """One round trip: lease, orders, statuses and copies of these nodes, and failed starts of these versions."""
        names = [key(node) for node in nodes for key in (keys.node, keys.desired, keys.observed, keys.copies)]
        async with self._client.pipeline(transaction=False) as pipe:
            if nodes:  # an empty pipeline asks Redis nothing
                # The text each time, not its digest: a few hundred bytes, and nothing to load after a restart.
                pipe.eval(READ_NODES, len(names), *names)
            for key in failures:
                pipe.hgetall(keys.failures(key.name, key.version))
            answers = await pipe.execute()
        raw, raw_failures = answers[0] if nodes else [], answers[bool(nodes) :]
        found = {node: self._decoded(node, *raw[4 * i : 4 * i + 4]) for i, node in enumerate(nodes)}
        await asyncio.sleep(0)
        return found, raw_failures

    def _decoded(
        self, node: NodeId, lease: bytes | None, desired: list[bytes], observed: list[bytes], copied: list[bytes]
    ) -> _NodeRecords:
        copies = (self._copies.read(name, raw) for name, raw in pairs(copied))
        read = [self._statuses.read(name, raw) for name, raw in pairs(observed)]
        return _NodeRecords(
            leased=bool(lease),
            report=self._nodes.read(node, lease) if lease else None,
            orders={o.worker: o for name, raw in pairs(desired) if (o := self._orders.read(name, raw))},
            statuses={status.worker: status for status in read if status is not None},
            copies={(copy.node, copy.checkpoint): copy for copy in copies if copy is not None},
        )

    async def _read_functions(self, *, again: bool) -> None:
        """Reads the functions, some at a time. Each is as it was at some moment of the read.

        `again`: from a Redis that may lack the last writes of the one before, so that a version's number may have been
        given twice: what is known is read again.
        """
        view = self._view
        seen: set[FunctionName] = set()
        read: set[VersionKey] = set()
        cursor, changed = 0, False
        while True:
            scanned = self._client.hscan(keys.FUNCTIONS, cursor, count=FUNCTIONS_AT_ONCE)
            cursor, raw = await cast(Awaitable[Any], scanned)
            records = self._records(raw)
            seen |= records.keys()
            new = {name: record for name, record in records.items() if again or self._is_new(record)}
            wanted = [key for record in new.values() for key in needed_versions(record)]
            await self.load_versions(wanted, again=again)
            read.update(wanted)
            for name, record in new.items():
                changed = changed or view.functions.get(name) != record
                view.functions[name] = record
            if not cursor:
                break
        for gone in view.functions.keys() - seen:
            changed = True
            del view.functions[gone]
        self._functions.turn(view.unreadable)
        if again:
            self._unreadable_versions = {key: why for key, why in self._unreadable_versions.items() if key in read}
            for key in view.versions.keys() - read:
                del view.versions[key]
        elif changed or not view.synced or len(view.versions) > len(view.functions) + VERSIONS_KEPT:
            self._forget_versions()

    def _is_new(self, record: FunctionRecord) -> bool:
        view = self._view
        return (
            view.functions.get(record.name) is not record or VersionKey(record.name, record.live) not in view.versions
        )

    def _forget_versions(self) -> None:
        view = self._view
        ordered = set(view.ordered_versions())
        for key in [key for key in view.versions if not (_exists(key, view.functions) or key in ordered)]:
            del view.versions[key]
        if len(view.versions) > len(view.functions) + VERSIONS_KEPT:
            needed = {key for record in view.functions.values() for key in needed_versions(record)} | ordered
            for key in [key for key in view.versions if key not in needed][:-VERSIONS_KEPT]:
                del view.versions[key]

    def _apply_access(self, raw_keys: Raw, raw_projects: Raw, raw_secrets: Raw, raw_volumes: Raw) -> None:
        view, before = self._view, self._view.access
        view.access = read_table(raw_keys, raw_projects, raw_secrets, raw_volumes, before)
        if view.access is before:
            return
        for what, problems in view.access.unreadable.items():
            view.unreadable.replace(what, problems)
        if view.access.projects != before.projects:
            view.quotas_changed()

    def _records(self, functions: Mapping[bytes, bytes]) -> dict[FunctionName, FunctionRecord]:
        """The functions by name. One that cannot be read stays as it was last: its workers are not ours to end."""
        found: dict[FunctionName, FunctionRecord] = {}
        for field, raw in functions.items():
            record = self._functions.read(field, raw)
            if record is None:
                record = self._view.functions.get(FunctionName(field.decode(errors="replace")))
            if record is not None:
                found[record.name] = record
        return found

    def _apply(self, by_node: dict[NodeId, _NodeRecords]) -> None:
        view, now_ns = self._view, self._monotonic_ns()
        orders: dict[WorkerId, WorkerOrder] = {}
        statuses: dict[WorkerId, WorkerStatus] = {}
        copies: dict[CopyKey, CopyOrder] = {}
        unread: set[NodeId] = set()
        for node, found in by_node.items():
            seen, report = view.nodes.get(node), found.report
            if report is not None:
                if seen is None or seen.report is not report or seen.absent_since_ns is not None:
                    view.nodes[node] = NodeSeen(report)
            elif found.leased:
                unread.add(node)
                if seen is not None and seen.absent_since_ns is not None:
                    seen.absent_since_ns = None
                    view.node_came_or_went(node)
            elif seen is not None and view.written_ns and now_ns - view.written_ns > WRITES_NS:
                seen.absent_since_ns = None  # Redis takes no writes: nodes could not renew their leases either
            elif seen is not None:
                if seen.absent_since_ns is None:
                    seen.absent_since_ns = now_ns
                view.node_came_or_went(node)  # at each read, until it is lost
            orders.update(found.orders)
            copies.update(found.copies)
            if node in unread or (node in view.nodes and not view.nodes[node].lost(now_ns)):
                statuses.update(found.statuses)
        changed, view.unread_nodes = view.unread_nodes ^ unread, frozenset(unread)
        for node in changed:
            view.node_came_or_went(node)
        for gone in view.nodes.keys() - by_node.keys():
            del view.nodes[gone]
        view.shell_orders = {worker: order for worker, order in orders.items() if order.shell}
        for worker in view.shell_orders:
            del orders[worker]
        for worker in (view.orders.keys() | orders.keys()) - view.touched_orders:
            if worker in orders:
                view.orders[worker] = orders[worker]
            else:
                del view.orders[worker]
        view.copies.become(copies)
        for status in statuses.values():
            view.put_status(status, touch=False)
        for worker in view.statuses.keys() - statuses.keys() - view.touched:
            view.drop_status(worker)
        for worker in view.shell_statuses.keys() - statuses.keys() - view.touched:
            del view.shell_statuses[worker]

    def _apply_measures(self, raw: dict[bytes, bytes]) -> None:
        """Decodes what has changed: planning derives anew each node whose record is another one."""
        if raw == self._measures:
            return
        view, known, self._measures = self._view, self._measures, raw
        changed = {field: value for field, value in raw.items() if known.get(field) != value}
        for field in (known.keys() - raw.keys()) | changed.keys():
            node, version = measured(field)
            if node is not None:
                view.node_measures.pop(node, None)
            elif version is not None:
                view.version_measures.pop(version, None)
        nodes, versions = read_measures(changed)
        view.node_measures.update(nodes)
        view.version_measures.update(versions)
        if len(view.node_measures) + len(view.version_measures) != len(raw):  # others were learnt here, and deleted
            view.node_measures, view.version_measures = read_measures(raw)

    async def load_versions(self, wanted: list[VersionKey], *, again: bool = False) -> None:
        """Loads versions that the view lacks, or all. Versions never change, so each is read once, readable or not."""
        versions, unreadable = self._view.versions, self._unreadable_versions
        missing = [key for key in wanted if again or (key not in versions and key not in unreadable)]
        if not missing:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for key in missing:
                pipe.hget(keys.versions(key.name), str(key.version))
            for key, raw in zip(missing, await pipe.execute(), strict=True):
                if not raw:
                    continue
                try:
                    versions[key] = self._versions.decode(raw)
                    unreadable.pop(key, None)
                except UnreadableRecord as error:
                    unreadable[key] = str(error)
                    versions.pop(key, None)
                    self._view.unreadable.replace("version", {str(key): text for key, text in unreadable.items()})

    def _wanted_failures(self, failing: Iterable[bytes]) -> list[VersionKey]:
        """Versions whose failed starts are read: those that the index names, those that are known, and some others,
        because an earlier release writes no index."""
        view = self._view
        others = list(view.versions)
        turns = max(1, -(-len(others) // FAILURES_AT_ONCE))
        self._turn = (self._turn + 1) % turns
        named = (keys.failures_of(name.decode(errors="replace")) for name in failing)
        known = {VersionKey(*one) for one in named if one is not None} | view.failures.keys()
        return sorted(known | set(others[self._turn :: turns]))

    def _apply_failures(self, wanted: list[VersionKey], answers: list[Raw]) -> None:
        failures: dict[VersionKey, Failure] = {}
        problems: dict[str, str] = {}
        for key, raw in zip(wanted, answers, strict=True):
            if raw:
                try:
                    failures[key] = Failure(
                        count=int(raw[b"count"]),
                        last_unix_ms=int(raw[b"last_unix_ms"]),
                        error=self._errors.decode(raw[b"error"]),
                    )
                except (KeyError, ValueError) as error:
                    problems[str(key)] = f"{type(error).__name__}: {error}"
        self._view.failures.become(failures)
        self._view.unreadable.replace("failure", problems)


def _exists(key: VersionKey, functions: Mapping[FunctionName, FunctionRecord]) -> bool:
    """Checks whether the version can be of a function that exists, and not of an earlier one of its name."""
    record = functions.get(key.name)
    return record is not None and key.version >= record.first


def needed_versions(record: FunctionRecord) -> list[VersionKey]:
    return [VersionKey(record.name, version) for version in sorted(tracked_versions(record))]
