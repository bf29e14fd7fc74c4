"""Errors of HEAD requests: their code and sentence in headers, because a response to HEAD has no body."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import ErrorBody, ErrorInfo
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER

from .asgi import Message, RawHeaders, Send

MESSAGE_HEADER = "fs-error-message"
HINT_HEADER = "fs-error-hint"
TEXT_MAX = 1000
"""Longest sentence in a header, in characters."""
_READABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters that stay as they are; all others are percent-encoded, since headers are ASCII."""
_ERROR = ERROR_HEADER.encode()


def error_info_headers(info: ErrorInfo) -> RawHeaders:
    """The headers that stand for an error's sentence and hint."""
    texts = ((MESSAGE_HEADER, info.message), (HINT_HEADER, info.hint))
    return [(name.encode(), quote(text[:TEXT_MAX], safe=_READABLE).strip().encode()) for name, text in texts if text]


def error_info_of(headers: Mapping[str, str]) -> ErrorInfo | None:
    """The error of a response without a body; None if its headers tell of none."""
    code, message = headers.get(ERROR_HEADER, ""), headers.get(MESSAGE_HEADER, "")
    if not code or not message:
        return None
    return ErrorInfo(code=code, message=unquote(message), hint=unquote(headers.get(HINT_HEADER, "")))


class HeadErrors:
    """Sends the error of one HEAD request in headers: it holds the head until the body is known."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and any(name == _ERROR for name, _ in message.get("headers", ())):
            self._held = message
            return
        if self._held is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        held, self._held = self._held, None
        try:
            told = error_info_headers(msgspec.json.decode(self._body, type=ErrorBody).error)
        except UNDECODABLE:
            told = []
        await self._send({**held, "headers": [*held.get("headers", ()), *told]})
        await self._send({"type": "http.response.body", "body": bytes(self._body), "more_body": False})
