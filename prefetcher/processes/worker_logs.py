"""Worker logs: lines that workers print, on their way to their function's log stream in Redis.

A worker's pipe is always read, so that a worker never blocks on printing. Lines are cut at `LINE_MAX_BYTES` and
limited in rate, with a line that counts the dropped ones. The caller takes batches and writes them; while Redis is
unavailable they wait, and the oldest are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.process.token_bucket import TokenBucket

LINE_MAX_BYTES = 16 * 1024
LINES_PER_S = 1000
"""Sustained rate limit of one worker: more than a person reads, little for Redis."""
BURST_LINES = 4000
MAX_BUFFERED_LINES = 20_000
"""Buffer of all workers together, while Redis is unavailable."""
EARLY_LINES = 200
"""Lines kept of a preforked worker until it has a function."""
READ_BYTES = 64 * 1024
READS_AT_ONCE = 16
"""Reads of one worker before the event loop continues: a flood must not delay another worker's start."""

Stream = Literal["stdout", "stderr", "system"]


class LineSplitter:
    """Splits bytes into lines. A line beyond the limit is cut there and continues as the next one."""

    def __init__(self, limit_bytes: int = LINE_MAX_BYTES) -> None:
        self._limit = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in whole for piece in self._pieces(line)]
        if len(self._rest) >= self._limit:
            *full, self._rest = self._pieces(self._rest)
            lines.extend(full)
        return [_text(line) for line in lines]

    def close(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        return [line[begin : begin + self._limit] for begin in range(0, max(len(line), 1), self._limit)]


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


class LogBuffer:
    """Lines of all workers on their way to Redis."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[FunctionName, LogLine]] = deque(maxlen=MAX_BUFFERED_LINES)
        self.arrived = asyncio.Event()

    def write(
        self,
        function: FunctionName,
        worker: WorkerId,
        version: Version,
        stream: Stream,
        text: str,
        invocation: str = "",
    ) -> None:
        """Adds a line. `invocation` is the call that printed it, if known."""
        line = LogLine(
            unix_ms=time.time_ns() // 1_000_000,
            worker=worker,
            version=version,
            stream=stream,
            text=text,
            invocation=invocation,
        )
        self._waiting.append((function, line))
        self.arrived.set()

    def take(self, most: int = 2000) -> list[tuple[FunctionName, LogLine]]:
        batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        if not self._waiting:
            self.arrived.clear()
        return batch

    def put_back(self, batch: list[tuple[FunctionName, LogLine]]) -> None:
        """Puts a batch that could not be written back in front, as far as there is room."""
        free_lines = MAX_BUFFERED_LINES - len(self._waiting)
        self._waiting.extendleft(reversed(batch[-free_lines:] if free_lines else []))
        self.arrived.set()


class LogPipe:
    """The read end of one worker's output. Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._splitter = LineSplitter()
        self._lines = TokenBucket(per_s=LINES_PER_S, burst=BURST_LINES)
        self._early: deque[str] = deque(maxlen=EARLY_LINES)
        self._sink: Callable[[str], None] = self._early.append
        asyncio.get_running_loop().add_reader(fd, self._read)

    def send_to(self, sink: Callable[[str], None]) -> None:
        """Passes lines to `sink` from now on, those buffered so far first."""
        self._sink = sink
        while self._early:
            sink(self._early.popleft())

    def close(self) -> None:
        """Reads what is left and closes; does not wait for a grandchild that keeps the pipe open."""
        if self._fd < 0:
            return
        self._read(reads=1024)
        if self._fd >= 0:
            self._close_fd()

    def _read(self, reads: int = READS_AT_ONCE) -> None:
        for _ in range(reads):
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_fd()
                return
            for line in self._splitter.feed(data):
                self._pass(line)

    def _pass(self, line: str) -> None:
        allowed = self._lines.try_take(time.monotonic())
        if allowed and (dropped := self._lines.pop_refused()):
            self._sink(f"… {dropped} lines dropped: more than {LINES_PER_S} a second")
        if allowed:
            self._sink(line)

    def _close_fd(self) -> None:
        for line in self._splitter.close():
            self._pass(line)
        if dropped := self._lines.pop_refused():
            self._sink(f"… {dropped} lines dropped: more than {LINES_PER_S} a second")
        with contextlib.suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1


_MARK = re.compile("\x1e([12])([A-Za-z0-9._:-]{0,128})\x1f")


class TaggedLine(NamedTuple):
    """A printed line with its stream and invocation."""

    stream: Literal["stdout", "stderr"]
    invocation: str
    """Empty if unknown."""
    text: str


def parse_tagged_line(line: str) -> TaggedLine:
    """Parses the tag of a line (`runtime` writes it). The first tag counts; others come from lines that were cut
    short, and are removed."""
    found = _MARK.search(line) if "\x1e" in line else None
    if found is None:
        return TaggedLine("stdout", "", line)
    return TaggedLine("stdout" if found[1] == "1" else "stderr", found[2], _MARK.sub("", line))
