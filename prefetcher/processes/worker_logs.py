"""Worker logs: lines that workers print, on their way to their function's log stream in Redis.

A worker's pipe is read for as long as its share of the loop's time lasts (`read_budget`): one that floods it waits on
printing, and no other does. Lines are cut at `LINE_MAX_BYTES` and
limited in rate, in lines and in bytes as they are stored, with a line that counts the dropped ones. The caller takes
batches and writes them; while Redis is unavailable they wait, and the oldest of the function with the most are dropped.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.process.token_bucket import TokenBucket
from fleetstart.runtime.contract.sizes import MIB

from .read_budget import FairReader, ReadBudget, WorkerShare

LINE_MAX_BYTES = 16 * 1024
LINES_PER_S = 1000
"""Sustained rate limit of one worker: more than a person reads, little for Redis."""
BURST_LINES = 4000
BYTES_PER_S = MIB
"""The same in bytes of JSON: a control character takes six."""
BURST_BYTES = 4 * MIB
MAX_BUFFERED_LINES = 20_000
"""Buffer of all workers together, while Redis is unavailable."""
MAX_BUFFERED_BYTES = 16 * MIB
LINE_OVERHEAD_BYTES = 200
"""What a line takes beside its text: its record, and its place in memory."""
BATCH_BYTES = 4 * MIB
"""Bytes written to Redis at a time, which others wait for."""
EARLY_LINES = 200
"""Lines kept of a preforked worker until it has a function."""
READ_BYTES = 8 * 1024
"""One read: lines of one character, 4,000 of them, take some milliseconds of the loop."""
READS_AT_ONCE = 128
"""Reads of one worker before the event loop continues, if its time lasts: a flood must not delay another's start."""
FINAL_READS = 8 * 1024
"""Reads of a worker that has ended: more than its pipe holds."""

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
    """Lines of all workers on their way to Redis, in order for each function."""

    def __init__(self) -> None:
        self._waiting: dict[FunctionName, deque[LogLine]] = {}
        self._bytes: Counter[FunctionName] = Counter()
        self._lines = 0
        self._all_bytes = 0
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
        self._waiting.setdefault(function, deque()).append(line)
        self._count(function, line, 1)
        self._drop_beyond()
        self.arrived.set()

    def take(self, most: int = 2000) -> list[tuple[FunctionName, LogLine]]:
        """Takes a batch: up to `most` lines and about `BATCH_BYTES`, of the functions in turn."""
        batch: list[tuple[FunctionName, LogLine]] = []
        taken_bytes = 0
        while self._waiting and len(batch) < most and taken_bytes < BATCH_BYTES:
            for function in list(self._waiting):
                line = self._pop(function)
                taken_bytes += stored_bytes(line.text)
                batch.append((function, line))
                if len(batch) >= most or taken_bytes >= BATCH_BYTES:
                    break
        if not self._waiting:
            self.arrived.clear()
        return batch

    def put_back(self, batch: list[tuple[FunctionName, LogLine]]) -> None:
        """Puts a batch that could not be written back in front, as far as there is room."""
        for function, line in reversed(batch):
            self._waiting.setdefault(function, deque()).appendleft(line)
            self._count(function, line, 1)
        self._drop_beyond()
        self.arrived.set()

    def _drop_beyond(self) -> None:
        """Drops the oldest lines of the function that has the most, while there are too many."""
        while self._lines > MAX_BUFFERED_LINES or self._all_bytes > MAX_BUFFERED_BYTES:
            self._pop(max(self._bytes, key=self._bytes.__getitem__))

    def _pop(self, function: FunctionName) -> LogLine:
        lines = self._waiting[function]
        line = lines.popleft()
        self._count(function, line, -1)
        if not lines:
            del self._waiting[function], self._bytes[function]
        return line

    def _count(self, function: FunctionName, line: LogLine, sign: int) -> None:
        size_bytes = sign * stored_bytes(line.text)
        self._lines += sign
        self._all_bytes += size_bytes
        self._bytes[function] += size_bytes


def stored_bytes(text: str) -> int:
    """Bytes that a line takes as JSON, and about those that it takes in memory."""
    return LINE_OVERHEAD_BYTES + len(msgspec.json.encode(text))


class LogPipe:
    """The read end of one worker's output. Owns its descriptor."""

    def __init__(self, fd: int, share: WorkerShare | None = None) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._splitter = LineSplitter()
        self._lines = TokenBucket(per_s=LINES_PER_S, burst=BURST_LINES)
        self._bytes = TokenBucket(per_s=BYTES_PER_S, burst=BURST_BYTES)
        self._early: deque[str] = deque(maxlen=EARLY_LINES)
        self._sink: Callable[[str], None] = self._early.append
        share = share or ReadBudget().own_share()
        self._reader = FairReader(fd, self._read, share, most_reads=READS_AT_ONCE)

    def send_to(self, sink: Callable[[str], None]) -> None:
        """Passes lines to `sink` from now on, those buffered so far first."""
        self._sink = sink
        while self._early:
            sink(self._early.popleft())

    def close(self) -> None:
        """Reads what is left and closes; does not wait for a grandchild that keeps the pipe open."""
        if self._fd < 0:
            return
        for _ in range(FINAL_READS):
            if not self._read():
                break
        if self._fd >= 0:
            self._close_fd()

    def _read(self) -> bool:
        """Reads a piece; False if there is none now, or none any more."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_fd()
            return False
        for line in self._splitter.feed(data):
            self._pass(line)
        return True

    def _pass(self, line: str) -> None:
        now_s = time.monotonic()
        if self._lines.try_take(now_s) and self._bytes.try_take(now_s, stored_bytes(line)):
            self._tell_dropped()
            self._sink(line)

    def _tell_dropped(self) -> None:
        if dropped := self._lines.pop_refused() + self._bytes.pop_refused():
            self._sink(f"… {dropped} lines dropped: more than {LINES_PER_S} lines or {BYTES_PER_S >> 20} MiB a second")

    def _close_fd(self) -> None:
        for line in self._splitter.close():
            self._pass(line)
        self._tell_dropped()
        self._reader.close()
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
