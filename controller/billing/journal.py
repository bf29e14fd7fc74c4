"""The journal: a local write-ahead file of ledger rows until Redis has them, so that a kill -9 loses none.

One file a controller, locked for its life. A row is appended before the last byte of its answer is sent: one
write into the page cache, which outlives the process. A disk that is full takes a row whole or not at all. The next
controller in the same home recovers the rows of unlocked files; the ledger takes an id once, so a row that Redis had
already does no harm. Rows beyond what memory holds go to `journal_overflow`.
"""

from __future__ import annotations

import asyncio
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


class RowFile:
    """A locked file of rows, one a line. A row that does not fit on the disk leaves no part of it behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.size_bytes = os.fstat(self._descriptor).st_size
        except OSError:
            os.close(self._descriptor)
            raise

    def append(self, rows: Iterable[InvocationRow]) -> None:
        """Errors: OSError; then the file is as it was."""
        data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):  # else the line is torn, and what is glued to it is no row
                os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += len(data)

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.size_bytes = 0

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self, *, delete: bool) -> None:
        if delete:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Journal:
    def __init__(self, folder: Path, gateway: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = RowFile(folder / f"{gateway}{SUFFIX}")
        self._next: RowFile | None = None
        """The shorter file that takes its place, while it is written to the disk."""
        self._broken = False
        """Rows are missing in the file."""

    def append(self, row: InvocationRow) -> None:
        try:
            self._file.append((row,))
            if self._next is not None:
                self._next.append((row,))
        except OSError as error:
            if not self._broken:
                log.error("rows are in memory only, until redis has them", extra={"error": str(error)})
            self._broken = True

    async def settle(self, unwritten: Callable[[], list[InvocationRow]]) -> None:
        """Shortens the file to the `unwritten` rows, which are computed only if needed: Redis has all others. Writes
        those that it could not take when they came."""
        if not self._file.size_bytes and not self._broken:
            return
        try:
            left = unwritten()
            if not left:
                self._file.clear()
                self._broken = False
            elif self._file.size_bytes > COMPACT_BYTES or self._broken:
                await self._compact(left)
        except OSError as error:
            log.warning("the journal cannot be shortened", extra={"error": str(error)})

    async def _compact(self, unwritten: Iterable[InvocationRow]) -> None:
        """Rewrites the file. Rows that come meanwhile go into both. A rename before the new file is on the disk could
        leave an empty one after a power failure."""
        path = self._file.path
        beside = path.with_suffix(".new")
        beside.unlink(missing_ok=True)
        self._next = following = RowFile(beside)
        self._broken = False
        try:
            following.append(unwritten)
            await asyncio.to_thread(following.sync)
            if self._broken:
                raise OSError("a row that came meanwhile was not written")
            beside.rename(path)
        except BaseException:
            self._next = None
            self._broken = True
            following.close(delete=True)
            raise
        self._next, before = None, self._file
        before.close(delete=False)
        following.path = path
        self._file = following
        await asyncio.to_thread(_sync_folder, self._folder)

    def recover(self) -> Iterator[InvocationRow]:
        """Yields the rows of dead controllers. Append each one here before taking the next."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path == self._file.path:
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from rows_in(file.read())
                path.unlink()

    def close(self) -> None:
        """Closes the journal, and deletes its file if Redis has everything."""
        self._file.close(delete=not self._file.size_bytes)


def rows_in(data: bytes) -> Iterator[InvocationRow]:
    for line in data.split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError):  # the last line may be torn; its call was not answered
            yield msgspec.json.decode(line, type=InvocationRow)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
