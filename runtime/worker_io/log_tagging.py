"""Log tagging: every line that Python code prints carries the id of its call, for the node's log.

    RS stream id US text        stream is 1 or 2; the id is empty outside calls

Tasks and threads of a call inherit its id. Output that libraries write to the descriptors directly has no tag and
belongs to the worker. A handler can forge tags, but only in its own function's log and with well-formed ids.
"""

from __future__ import annotations

import io
from contextvars import ContextVar
from typing import Literal

CURRENT_REQUEST_ID: ContextVar[str] = ContextVar("call", default="")
"""Request id of the current call; empty outside calls."""
BEGIN, END = "\x1e", "\x1f"


class TaggedStream(io.TextIOWrapper):
    """stdout or stderr of a worker, with tags. Line-buffered, so that a complete line is in the log even if the process
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
        """Request id of the unfinished line; None if the last line is complete."""

    def write(self, text: str, /) -> int:
        call = CURRENT_REQUEST_ID.get()
        tag = f"{BEGIN}{self._number}{call}{END}" if call or self._number == 2 else ""
        if not text:
            return 0
        tagged = text
        if tag:
            body = text[:-1] if text.endswith("\n") else text
            tagged = body.replace("\n", f"\n{tag}") + text[len(body) :]
        if self._open is None:
            tagged = tag + tagged
        elif self._open != call:  # ends the unfinished line of another call
            tagged = f"\n{tag}{tagged}"
        self._open = None if text.endswith("\n") else call
        super().write(tagged)
        return len(text)
