from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import redis

from fleetstart.controller.billing.ledger_writer import LedgerWriter
from fleetstart.controller.cli.local.backends import redis_warnings
from fleetstart.controller.cli.root import run
from fleetstart.controller.schemas.functions import SystemStatus
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_probe import explain, read_facts, try_redis
from fleetstart.controller.state.redis_server.memory_watch import MemoryWatch
from fleetstart.controller.state.redis_server.server_facts import facts_of, settings_problems
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.sizes import GIB, MIB
from tests.controller.conftest import ControllerProcess
from tests.controller.state.test_takeover import _trace
from tests.servers import RedisServer, free_port, wait_until


def test_bytes_are_counted_by_family(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        async with client.pipeline(transaction=False) as pipe:
            for number in range(2_000):
                pipe.set(f"fs:trace:r{number}", b"x" * 1_000)
                pipe.hset(f"fs:versions:f{number}", "1", b"x" * 2_000)
            pipe.hset("fs:functions", mapping={f"f{number}": b"x" * 1_000 for number in range(2_000)})
            pipe.xadd("fs:logs:f", {"line": b"x" * 100_000})
            pipe.set("elsewhere", b"x" * 1_000_000)
            await pipe.execute()
        leads = [False]
        watch = MemoryWatch(client, leads=lambda: leads[0])
        for _ in range(40):
            await watch.step()
        await watch.read()
        assert 2_000_000 < watch.families["traces"] < 3_000_000
        assert 6_000_000 < watch.families["functions"] < 8_000_000, "the one large key is not taken for many"
        assert 100_000 < watch.families["logs"] < 200_000
        assert watch.families["others"] < 10_000, "keys of others are not ours to count"
        assert watch.problems == []
        await client.aclose()

    asyncio.run(scenario())


def test_traces_are_thinned_and_an_alarm_is_given_before_it_is_full(tmp_path: Path) -> None:
    # Without a log: what a slow disk keeps it from writing counts as used.
    server = RedisServer(tmp_path / "redis", "--maxmemory", str(64 * MIB), "--appendonly", "no")
    server.start()

    async def scenario() -> None:
        client = connect(server.url)
        watch, ledger = MemoryWatch(client, leads=lambda: False), LedgerWriter(client)
        ledger.trace_kept_s = lambda row: watch.trace_kept_s(failed=row.status >= 500)
        await watch.read()
        for number in range(4):
            ledger.ended(_trace(f"ok-{number}"))
            ledger.ended(_trace(f"failed-{number}", status=502))
            await ledger.flush()
            for piece in range(14):
                await client.set(f"fs:logs:{number}-{piece}", b"x" * MIB)
            await watch.read()
        kept_s = [await client.ttl(keys.trace(_trace(f"ok-{number}").row.id)) for number in range(4)]
        assert kept_s[:2] == [pytest.approx(86_400, abs=60)] * 2
        assert kept_s[3] == pytest.approx(3_600, abs=60)
        ledger.ended(_trace("ok-late"))
        ledger.ended(_trace("failed-late", status=502))
        await ledger.flush()
        assert await client.exists(keys.trace(_trace("ok-late").row.id)) == 0
        assert await client.ttl(keys.trace(_trace("failed-late").row.id)) == pytest.approx(600, abs=60)
        assert await client.xlen(keys.LEDGER) == 10, "each row is booked all the same"
        _, told = watch.problems
        assert "of 64 MiB of memory is used (" in told
        await client.aclose()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


def test_what_is_set_wrongly_is_told(tmp_path: Path) -> None:
    wrong = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no", "--maxclients", "40")
    server = RedisServer(tmp_path / "redis", *wrong)
    server.start()
    try:
        facts = asyncio.run(read_facts(server.url, timeout_s=5))
        eviction, no_log = settings_problems(facts)
        assert eviction.startswith("maxmemory-policy is allkeys-lru: when it is full it drops keys of any kind")
        assert no_log.startswith("appendonly is no: after its crash")
        assert redis_warnings(server.url) == [eviction, no_log], "`fs doctor` tells them"
    finally:
        server.close()


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--cluster-port", str(free_port()))
    server = RedisServer(tmp_path / "redis", "--cluster-enabled", "yes", *ports)
    server.start()
    try:
        with pytest.raises(Unavailable, match="it runs in cluster mode"):
            asyncio.run(try_redis(server.url, timeout_s=5))
    finally:
        server.close()


@pytest.mark.parametrize(("version", "told"), [("7.0.15", True), ("6.2", True), ("7.2.4", False), ("8", False)])
def test_a_server_without_waitaof_is_told(version: str, told: bool) -> None:
    problems = settings_problems(facts_of({"redis_version": version, "aof_enabled": 1}))
    assert [problem.startswith(f"Redis {version} has no WAITAOF") for problem in problems] == [True] * told


def test_connections_that_run_out_are_told() -> None:
    (told,) = settings_problems(facts_of({"connected_clients": 900, "maxclients": 1_000}))
    sentence, _ = explain(redis.ConnectionError("max number of clients reached"))
    assert sentence == "all its connections are taken (maxclients)"
    assert told.startswith("900 of 1,000 connections are open, and a controller opens up to 114")


def test_status_metrics_and_dashboard_tell_memory_and_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = RedisServer(tmp_path / "redis", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
    server.start()
    controller = ControllerProcess(tmp_path / "home", server.url)
    try:
        controller.start()

        def known() -> SystemStatus | None:
            status = msgspec.json.decode(controller.http.get("/api/v1/status").content, type=SystemStatus)
            return status if status.redis_memory is not None and status.redis_memory.families else None

        status = wait_until(known, 20)
        assert status is not None
        assert status.redis_memory is not None
        assert 0 < status.redis_memory.used_bytes < status.redis_memory.limit_bytes == 2 * GIB
        (problem,) = status.redis_problems
        assert problem.startswith("maxmemory-policy is allkeys-lru")
        metrics = controller.http.get("/metrics").text
        assert f"fleetstart_redis_memory_limit_bytes {2 * GIB}" in metrics
        assert 'fleetstart_redis_family_bytes{family="traces"}' in metrics
        assert "fleetstart_redis_problems 1" in metrics
        assert run(["status", "--url", controller.url]) == 0
        said = capsys.readouterr().out
        assert "of 2.0 GiB" in said
        assert "redis    maxmemory-policy is allkeys-lru" in said
    finally:
        controller.close()
        server.close()
