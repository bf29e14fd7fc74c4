"""WebSocket handshakes at the ASGI level: the status that accepts one, and its refusal."""

from __future__ import annotations

from fleetstart.runtime.contract.errors import FleetError

from .asgi import RawHeaders, Send, error_headers, error_json


async def reject_handshake(send: Send, error: FleetError, request_id: str, extra: RawHeaders | None = None) -> None:
    """Answers the handshake with an error, as a call gets it."""
    body = error_json(error, request_id)
    headers = [*error_headers(error, request_id), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


SWITCHING_PROTOCOLS = 101
