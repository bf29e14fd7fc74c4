"""Responses of apps: what HTTP does not allow is found before anything of it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import InvalidOutput
from fleetstart.runtime.contract.worker_headers import BUFFERED_BYTES
from fleetstart.runtime.worker_io.response_check import HEADERS_MAX, HEADERS_MAX_BYTES, CheckedResponse

Sent = list[dict[str, Any]]


def sent_of(
    *messages: dict[str, Any], method: str = "GET", heard: str = "http.request", asks: bool = True
) -> tuple[Sent, str]:
    """The messages of the app that reach the server, and the error that the app gets. `heard` is what it receives, if
    it `asks`; a client that is there sends nothing more."""
    sent: Sent = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    still_there = asyncio.Event()

    async def receive() -> Any:
        if heard == "http.request" and still_there.is_set():
            await asyncio.Event().wait()
        still_there.set()
        return {"type": heard}

    async def run() -> None:
        response = CheckedResponse({"method": method}, receive, send)
        if asks:
            await response.receive()
        for message in messages:
            await response.send(message)
        await response.require_complete()

    try:
        asyncio.run(run())
    except InvalidOutput as error:
        return sent, error.message
    return sent, ""


def start(status: Any = 200, *headers: tuple[Any, Any]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes = b"", *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def length(value: bytes) -> tuple[bytes, bytes]:
    return b"Content-Length", value


@pytest.mark.parametrize(
    ("first", "word"),
    [
        (start(101), "status 101"),
        (start(99), "status 99"),
        (start(600), "status 600"),
        (start("200"), "status '200'"),
        (start(200, (b"x-a", b"1\r\nx-injected: yes")), "x-injected"),
        (start(200, (b"x-a", b"a\0b")), "x-a"),
        (start(200, (b"x a", b"1")), "x a"),
        (start(200, (b"", b"1")), "HTTP does not allow"),
        (start(200, ("x-a", "1")), "not bytes"),
        (start(200, length(b"2"), length(b"3")), "'2, 3'"),
        (start(200, length(b"-1")), "'-1'"),
        (start(200, *[(b"x", b"1")] * (HEADERS_MAX + 1)), "101 headers"),
        (start(200, (b"x", b"1" * HEADERS_MAX_BYTES)), "1 headers of 61441 bytes"),
    ],
)
def test_a_head_that_http_does_not_allow_is_an_error_and_nothing_is_sent(first: dict[str, Any], word: str) -> None:
    sent, error = sent_of(first, body(b"ok"))
    assert word in error
    assert sent == []


@pytest.mark.parametrize("data", [b"123", b"12345678"])
def test_a_body_that_is_not_as_long_as_it_was_said_is_an_error_and_nothing_is_sent(data: bytes) -> None:
    sent, error = sent_of(start(200, length(b"5")), body(data))
    assert error == f"the app's response has {len(data)} bytes, and a Content-Length of 5"
    assert sent == []


def test_a_body_in_pieces_is_sent_whole_if_the_gateway_reads_it_whole() -> None:
    head, first = start(200, length(b"5")), body(b"123", more=True)
    assert sent_of(head, first, body(b"45")) == ([head, body(b"12345")], "")
    assert sent_of(head, first, body(b"456", more=True)) == (
        [],
        "the app's response has 6 bytes or more, and a Content-Length of 5",
    )


def test_a_larger_one_is_sent_as_it_comes_until_it_is_too_long() -> None:
    head, first = start(200, length(b"%d" % (BUFFERED_BYTES + 1))), body(bytes(BUFFERED_BYTES), more=True)
    assert sent_of(head, first, body(b"5")) == ([head, first, body(b"5")], "")
    assert sent_of(head, first, body(b"56", more=True)) == (
        [head, first],
        "the app's response has 1048578 bytes or more, and a Content-Length of 1048577",
    )


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_without_content_is_sent_without_any(status: int) -> None:
    kept = (b"etag", b"x")
    assert sent_of(start(status, length(b"4"), kept), body(b"null")) == ([start(status, kept), body()], "")


def test_the_response_to_head_has_the_length_of_what_get_would_get() -> None:
    head = start(200, length(b"1000"))
    assert sent_of(head, body(), method="HEAD") == ([head, body()], "")


def test_chunks_are_for_the_server() -> None:
    chunked = (b"Transfer-Encoding", b"chunked")
    assert sent_of(start(200, length(b"2"), chunked), body(b"ok")) == ([start(200, length(b"2")), body(b"ok")], "")


@pytest.mark.parametrize("messages", [[], [start()], [start(200, length(b"2"))], [start(), body(b"1", more=True)]])
def test_an_app_that_returns_early_is_told_unless_its_client_has_left(messages: Sent) -> None:
    early = "the app returned before its response was complete"
    assert sent_of(*messages)[1] == early
    assert sent_of(*messages, heard="http.disconnect")[1] == ""
    assert sent_of(*messages, heard="http.disconnect", asks=False)[1] == "", "it need not know"
