"""A local file of changes that have begun and are not in the audit log yet, so that neither a controller that is killed
in the middle nor a Redis that goes away loses who did them.

A line is written before the change begins, another with its result if the log cannot take that yet, and one when it
has. Lines outlive the process in the page cache. The next controller of the home writes what dead ones left: of a
change without a result it says that nobody knows it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..schemas.access import AuditEvent

log = logging.getLogger(__name__)

SUFFIX = ".audit"
UNKNOWN = "unknown"
"""Error code of a change whose controller was killed before it had a result."""


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    event: AuditEvent | None = None
    """None: the log has it."""


class AuditJournal:
    def __init__(self, folder: Path, gateway: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / f"{gateway}{SUFFIX}"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._number = 0
        self._open: set[int] = set()

    def begin(self, event: AuditEvent) -> int:
        """Notes a change that is about to be made; returns its number."""
        self._number += 1
        self._open.add(self._number)
        self._append(JournalLine(self._number, event))
        return self._number

    def ended(self, number: int, event: AuditEvent) -> None:
        """Notes the result of a change, which the log has not taken."""
        self._append(JournalLine(number, event))

    def written(self, number: int) -> None:
        """The log has the change."""
        self._open.discard(number)
        if self._open:
            self._append(JournalLine(number))
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def recover(self) -> Iterator[tuple[Path, list[AuditEvent]]]:
        """Yields the files of dead controllers with what is in no log. Delete each once it is."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path == self._path:
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, left_in(file.read())

    def close(self) -> None:
        if not self._open:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _append(self, line: JournalLine) -> None:
        try:
            # With its newline in front, what a full disk cut short spoils no other line.
            os.write(self._descriptor, b"\n" + msgspec.json.encode(line))
        except OSError as error:
            log.error("a change is noted in memory only until redis has it", extra={"error": str(error)})


def left_in(data: bytes) -> list[AuditEvent]:
    """The events of a journal that are in no log, in the order in which they began. Pure."""
    left: dict[int, AuditEvent] = {}
    for raw in data.split(b"\n"):
        try:
            line = msgspec.json.decode(raw, type=JournalLine)
        except msgspec.DecodeError:
            continue
        if line.event is None:
            left.pop(line.number, None)
        else:
            left[line.number] = line.event
    return list(left.values())
