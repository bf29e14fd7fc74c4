"""Keeps secrets out of the errors that the platform makes of what a handler raised: an ASGI layer, outermost.

Answers that the handler makes are its own and pass untouched.
"""

from __future__ import annotations

from ..contract.process.redaction import Redactor
from ..contract.worker_headers import ERROR_HEADER
from ..worker_io.asgi import App, Message, Receive, Scope, Send

_ERROR = ERROR_HEADER.encode()
_EVENT = b"event: error\n"


def redact_errors(app: App, redactor: Redactor) -> App:
    """The app itself if there is nothing to keep."""
    if not redactor:
        return app

    async def layer(scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and any(name == _ERROR for name, _ in message["headers"]):
                held = message  # its length is not known before its body is
                return
            if message["type"] == "http.response.body" and held is not None:
                body = redactor.data(message.get("body", b""))
                headers = [pair for pair in held["headers"] if pair[0] != b"content-length"]
                if not message.get("more_body", False):
                    headers.append((b"content-length", b"%d" % len(body)))
                start, held = {**held, "headers": headers}, None
                await send(start)
                await send({**message, "body": body})
                return
            if message["type"] == "http.response.body" and message.get("body", b"").startswith(_EVENT):
                message = {**message, "body": redactor.data(message["body"])}
            await send(message)

        await app(scope, receive, sending)

    return layer
