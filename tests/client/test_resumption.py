"""Streams of the client that break: gone on with after the last event by their key, and not otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetstart.client import AsyncClient, Client, errors
from tests.servers import serving


class Breaking:
    """An ASGI app whose stream of `count` numbers breaks after each of so many events; knows `Last-Event-ID`."""

    def __init__(self, *, count: int = 7, each: int = 3, numbered: bool = True) -> None:
        self._count, self._each, self._numbered = count, each, numbered
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        last = headers.get("last-event-id", "")
        self.asked.append((headers.get("idempotency-key", ""), last))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        begin = int(last or 0)
        for number in range(begin, min(self._count, begin + self._each)):
            id_line = b"id: %d\n" % (number + 1) if self._numbered else b""
            await send({"type": "http.response.body", "body": id_line + b"data: %d\n\n" % number, "more_body": True})
        if begin + self._each < self._count:
            await send({"type": "http.response.body", "body": b"id: 99\ndata: torn", "more_body": True})
            await asyncio.sleep(0.02)
            raise ConnectionAbortedError
        await send({"type": "http.response.body", "body": b""})


def test_a_stream_with_a_key_goes_on_after_its_last_event() -> None:
    app = Breaking()
    with serving(app, log_level="critical") as server, Client(server.url, "") as client:
        stream = client.function("f").with_options(idempotency_key="k").stream(n=7)
        assert list(stream) == list(range(7))
    assert app.asked == [("k", ""), ("k", "3"), ("k", "6")]


def test_so_does_one_of_an_async_client() -> None:
    async def scenario(url: str) -> list[Any]:
        async with AsyncClient(url, "") as client:
            stream = client.function("f").with_options(idempotency_key="k").stream(n=7)
            return [item async for item in stream]

    with serving(Breaking(), log_level="critical") as server:
        assert asyncio.run(scenario(server.url)) == list(range(7))


@pytest.mark.parametrize(("key", "numbered", "retries"), [("", True, 7), ("k", False, 7), ("k", True, 0)])
def test_one_that_cannot_be_gone_on_with_fails(key: str, numbered: bool, retries: int) -> None:
    app = Breaking(numbered=numbered)
    with serving(app, log_level="critical") as server, Client(server.url, "", retries=retries) as client:
        stream = client.function("f").with_options(idempotency_key=key or None).stream(n=7)
        items = iter(stream)
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(errors.WorkerLost, match="broke off"):
            next(items)
    assert len(app.asked) == 1


def test_a_stream_that_never_gets_on_is_given_up() -> None:
    app = Breaking(each=0)
    with serving(app, log_level="critical") as server, Client(server.url, "", retries=2) as client:
        stream = client.function("f").with_options(idempotency_key="k").stream(n=7)
        with pytest.raises(errors.WorkerLost):
            list(stream)
    assert len(app.asked) == 3
