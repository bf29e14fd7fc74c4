"""Warm-up of the call path: the fork server serves a few calls to itself, so that workers inherit a warm path.

It imports what libraries import on first use, fills the caches of `typing` and msgspec, and lets the
interpreter specialise the code of the hot path: about 8 ms that every worker would spend between its
assignment and its first answer. It uses no thread, and leaves no socket and no loop behind.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec
import uvloop

from ..contract.node.messages import DaemonMessage, Ready
from ..contract.timeline import Timeline
from ..contract.worker_headers import TOKEN_HEADER
from ..handlers.app import handler_app
from ..worker.call_gate import CallGate, Meter
from ..worker.server import WorkerServer

DEADLINE_S = 5.0
_CALLS = 20
"""The interpreter specialises code after a few runs."""


def warm_up_call_path() -> None:
    """Serves the calls. Errors: RuntimeError if the path fails here, as it would in every worker."""
    # msgspec looks at each type once and keeps what it saw with the type: 2 ms for these.
    msgspec.json.Decoder(DaemonMessage)
    msgspec.json.encode(Ready(Timeline()))
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(_serve_calls(), DEADLINE_S))
    finally:
        loop.close()


async def _serve_calls() -> None:
    async def handler(name: str = "", count: int = 0) -> dict[str, str]:
        return {"name": name * count}

    app = handler_app(handler, slots=1, bundle_dir="/")
    gate = CallGate(app, token="warm-up", meter=Meter(1), bundle_dir="/", changed=lambda: None)
    listener = WorkerServer(gate, lifespan=False)
    sock = socket.create_server(("127.0.0.1", 0))
    await listener.start(sock)
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        for call in range(_CALLS):
            body = b'{"name":"a"}' if call % 2 else b""
            head = f"POST /?count=1 HTTP/1.1\r\nhost: here\r\n{TOKEN_HEADER}: warm-up\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if not status.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"a worker's server answers {status!r} here")
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
    finally:
        writer.close()
        await listener.stop()
        sock.close()
