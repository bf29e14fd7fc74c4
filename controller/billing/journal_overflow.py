"""The overflow of the journal: rows beyond what memory holds while Redis is away, in files, and read back afterwards.

An outage of an hour at a thousand calls a second is gigabytes of rows. They wait in files of one size, the oldest are
taken first, and there is a limit to all of them: beyond it rows are lost, and counted. The files are like the
journal's, so the next controller recovers them.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from fleetstart.runtime.contract.billing.ledger import InvocationRow

from .journal import SUFFIX, RowFile, rows_in

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20
"""Size of a file: some thousand rows, which are in memory together when they are read back."""
OVERFLOW_MAX_BYTES = 1 << 30
"""Size of all: more than a million rows."""


class JournalOverflow:
    def __init__(self, folder: Path, gateway: str, *, max_bytes: int = OVERFLOW_MAX_BYTES) -> None:
        self._folder = folder
        self._gateway = gateway
        self._max_bytes = max_bytes
        self._files: deque[RowFile] = deque()
        """Oldest first; the last one is written to."""
        self._number = 0
        self.lost = 0
        """Rows that found no room; their calls are not billed."""

    def __bool__(self) -> bool:
        return bool(self._files)

    def add(self, row: InvocationRow) -> bool:
        """Keeps the row; False if there is no room for it."""
        try:
            if sum(file.size_bytes for file in self._files) >= self._max_bytes:
                raise OSError(f"{self._max_bytes:,} bytes of rows wait for redis already")
            if not self._files or self._files[-1].size_bytes >= FILE_BYTES:
                self._number += 1
                self._files.append(RowFile(self._folder / f"{self._gateway}-{self._number:06}{SUFFIX}"))
            self._files[-1].append((row,))
        except OSError as error:
            if not self.lost:
                log.error("rows are lost: calls are not billed until redis is back", extra={"error": str(error)})
            self.lost += 1
            return False
        return True

    def oldest(self) -> list[InvocationRow]:
        """The rows of the oldest file, until it is dropped."""
        return list(rows_in(self._files[0].path.read_bytes())) if self._files else []

    def drop_oldest(self) -> None:
        """Deletes the oldest file, whose rows are elsewhere by now."""
        self._files.popleft().close(delete=True)

    def close(self) -> None:
        """Leaves the files to the next controller."""
        while self._files:
            self._files.popleft().close(delete=False)
