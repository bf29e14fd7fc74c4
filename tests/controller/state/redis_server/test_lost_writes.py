"""A Redis that lost its last writes: a promoted replica gives no fence twice, and a version's number is read again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis as plain_redis

from fleetstart.controller.billing.ledger_writer import LedgerWriter
from fleetstart.controller.scheduler.leader import LeaderLease
from fleetstart.controller.scheduler.step import Step
from fleetstart.controller.state.access_records import KeyRecord
from fleetstart.controller.state.cas_hash import CasHash
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.function.spec import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.controller.state.test_takeover import _trace
from tests.servers import RedisServer, free_port, until, wait_until

F = FunctionName("f")


class Pair:
    """A primary and its replica, as Sentinel would watch them. `cut` holds the replica's link, and `promote` is what
    Sentinel does when the primary is lost."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.primary = RedisServer(folder / "primary", "--port", str(port), "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(folder / "replica", "--replicaof", "127.0.0.1", str(port))
        self.primary.start()
        self.replica.start()
        wait_until(lambda: self._client(self.replica).info("replication")["master_link_status"] == "up")

    def _client(self, server: RedisServer) -> plain_redis.Redis:
        return server.client()

    def caught_up(self) -> None:
        with self.primary.client() as client:
            assert client.wait(1, 5_000) == 1

    def cut(self) -> None:
        os.kill(self.replica.pid, signal.SIGSTOP)

    def promote(self) -> None:
        self.primary.kill()
        os.kill(self.replica.pid, signal.SIGCONT)
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")

    def close(self) -> None:
        self.primary.close()
        self.replica.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def spec(memory_bytes: int = 1 << 26) -> FunctionSpec:
    return FunctionSpec(name=F, bundle=BundleId("0" * 64), entry="handler:run", memory_bytes=memory_bytes)


async def write_version(client: Any, number: int, one: FunctionSpec) -> None:
    record = FunctionRecord(name=F, live=Version(number), deployed_unix_ms=1, started=Version(number))
    version = VersionRecord(
        version=Version(number), digest=spec_digest(one), spec=one, segment_bytes=0, created_unix_ms=1
    )
    await client.hset(keys.versions(F), str(number), msgspec.json.encode(version))
    await client.hset(keys.FUNCTIONS, F, msgspec.json.encode(record))


def test_a_promoted_replica_that_lost_the_last_fence_does_not_give_it_again(pair: Pair) -> None:
    async def scenario() -> None:
        old, new = connect(pair.primary.url), connect(pair.replica.url)
        first, second, third = (LeaderLease(client, StateSync(client, View())) for client in (old, old, new))
        await first.acquire_or_renew("gw-1", 0)
        pair.caught_up()
        pair.cut()
        await old.delete(keys.LEADER)  # it expires, and another controller takes over
        lost = await second.acquire_or_renew("gw-2", 0)
        pair.promote()
        await new.delete(keys.LEADER)
        given = await third.acquire_or_renew("gw-3", 0)
        assert given > lost
        order = WorkerOrder(
            worker=WorkerId("w"), node=NodeId("n"), epoch="e", version=Version(1), spec=spec(), ordered_unix_ns=1
        )
        stale = LeaderLease(new, StateSync(new, View()))
        assert not await stale.write(Step(orders=[order]), lost), "the leader that was lost writes nothing"
        assert await third.write(Step(deleted_orders=[order]), given)
        await old.aclose()
        await new.aclose()

    asyncio.run(scenario())


def test_a_fence_is_above_all_that_its_taker_held(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        client = connect(redis_server.url)
        lease = LeaderLease(client, StateSync(client, View()))
        await client.set(keys.FENCE, 9_000_000_000_000)  # of a server whose clock is ahead
        first = await lease.acquire_or_renew("gw-1", 0)
        assert first > 9_000_000_000_000
        await client.flushall()
        assert await lease.acquire_or_renew("gw-1", 0) > first
        await client.aclose()

    asyncio.run(scenario())


def test_a_revocation_that_redis_lost_before_it_was_on_the_disk_is_made_again(redis_server: RedisServer) -> None:
    """The Redis that says that all is on its disk may be another one than that which took the change."""

    async def scenario() -> None:
        client = connect(redis_server.url)
        state = StateSync(client, View())
        records = CasHash(state, keys.KEYS, KeyRecord)
        key = KeyRecord(name="app", rights=["invoke"], credentials=[], created_unix_ms=1, created_by="local")
        await records.change("app", lambda _: key)
        before = await client.hget(keys.KEYS, "app")
        resync, lost = state.resync, [True]

        async def crash(**only: bool) -> None:
            if lost.pop() if lost else False:
                await client.hset(keys.KEYS, "app", before)  # it is killed, and comes back without its last second
            await resync(**only)

        state.resync = crash  # type: ignore[method-assign]
        await records.change(
            "app", lambda known: msgspec.structs.replace(known or key, revoked_unix_ms=1), durable=True
        )
        there = await records.read("app")
        assert there is not None
        assert there.revoked_unix_ms == 1
        assert not lost
        await client.aclose()

    asyncio.run(scenario())


def test_a_version_number_that_was_lost_and_given_again_is_read_again(pair: Pair) -> None:
    async def scenario() -> None:
        old, new = connect(pair.primary.url), connect(pair.replica.url)
        await write_version(old, 1, spec())
        pair.caught_up()
        pair.cut()
        await write_version(old, 2, spec(1 << 27))
        view = View()
        before = StateSync(old, view)
        await before.resync()
        assert view.versions[VersionKey(F, Version(2))].spec.memory_bytes == 1 << 27
        pair.promote()
        await write_version(new, 2, spec(1 << 28))
        before._full._client = new  # Sentinel's clients connect to the new primary
        before._client = new
        with pytest.raises(plain_redis.ConnectionError, match="another Redis answers"):
            await before.resync(functions=False)
        assert before._functions_are_due()
        await before.resync()
        assert view.versions[VersionKey(F, Version(2))].spec.memory_bytes == 1 << 28
        await before.resync(functions=False)
        await old.aclose()
        await new.aclose()

    asyncio.run(scenario())


def test_rows_are_confirmed_by_a_replica_too_and_written_again_after_its_promotion(pair: Pair) -> None:
    async def scenario() -> None:
        old, new = connect(pair.primary.url), connect(pair.replica.url)
        writer = LedgerWriter(old)
        writer.ended(_trace("whole"))
        await writer.flush()
        await writer.confirm()
        await writer.confirm()
        pair.cut()
        writer.ended(_trace("tail"))
        await writer.flush()
        await writer.confirm()
        assert list(writer._written) == ["tail"], "no replica has it"
        pair.promote()
        writer._client = new
        writer._sha = ""
        await writer.confirm()
        await writer.flush()
        entries: Any = await new.xrange(keys.LEDGER)
        assert [msgspec.json.decode(fields[b"row"])["id"] for _, fields in entries] == ["whole", "tail"]
        await until(lambda: not writer.pending)
        await old.aclose()
        await new.aclose()

    asyncio.run(scenario())
