"""The outermost middleware: what a layer below it raises."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from fleetstart.controller.http.asgi import Message, Receive, Scope, Send
from fleetstart.controller.observability.request_id_middleware import RequestIdMiddleware


def served(*, starts: bool) -> list[Message]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("a fault of the platform")

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    middleware = RequestIdMiddleware(app, refused=lambda code: None, sample=False)
    asyncio.run(middleware({"type": "http", "path": "/fn/f", "headers": []}, receive, send))
    return sent


def test_a_fault_of_the_platform_is_logged_and_answered_as_one(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn's own lines are not shown: it was a 500 without a word anywhere."""
    with caplog.at_level(logging.ERROR):
        start, body = served(starts=False)
    error = json.loads(body["body"])
    assert (start["status"], error["error"]["code"], error["request_id"][:4]) == (500, "internal", "inv-")
    assert "a request failed in the controller" in caplog.text
    assert "KeyError" in caplog.text


def test_one_in_mid_answer_is_logged_and_cuts_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError):
        served(starts=True)
    assert "a request failed in the controller" in caplog.text
