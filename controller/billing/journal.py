"""The journal: a local write-ahead file of ledger rows until Redis has them, so that a kill -9 loses none.

One file a controller, locked for its life. A row is appended before the last byte of its answer is sent: one
write into the page cache, which outlives the process. The next controller in the same home recovers the rows of
unlocked files; the ledger takes an id once, so a row that Redis had already does no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow

log = logging.getLogger(__name__)

COMPACT_BYTES = 1 << 20
"""Size at which the file is rewritten with the unwritten rows alone: some thousand calls."""
SUFFIX = ".rows"


class Journal:
    def __init__(self, folder: Path, gateway: str) -> None:
        self._folder = folder
        self._path = folder / f"{gateway}{SUFFIX}"
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = _open_locked(self._path)
        self._size_bytes = 0
        self._broken = False

    def append(self, row: InvocationRow) -> None:
        line = msgspec.json.encode(row) + b"\n"
        try:
            self._size_bytes += os.write(self._descriptor, line)
            self._broken = False
        except OSError as error:
            if not self._broken:
                log.error("rows are in memory only, until redis has them", extra={"error": str(error)})
            self._broken = True

    def settle(self, unwritten: Callable[[], list[InvocationRow]]) -> None:
        """Shortens the file to the `unwritten` rows, which are computed only if needed: Redis has all others."""
        if not self._size_bytes:
            return
        try:
            left = unwritten()
            if not left:
                os.ftruncate(self._descriptor, 0)
                self._size_bytes = 0
            elif self._size_bytes > COMPACT_BYTES:
                self._compact(left)
        except OSError as error:
            log.warning("the journal cannot be shortened", extra={"error": str(error)})

    def _compact(self, unwritten: Iterable[InvocationRow]) -> None:
        beside = self._path.with_suffix(".new")
        descriptor = _open_locked(beside)
        data = b"".join(msgspec.json.encode(row) + b"\n" for row in unwritten)
        os.ftruncate(descriptor, 0)
        self._size_bytes = os.write(descriptor, data)
        beside.rename(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def recover(self) -> Iterator[InvocationRow]:
        """Yields the rows of dead controllers. Append each one here before taking the next."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path == self._path:
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from _rows(file.read())
                path.unlink()

    def close(self) -> None:
        """Closes the journal, and deletes its file if Redis has everything."""
        if not self._size_bytes:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _rows(data: bytes) -> Iterator[InvocationRow]:
    for line in data.split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError):  # the last line may be torn; its call was not answered
            yield msgspec.json.decode(line, type=InvocationRow)


def _open_locked(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
