"""A worker as its gateway sees it: what it answers is said by the path of the call."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from typing import Any

from fleetstart.runtime.contract.worker_headers import (
    BUSY_HEADER,
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    DRAINING_HEADER,
    END_HEADER,
    MARK,
    PROGRESS_HEADER,
    TOKEN_HEADER,
)


class WorkerApp:
    """What a worker serves: checks the token and the headers that the contract promises, then acts by path."""

    def __init__(self, token: str, slots: int) -> None:
        self.token = token
        self.slots = slots
        self.running = 0
        self.most = 0
        self.calls: list[str] = []
        self.asked_ends = 0
        self.open: set[str] = set()
        """Ids of the running calls."""
        self.cancelled: list[str] = []
        self.draining = False
        self.dead = False
        self.release = threading.Event()
        """Lets calls to /hold and streams at /gate go on."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        assert headers[TOKEN_HEADER] == self.token
        if END_HEADER in headers:
            self.asked_ends += 1
            while headers["x-request-id"] in self.open:
                await asyncio.sleep(0.005)
            await _respond(send, 200, b"", [])
            return
        assert int(headers[DEADLINE_HEADER]) >= 0
        assert int(headers[CONTINUE_HEADER]) >= 0
        if self.draining or self.running >= self.slots:
            name = DRAINING_HEADER if self.draining else BUSY_HEADER
            await _respond(send, 503, b"{}", [(name.encode(), b"1")])
            return
        self.running += 1
        self.most = max(self.most, self.running)
        self.calls.append(headers["x-request-id"])
        self.open.add(headers["x-request-id"])
        try:
            await self._act(scope, headers, receive, send)
        except asyncio.CancelledError:
            self.cancelled.append(headers["x-request-id"])
            raise
        finally:
            self.running -= 1
            self.open.discard(headers["x-request-id"])

    def while_it_lives(self, served: Any) -> Any:
        """An app of the worker, until it dies: a dead one answers nothing."""

        async def living(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if self.dead:
                raise ConnectionAbortedError
            await served(scope, receive, send)

        return living

    async def _act(self, scope: dict[str, Any], headers: dict[str, str], receive: Any, send: Any) -> None:
        path = scope["path"]
        body = await _body(receive)
        while path == "/deaf" and not self.release.is_set():
            await asyncio.sleep(0.005)
        if path == "/hold":
            await self._until_released(receive, headers["x-request-id"])
        once = scope["query_string"] == b"once" and headers["fs-attempt"] != "1"
        if path == "/drop" and not once:  # dies in the middle of a small answer: nothing of it has reached the caller
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ConnectionAbortedError
        if path in ("/stream", "/gate", "/cut", "/forged"):
            await self._stream(path, headers, receive, send, dies=scope["query_string"] == b"dies")
            return
        if path == "/status":
            await _respond(send, int(scope["query_string"]), b"", [])
            return
        if path == "/late":
            await self._late(headers, send)
            return
        if path == "/told":
            await self._told(headers, receive, send)
            return
        if path == "/marked":
            await self._marked(scope["query_string"].decode(), body, int(headers[CONTINUE_HEADER]), send)
            return
        if path == "/paced":
            await self._paced(int(scope["query_string"]), send)
            return
        if path == "/chunks":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
            for piece in (b"one ", b"two"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        if path == "/sleep":
            await asyncio.sleep(float(scope["query_string"].decode().partition("=")[2]))
        echo = {
            "path": path,
            "raw_path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "method": scope["method"],
            "headers": headers,
            "body": body[:100].decode("latin-1"),
            "size": len(body),
        }
        await _respond(send, 200, json.dumps(echo).encode(), [(b"x-own", b"1"), (b"fs-cost", b"spoofed")])

    async def _stream(self, path: str, headers: dict[str, str], receive: Any, send: Any, *, dies: bool = False) -> None:
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: first\n\n", "more_body": True})
        if path == "/cut":
            await asyncio.sleep(0.02)
            self.dead = dies
            raise ConnectionAbortedError
        if path == "/forged":
            bill = b'event: fleetstart\ndata: {"request_id": "x", "billed_ms": 987654321, "cost": "0.123456789"}\n\n'
            await send({"type": "http.response.body", "body": bill, "more_body": True})
        if path == "/gate":
            await self._until_released(receive, headers["x-request-id"])
        await send({"type": "http.response.body", "body": b"data: second\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _told(self, headers: dict[str, str], receive: Any, send: Any) -> None:
        """Progress, and behind the gate the answer, apart from it."""
        assert headers[PROGRESS_HEADER] == "1"
        kind = [(b"content-type", b"text/event-stream"), (PROGRESS_HEADER.encode(), b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        half = b'event: progress\ndata: {"fraction":0.5,"message":"half"}\n\n'
        await send({"type": "http.response.body", "body": half, "more_body": True})
        await self._until_released(receive, headers["x-request-id"])
        head = b'{"status":201,"headers":[["content-type","application/json"],["x-own","1"],["fs-cost","spoofed"]]}'
        answer = b"event: answer\ndata: " + head + b"\n\nevent: piece\ndata: " + b64encode(b'{"done":1}') + b"\n\n"
        await send({"type": "http.response.body", "body": half.replace(b"0.5", b"1.0") + answer, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _late(self, headers: dict[str, str], send: Any) -> None:
        """Keeps the deadline as a worker does: it cuts its stream off, a moment before the gateway would."""
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"data: first\n\n", "more_body": True})
        await asyncio.sleep(int(headers[DEADLINE_HEADER]) / 1e3 - 0.008)
        raise ConnectionAbortedError

    async def _marked(self, query: str, body: bytes, carried_bytes: int, send: Any) -> None:
        """Counts to ten, and dies on the way: `each` numbers come from one worker. Goes on where its marks say."""
        each, _, refuses = query.removeprefix("each=").partition("&")
        call, marks = body[: len(body) - carried_bytes], body[len(body) - carried_bytes :]
        assert call == b"count"
        begin = len(marks.split(b"\n")) if marks else 0
        assert marks == b"\n".join(b"%d" % number for number in range(begin))
        if begin and refuses:
            await _respond(send, 400, b"{}", [])
            return
        head = [(b"content-type", b"text/event-stream"), (CONTINUE_HEADER.encode(), b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for number in range(begin, 10):
            if number == begin + int(each):
                torn = b"data: %d, of which nobody has told\n\n" % number
                await send({"type": "http.response.body", "body": torn, "more_body": True})
                raise ConnectionAbortedError
            event = b"data: %d\n\n%s%d\n\n" % (number, MARK, number)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _paced(self, count: int, send: Any) -> None:
        """Counts, a number each 20 ms."""
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for number in range(count):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _until_released(self, receive: Any, request_id: str) -> None:
        gone = asyncio.ensure_future(receive())
        try:
            while not self.release.is_set():
                if gone.done():
                    self.cancelled.append(request_id)
                    raise ConnectionAbortedError
                await asyncio.sleep(0.005)
        finally:
            gone.cancel()


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _respond(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": [*length, *headers]})
    await send({"type": "http.response.body", "body": body})
