"""Whose call it is that prints: each line that Python code writes says so, for the node that keeps it.

    RS stream id US text        stream is 1 or 2; the id is empty outside calls

Which call runs is inherited by its tasks and its thread. What libraries write to the descriptors themselves carries no
mark; it is its worker's. A handler may forge marks: of its own function's log, with ids that are well-formed.
"""

from __future__ import annotations

import io
from contextvars import ContextVar
from typing import Literal

CURRENT_REQUEST_ID: ContextVar[str] = ContextVar("call", default="")
"""Request id of the call on whose behalf code runs."""
BEGIN, END = "\x1e", "\x1f"


class TaggedStream(io.TextIOWrapper):
    """stdout or stderr of a worker. Line-buffered, so that a line is in the log when it is written, also if the process
    is killed next."""

    def __init__(self, fd: Literal[1, 2]) -> None:
        super().__init__(
            io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self._number = fd
        self._open: str | None = None
        """Whose line has no end yet."""

    def write(self, text: str, /) -> int:
        call = CURRENT_REQUEST_ID.get()
        mark = f"{BEGIN}{self._number}{call}{END}" if call or self._number == 2 else ""
        if not text:
            return 0
        marked = text
        if mark:
            body = text[:-1] if text.endswith("\n") else text
            marked = body.replace("\n", f"\n{mark}") + text[len(body) :]
        if self._open is None:
            marked = mark + marked
        elif self._open != call:  # another call's line, which has no end yet, ends here
            marked = f"\n{mark}{marked}"
        self._open = None if text.endswith("\n") else call
        super().write(marked)
        return len(text)
