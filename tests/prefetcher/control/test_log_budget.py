"""Logs in Redis: bounded in lines and bytes, of a function and of a project."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleetstart.prefetcher.control import redis_state
from fleetstart.prefetcher.control.redis_state import NodeState, connect
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId
from tests.servers import RedisServer


def line(text: str) -> LogLine:
    return LogLine(unix_ms=0, worker=WorkerId("w"), version=Version(1), stream="stdout", text=text)


def write(server: RedisServer, function: str, *texts: str) -> None:
    async def scenario() -> None:
        state = NodeState(connect(server.url), NodeId("n"))
        await state.write_logs([(FunctionName(function), line(text)) for text in texts])
        await state.close()

    asyncio.run(scenario())


def kept(server: RedisServer, function: str) -> list[bytes]:
    with server.client() as client:
        entries: Any = client.xrange(keys.logs(FunctionName(function)))
    return [fields[b"line"] for _, fields in entries]


def texts(server: RedisServer, function: str) -> list[str]:
    return [msgspec.json.decode(raw, type=LogLine).text for raw in kept(server, function)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_state, "LOG_LINES_KEPT", 50)
    monkeypatch.setattr(redis_state, "LOG_BYTES_KEPT", 10_000)
    monkeypatch.setattr(redis_state, "PROJECT_LOG_BYTES_KEPT", 25_000)
    monkeypatch.setattr(redis_state, "CROWDED_LOG_BYTES_KEPT", 3_000)


def size_bytes(server: RedisServer, *functions: str) -> int:
    return sum(len(raw) for function in functions for raw in kept(server, function))


def test_a_function_keeps_its_newest_lines_within_a_number_and_a_size(redis_server: RedisServer) -> None:
    write(redis_server, "f", *map(str, range(80)))
    assert texts(redis_server, "f") == [str(number) for number in range(30, 80)]
    for _ in range(5):
        write(redis_server, "f", *("\x00" * 200 for _ in range(20)))
    assert 8_000 < size_bytes(redis_server, "f") <= 10_000
    write(redis_server, "f", "x" * 50_000)
    assert texts(redis_server, "f") == ["x" * 50_000], "the last line is always there"
    write(redis_server, "f", "after")
    assert texts(redis_server, "f") == ["after"]


def test_a_project_has_a_size_and_who_writes_beyond_it_loses_its_own_lines(redis_server: RedisServer) -> None:
    for name in ("ml.quiet", "ml.calm"):
        write(redis_server, name, *("q" * 900 for _ in range(9)))
    before = kept(redis_server, "ml.quiet")
    for name in ("ml.loud", "ml.louder"):
        write(redis_server, name, *("l" * 900 for _ in range(40)))
    assert kept(redis_server, "ml.quiet") == before
    assert size_bytes(redis_server, "ml.quiet", "ml.calm", "ml.loud", "ml.louder") <= 25_000 + 3_000
    assert kept(redis_server, "ml.louder"), "its last lines"
    write(redis_server, "other.f", *("o" * 900 for _ in range(9)))
    assert len(kept(redis_server, "other.f")) == 9, "another project has room of its own"


def test_the_room_of_a_removed_function_is_found_again(redis_server: RedisServer) -> None:
    for name in ("a", "b", "c"):
        write(redis_server, name, *("l" * 900 for _ in range(40)))
    with redis_server.client() as client:
        client.delete(keys.logs(FunctionName("a")), keys.logs(FunctionName("b")))
    write(redis_server, "d", *("l" * 900 for _ in range(40)))
    assert size_bytes(redis_server, "d") > 8_000
    write(redis_server, "a", "again")
    assert texts(redis_server, "a") == ["again"]
