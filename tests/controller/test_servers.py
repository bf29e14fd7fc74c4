"""The test servers themselves: data survives a kill, an app serves."""

from __future__ import annotations

from typing import Any

import httpx
import redis

from tests.servers import RedisServer, serving


def test_redis_keeps_its_data_over_a_kill(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.set("a", "1")
        client.execute_command("WAITAOF", 1, 0, 2000)
    redis_server.kill()
    redis_server.start()
    with redis.from_url(redis_server.url) as client:
        assert client.get("a") == b"1"


def test_app_server_serves() -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    with serving(app) as server:
        assert httpx.get(server.url).text == "hello"
