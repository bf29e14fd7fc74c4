"""Subscriptions to a real Redis: messages come, and a connection that the kernel gave up is an error."""

from __future__ import annotations

import asyncio
import errno

import pytest
import redis.asyncio

from fleetstart.runtime.contract.process.subscription import messages


def test_a_connection_that_the_kernel_gave_up_is_an_error_and_no_loop_without_an_end(redis_url: str) -> None:
    async def run() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client, client.pubsub() as pubsub:
            await pubsub.subscribe("news")
            heard = messages(pubsub)
            assert (await anext(heard))["type"] == "subscribe"
            await client.publish("news", "one")
            assert (await anext(heard))["data"] == b"one"
            # What asyncio does with a socket's ETIMEDOUT.
            pubsub.connection._reader.set_exception(TimeoutError(errno.ETIMEDOUT, "timed out"))
            with pytest.raises(ConnectionError):
                await anext(heard)

    asyncio.run(run())


def test_confirmations_that_are_left_out_are_no_lost_connection(redis_url: str) -> None:
    async def run() -> None:
        async with (
            redis.asyncio.Redis.from_url(redis_url) as client,
            client.pubsub(ignore_subscribe_messages=True) as pubsub,
        ):
            await pubsub.subscribe("a", "b", "c", "d")
            waiting = asyncio.ensure_future(anext(messages(pubsub)))
            while not await client.publish("d", "one"):
                await asyncio.sleep(0.01)
            assert (await waiting)["data"] == b"one"

    asyncio.run(run())
