"""Open-loop load: calls at a given rate, whether or not the ones before were answered; each is kept with its times.

A client that waits for its answer slows down with the server, and so hides an overload. This one does not: each call
has its moment, and if the generator itself is late, that shows (`late_ms`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.bench.harness.wire import parse_head

CALL_S = 30.0
"""After which a call is given up: the benchmark must end, whatever the server does."""


@dataclass(slots=True)
class Sent:
    """Times are the loop's, in s."""

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    """0: no answer."""
    queue_ms: float = 0.0
    """Of an answer: how long it waited for its worker, as it says itself."""
    retry_s: float = 0.0
    """Of a refusal: when to come again."""
    code: str = ""

    @property
    def took_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1e3

    @property
    def late_ms(self) -> float:
        return (self.sent_s - self.due_s) * 1e3


class OpenLoop:
    """Connections are kept and used again; there are as many as calls under way."""

    def __init__(self, host: str, port: int, raw: bytes) -> None:
        self._host = host
        self._port = port
        self._raw = raw
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self, due_s: Iterable[float], heard: Callable[[Sent], None] = lambda _: None) -> list[Sent]:
        """A call at each of these times; returns when all have their answer. `heard` is told of each at once."""
        loop = asyncio.get_running_loop()
        calls: list[Sent] = []
        async with asyncio.TaskGroup() as group:
            for at_s in due_s:
                wait_s = at_s - loop.time()
                if wait_s > 0.0005:
                    await asyncio.sleep(wait_s)
                call = Sent(at_s)
                calls.append(call)
                group.create_task(self._call(call, heard))
        return calls

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _call(self, call: Sent, heard: Callable[[Sent], None]) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                reader, writer = (
                    self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
                )
                call.sent_s = loop.time()
                writer.write(self._raw)
                status, headers = parse_head((await reader.readuntil(b"\r\n\r\n"))[:-4])
                await reader.readexactly(int(headers.get("content-length", "0")))
                call.ended_s = loop.time()
                call.status, call.code = status, headers.get("fs-error", "")
                call.retry_s = float(headers.get("retry-after-ms", "0")) / 1e3
                call.queue_ms = _queue_ms(headers.get("server-timing", ""))
                if headers.get("connection") == "close":
                    writer.close()
                else:
                    self._idle.append((reader, writer))
        heard(call)


def _queue_ms(timing: str) -> float:
    for part in timing.split(","):
        name, _, rest = part.strip().partition(";")
        if name == "queue":
            return float(rest.partition("dur=")[2].partition(";")[0] or 0)
    return 0.0
