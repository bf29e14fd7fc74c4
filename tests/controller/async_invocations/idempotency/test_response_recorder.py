"""Stored answers, as they are sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetstart.controller.async_invocations.idempotency.response_recorder import send_answer
from fleetstart.controller.state.invocation_records import Answer


def sent(status: int, body: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and body of the answer, as the server gets them."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    answer = Answer(claim=1, http_status=status, headers=[("content-type", "text/plain")], body_bytes=len(body))
    asyncio.run(send_answer(send, answer, body, [(b"x-request-id", b"inv-1")]))
    return dict(messages[0]["headers"]), messages[1]["body"]


def test_an_answer_has_its_length() -> None:
    assert sent(200, b"null") == (
        {b"content-type": b"text/plain", b"x-request-id": b"inv-1", b"content-length": b"4"},
        b"null",
    )


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_content_has_none_whatever_its_worker_sent(status: int) -> None:
    """The client, or a proxy before it, would take it for the response to the next request."""
    headers, body = sent(status, b"HTTP/1.1 200 OK\r\n\r\n")
    assert (b"content-length" in headers, body) == (False, b"")
