"""The client's transport: requests, and how it takes failures, against servers that misbehave as told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleetstart.client import Client, errors
from fleetstart.client.request import CallOptions, async_request, call_request
from fleetstart.client.retry import RetryPolicy
from fleetstart.client.transport import Attempts
from fleetstart.runtime.contract.call_format import NOTHING
from tests.servers import AppServer, serving

Send = Callable[[dict[str, Any]], Any]


class Answers:
    """An ASGI app that gives its answers one after the other, and keeps the headers of the requests."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self._answers = list(answers)
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        status, headers, body = self._answers.pop(0)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


OK = (200, {"content-type": "application/json"}, b"1")


def rejection(status: int, code: str, after_ms: int) -> tuple[int, dict[str, str], bytes]:
    body = {"error": {"code": code, "message": "not now", "retry_after_s": after_ms / 1000}}
    return status, {"fs-error": code, "retry-after-ms": str(after_ms)}, json.dumps(body).encode()


def client_of(server: AppServer, **options: Any) -> Client:
    return Client(server.url, "", **options)


class Together:
    """An ASGI app that answers once so many requests are there, and keeps the ports that they came from."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._here = 0
        self._all = asyncio.Event()
        self.ports: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        self.ports.append(scope["client"][1])
        self._here += 1
        if self._here == self._count:
            self._all.set()
            self._all, self._here = asyncio.Event(), 0
        else:
            await self._all.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"1"})


@pytest.mark.slow
def test_connections_of_many_callers_stay_open_for_their_next_calls() -> None:
    """Connections that a pool closes beyond a number of idle ones may be those that a thread has just taken."""
    app = Together(150)
    with serving(app) as server, client_of(server) as client, ThreadPoolExecutor(150) as callers:
        for _ in range(2):
            assert list(callers.map(lambda _: client.function("f")(), range(150))) == [1] * 150
    assert sorted(app.ports[:150]) == sorted(app.ports[150:])


def test_a_rejected_call_is_sent_again_with_its_key_after_the_time_that_was_asked_for() -> None:
    app = Answers(rejection(503, "overloaded", 120), rejection(429, "rate_limited", 0), OK)
    with serving(app) as server, client_of(server) as client:
        began_s = time.monotonic()
        assert client.function("f").call({"x": 1}) == 1
        assert time.monotonic() - began_s >= 0.12
    assert len({headers["idempotency-key"] for headers in app.headers}) == 1
    assert len(app.headers) == 3


def test_retries_end_with_their_number_and_with_the_time() -> None:
    app = Answers(*[rejection(503, "overloaded", 0)] * 3)
    with serving(app) as server, client_of(server, retries=2) as client, pytest.raises(errors.Overloaded):
        client.function("f")()
    app = Answers(rejection(503, "overloaded", 60_000))
    with serving(app) as server, client_of(server, timeout_s=5) as client:
        with pytest.raises(errors.Overloaded) as raised:
            client.function("f")()
        assert raised.value.retry_after_s == 60
    assert len(app.headers) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (503, {"retry-after": "0"}, b"the handler is busy"),
        (502, {"fs-error": "worker_lost", "retry-after": "0"}, b'{"error": {"code": "worker_lost", "message": "m"}}'),
    ],
)
def test_what_may_have_run_is_not_sent_again(answer: tuple[int, dict[str, str], bytes]) -> None:
    app = Answers(answer, OK)
    with serving(app) as server, client_of(server) as client, pytest.raises(errors.FleetError):
        client.function("f")()
    assert len(app.headers) == 1


def test_items_of_a_stream_that_is_no_json_are_text() -> None:
    body = 'data: plain\n\ndata: "a\u2028b"\n\ndata: [DONE]\n\n'.encode()
    app = Answers(*[(200, {"content-type": "text/event-stream"}, body)] * 2)
    with serving(app) as server, client_of(server) as client:
        assert list(client.function("f").stream()) == ["plain", "a\u2028b"]
        stream = client.function("f").stream()
        assert [event.data for event in stream.events()] == ["plain", '"a\u2028b"']
        with pytest.raises(RuntimeError, match="has been read"):
            list(stream)


def test_the_time_of_a_call_bounds_its_handler_and_that_of_an_async_call_does_not() -> None:
    options = CallOptions(timeout_s=20)
    sync = Attempts("", call_request("f", options, NOTHING, {}), RetryPolicy()).headers()
    assert 19 < float(sync["fs-timeout-s"]) <= 20
    assert "fs-timeout-s" not in Attempts("", async_request("f", options, NOTHING, {}), RetryPolicy()).headers()
