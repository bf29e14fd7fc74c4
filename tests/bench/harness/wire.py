"""Minimal HTTP/1.1 client with a kept connection: its own cost must not hide what it measures.

One buffer, no header objects, stamps taken right before the send and right after the last byte that matters.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    sent_ns: int
    ended_ns: int
    token_ns: int = 0
    """When the first piece of text of an event stream had come."""

    @property
    def total_ms(self) -> float:
        return (self.ended_ns - self.sent_ns) / 1e6

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns - self.sent_ns) / 1e6

    def expect(self, status: int = 200) -> Answer:
        if self.status != status:
            raise RuntimeError(f"status {self.status}: {self.body[:500]!r}")
        return self


class Connection:
    def __init__(
        self, host: str, port: int, *, headers: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> None:
        """`headers`: those of each request that is made here."""
        self._host = f"{host}:{port}"
        self._headers = headers
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, path: str, value: Any) -> Answer:
        return self.send(request("POST", path, self._host, value, self._headers))

    def get(self, path: str) -> Answer:
        return self.send(request("GET", path, self._host, headers=self._headers))

    def send(self, raw: bytes) -> Answer:
        """Sends a whole request and reads the whole answer."""
        sent_ns = time.monotonic_ns()
        self._socket.sendall(raw)
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            self._more(data)
        status, headers = parse_head(bytes(data[:end]))
        del data[: end + 4]
        if headers.get("transfer-encoding") == "chunked":
            body, token_ns = self._chunks(data)
        else:
            length = int(headers.get("content-length", "0"))
            while len(data) < length:
                self._more(data)
            body, token_ns = bytes(data), 0
        ended_ns = time.monotonic_ns()
        return Answer(status=status, headers=headers, body=body, sent_ns=sent_ns, ended_ns=ended_ns, token_ns=token_ns)

    def _chunks(self, data: bytearray) -> tuple[bytes, int]:
        """A chunked body, and when the first event with text in it was complete."""
        body = bytearray()
        token_ns = 0
        while True:
            while (end := data.find(b"\r\n")) < 0:
                self._more(data)
            size = int(bytes(data[:end]).split(b";")[0], 16)
            while len(data) < end + 2 + size + 2:
                self._more(data)
            body += data[end + 2 : end + 2 + size]
            del data[: end + 2 + size + 2]
            if not token_ns and has_text(bytes(body)):
                token_ns = time.monotonic_ns()
            if size == 0:
                return bytes(body), token_ns

    def _more(self, data: bytearray) -> None:
        piece = self._socket.recv(1 << 16)
        if not piece:
            raise ConnectionError(f"{self._host} closed the connection in mid-answer")
        data += piece


def request(method: str, path: str, host: str, value: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    body = b"" if value is None else json.dumps(value).encode()
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in rest)
    return int(first.split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}


def has_text(events: bytes) -> bool:
    """True once an OpenAI stream has carried text: a complete event whose delta has content."""
    for event in events.split(b"\n\n")[:-1]:
        if not event.startswith(b"data: {"):
            continue
        choices = json.loads(event[6:]).get("choices") or []
        if choices and ((choices[0].get("delta") or {}).get("content") or choices[0].get("text")):
            return True
    return False
