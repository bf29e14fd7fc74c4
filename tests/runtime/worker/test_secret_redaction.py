"""Errors that the platform makes lose secrets, answers of the handler's own stay as they are."""

from __future__ import annotations

import asyncio
from typing import Any

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.contract.process.redaction import Redactor
from fleetstart.runtime.worker.secret_redaction import redact_errors
from fleetstart.runtime.worker_io.asgi import Receive, Scope, Send, respond, respond_error

SECRET = 'hf_"quoted" ✓'


def answered(app: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    async def call() -> None:
        await redact_errors(app, Redactor([SECRET]))({"type": "http"}, receive, send)

    asyncio.run(call())
    return sent


def test_an_error_of_the_platform() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_error(send, HandlerFailed(f"ValueError: bad token {SECRET}"), "id-1")

    start, body = answered(app)
    assert (
        body["body"] == b'{"error":{"code":"handler_error","message":"ValueError: bad token ***"},"request_id":"id-1"}'
    )
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert start["status"] == 500


def test_an_error_that_ends_a_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": f"data: {SECRET}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": f"event: error\ndata: {SECRET}\n\n".encode()})

    _, first, last = answered(app)
    assert SECRET.encode() in first["body"], "what the handler sends is its own affair"
    assert last["body"] == b"event: error\ndata: ***\n\n"


def test_an_answer_of_the_handler() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 500, SECRET.encode(), b"text/plain")

    assert answered(app)[1]["body"] == SECRET.encode()


def test_without_secrets_the_app_is_served_as_it_is() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    assert redact_errors(app, Redactor()) is app
