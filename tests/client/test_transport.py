"""The client's transport: requests, and how it takes failures, against servers that misbehave as told."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleetstart.client import AsyncClient, Client, errors
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
    kept = serving(app, timeout_keep_alive=60)  # at the server's side, also where all of this takes long
    with kept as server, client_of(server) as client, ThreadPoolExecutor(150) as callers:
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


REDIRECT = (308, {"location": "https://fleet.example.com/fn/f"}, b"moved")


def test_a_server_that_sends_its_callers_elsewhere_is_not_taken_for_the_function() -> None:
    """As a proxy does that speaks TLS alone: its page was the answer."""
    said = "sends its callers to https://fleet.example.com"
    with serving(Answers(REDIRECT, REDIRECT)) as server, client_of(server) as client:
        with pytest.raises(errors.Unreachable, match=said):
            client.function("f").call(1)
        with pytest.raises(errors.Unreachable, match=said):
            list(client.function("f").stream(1))

    async def scenario(url: str) -> None:
        async with AsyncClient(url, "") as client:
            await client.function("f").call(1)

    with serving(Answers(REDIRECT)) as server, pytest.raises(errors.Unreachable, match=said):
        asyncio.run(scenario(server.url))


def test_a_redirect_of_a_function_is_its_answer() -> None:
    own = (303, {"location": "https://elsewhere.example", "x-request-id": "inv-1"}, b"")
    with serving(Answers(own)) as server, client_of(server) as client:
        result = client.function("f", returns=bytes).call_with_bill(1)
    assert (result.status, result.headers["location"]) == (303, "https://elsewhere.example")


def test_a_forked_process_has_connections_of_its_own() -> None:
    """On one connection with its parent each would read answers of the other."""
    app = Together(1)
    with serving(app) as server, client_of(server) as client:
        function = client.function("f")
        assert function.call(1) == 1
        child = os.fork()
        if not child:
            os._exit(0 if function.call(2) == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert function.call(3) == 1
    assert app.ports[0] == app.ports[2] != app.ports[1]


def test_handles_go_to_other_processes_by_pickle() -> None:
    """`Pool.map(function.call, inputs)` sends it to each."""
    with serving(Answers(OK, OK)) as server, Client(server.url, "fs_key", timeout_s=20, retries=3) as client:
        function = pickle.loads(pickle.dumps(client.function("f", returns=int).with_options(headers={"x-a": "b"})))
        assert function.call(1) == 1
        assert (function._options.timeout_s, function._transport.policy.retries) == (20, 3)
        again = pickle.loads(pickle.dumps(client))
        assert again.function("f").call(1) == 1
        for one in (function._transport.http, again):
            one.close()


@pytest.mark.parametrize(
    "error",
    [
        errors.RateLimited("not now", hint="later", retry_after_s=2.0),
        errors.InputFailed(3, {"a": 1}, errors.NotFound("no such function", hint="fs ls")),
        errors.HandlerResponse("no", status=418, headers={"x-a": "b"}, body=b"tea"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_go_to_other_processes_by_pickle(error: errors.FleetError) -> None:
    """A pool of processes whose worker raised one that cannot be read again hangs."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert repr(vars(again)) == repr(vars(error))
