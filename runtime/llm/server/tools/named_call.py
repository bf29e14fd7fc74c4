"""Scanner of a call that names its function before its arguments, as newer models of Mistral write it.

`[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]id` before the arguments in some versions. The id is not read: each answer
has ids of its own.
"""

from __future__ import annotations

import re

ARGUMENTS_MARK = "[ARGS]"
ID_MARK = "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_ID = re.compile(r"[A-Za-z0-9]*")


class NamedCallScanner:
    """Scanner of one call, from the letter after the mark that begins it."""

    def __init__(self) -> None:
        self.name = ""
        self.failed = self.complete = False
        self._head = ""
        """Text before the arguments."""
        self._pending = ""
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def started(self) -> bool:
        return bool(self.name)

    def take(self) -> str:
        taken, self._pending = self._pending, ""
        return taken

    def feed(self, letter: str) -> None:
        if self.started:
            self._read_arguments(letter)
            return
        self._head += letter
        name, bracket, rest = self._head.partition("[")
        mark = bracket + rest
        if mark.startswith(ID_MARK):
            mark = _ID.sub("", mark.removeprefix(ID_MARK), count=1)
        if mark == ARGUMENTS_MARK and name.strip():
            self.name = name.strip()
        elif not _NAME.fullmatch(name.strip()) or not (ARGUMENTS_MARK.startswith(mark) or ID_MARK.startswith(mark)):
            self.failed = True

    def _read_arguments(self, letter: str) -> None:
        if not self._depth and letter.isspace():
            return
        self._pending += letter
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if not self._depth:
            self.complete = letter in "}]"
            self.failed = not self.complete  # arguments are an object
