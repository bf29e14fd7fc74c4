"""WebSockets of the server: uvicorn's protocol with an end that reaches its client, and the refusal of a handshake."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from fleetstart.runtime.contract.errors import FleetError

from .asgi import RawHeaders, Send, error_headers, error_json
from .request_body import LINGER_BYTES, LINGER_S

SWITCHING_PROTOCOLS = 101
BROKEN = "fs.broken"
"""Message key: the server has ended this WebSocket, for a message that is too large or for a breach of the protocol."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. A client whose frame is refused is often in the middle of it: what comes after the close frame is
    discarded for a moment, as closing at once would reset the connection before the client has read why."""

    _refused = False
    _discarded_bytes = 0

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            return
        self._discarded_bytes += len(data)
        if self._discarded_bytes > LINGER_BYTES:
            self.transport.close()

    def handle_parser_exception(self) -> None:
        self._refused = True
        closed, self.close_sent = self.close_sent, True
        if not closed:
            close = self.conn.close_sent
            assert close is not None
            end: Any = {"type": "websocket.disconnect", "code": close.code, "reason": close.reason, BROKEN: True}
            self.queue.put_nowait(end)
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)


async def reject_handshake(send: Send, error: FleetError, request_id: str, extra: RawHeaders | None = None) -> None:
    """Answers the handshake with an error, as a call gets it."""
    body = error_json(error, request_id)
    headers = [*error_headers(error, request_id), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
