from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from redis.asyncio import BlockingConnectionPool

from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.redis_server.stream_followers import (
    HELD,
    READS_AT_ONCE,
    StreamFollowers,
    TooManyFollowers,
    order,
)
from fleetstart.runtime.contract import redis_keys as keys
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer, until


def test_entry_ids_are_ordered_by_their_numbers() -> None:
    assert order("9-10") > order(b"9-9") > order("8-100")
    assert order("0") == order("0-0")


def test_followers_that_come_together_while_redis_is_slow_wait_for_their_turn(
    redis_url: str,
) -> None:
    async def run() -> None:
        reads, blocking = connect(redis_url, connections=READS_AT_ONCE), connect(redis_url, connections=2)
        pool = reads.connection_pool
        assert isinstance(pool, BlockingConnectionPool)
        pool.timeout = 0.2
        pausing = connect(redis_url)
        await pausing.xadd("fs:logs:f", {"n": 1})
        followers = StreamFollowers(blocking, reads)
        await pausing.execute_command("CLIENT", "PAUSE", "1000", "ALL")
        follows = [followers.follow("fs:logs:f", "0", quiet_s=10) for _ in range(3 * READS_AT_ONCE)]
        try:
            pages = await asyncio.gather(*(anext(follow) for follow in follows))
            assert [[fields for _, fields in page] for page in pages] == [[{b"n": b"1"}]] * len(follows)
        finally:
            for follow in follows:
                await follow.aclose()
            await followers.close()
            for client in (pausing, blocking, reads):
                await client.aclose()

    asyncio.run(run())


def test_any_number_of_followers_holds_one_connection_and_each_sees_all(redis_url: str) -> None:
    async def run() -> None:
        reads, blocking = connect(redis_url, connections=4), connect(redis_url, purpose="followers", connections=2)
        followers = StreamFollowers(blocking, reads)
        seen: list[list[bytes]] = [[] for _ in range(300)]

        async def follow(number: int) -> None:
            async for page in followers.follow(f"fs:logs:f{number % 3}", "0", quiet_s=10):
                seen[number] += [fields[b"n"] for _, fields in page]

        tasks = [asyncio.create_task(follow(number)) for number in range(300)]
        for entry in range(250):
            await reads.xadd(f"fs:logs:f{entry % 3}", {"n": entry})
        await until(lambda: all(len(one) >= 83 for one in seen))
        for number, one in enumerate(seen):
            assert one == [b"%d" % entry for entry in range(250) if entry % 3 == number % 3][: len(one)]
        names = [client["name"] for client in await reads.client_list()]
        assert names.count("fleetstart-followers") == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await followers.close()
        await blocking.aclose()
        await reads.aclose()

    asyncio.run(run())


def test_a_slow_follower_misses_nothing(redis_url: str) -> None:
    async def run() -> None:
        reads, blocking = connect(redis_url), connect(redis_url)
        followers = StreamFollowers(blocking, reads)
        quick, slow = (followers.follow("fs:logs:f", "0", quiet_s=10) for _ in range(2))
        await reads.xadd("fs:logs:f", {"n": 0})
        assert len(await anext(quick)) == len(await anext(slow)) == 1
        seen = 1
        while seen <= 2 * HELD:
            async with reads.pipeline(transaction=False) as pipe:
                for _ in range(100):
                    pipe.xadd("fs:logs:f", {"n": 0})
                await pipe.execute()
            wanted = seen + 100
            while seen < wanted:
                seen += len(await anext(quick))
        late = 1
        while late < seen:
            late += len(await anext(slow))
        assert late == seen
        await quick.aclose()
        await slow.aclose()
        await followers.close()
        await blocking.aclose()
        await reads.aclose()

    asyncio.run(run())


def test_followers_have_a_limit_and_one_key_does_not_take_all_places(redis_url: str) -> None:
    client = connect(redis_url)
    followers = StreamFollowers(client, client, most=3, most_each=2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(followers.place("ci"))
        stack.enter_context(followers.place("ci"))
        with pytest.raises(TooManyFollowers, match="2 log or event streams are open with this key, and 2 may be"):
            followers.place("ci")
        stack.enter_context(followers.place("other"))
        with pytest.raises(TooManyFollowers, match="3 log or event streams are open at this controller"):
            followers.place("third")
    followers.place("ci")
    assert followers.count == 0


def test_followers_of_logs_do_not_take_the_controllers_leases(
    controller: ControllerProcess, redis_server: RedisServer
) -> None:
    controller.deploy("chatty")
    with contextlib.ExitStack() as stack, redis_server.client() as client:
        http = stack.enter_context(httpx.Client(base_url=controller.url, limits=httpx.Limits()))
        answers = [
            stack.enter_context(http.stream("GET", "/api/v1/functions/chatty/logs?follow=1")) for _ in range(120)
        ]
        assert [answer.status_code for answer in answers[:100]] == [200] * 100
        assert {answer.status_code for answer in answers[100:]} == {429}
        assert answers[-1].headers["retry-after"]
        controller.deploy("another")
        for _ in range(50):
            assert client.pttl(keys.LEADER) > 500
        assert len(client.client_list()) < 60
        client.xadd("fs:logs:chatty", {"line": b'{"text": "hello", "version": 1}'})
        assert b"hello" in next(chunk for chunk in answers[0].iter_bytes() if chunk)
