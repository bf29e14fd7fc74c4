"""Call scanner: reads one call, a JSON object with a name and arguments, letter by letter.

The arguments are passed on as they were written, from the moment that the name is known. They are not checked: a model
may write what no schema allows, and clients are told to expect it.
"""

from __future__ import annotations

import msgspec

from ....contract.decoding import UNDECODABLE

_SPACE = " \t\r\n"


class CallScanner:
    """Scanner of one object. Feed letters until it is `complete` or has `failed`."""

    def __init__(self, arguments: str) -> None:
        """`arguments`: key of the arguments; "arguments" and "parameters" are both known."""
        self._keys = {arguments, "arguments", "parameters"}
        self._depth = 0
        self._in_string = self._escaped = False
        self._key = ""
        self._token = ""
        """The key or value that is being read."""
        self._in_value = False
        self._pending = ""
        """Arguments that were not taken yet."""
        self._has_arguments = False
        self.name = ""
        self.failed = self.complete = False

    @property
    def started(self) -> bool:
        """Checks whether the name is known."""
        return bool(self.name)

    def take(self) -> str:
        """Returns new text of the arguments; call it once the name is known."""
        taken, self._pending = self._pending, ""
        return taken

    def feed(self, letter: str) -> None:
        """Adds a letter."""
        if self._in_string:
            self._add(letter)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
            self._add(letter)
        elif letter in "{[":
            self._open(letter)
        elif letter in "}]":
            self._close(letter)
        elif self._depth == 1 and letter == ",":
            self._end_value()
        elif self._depth == 1 and letter == ":" and not self._in_value:
            self._end_key()
        elif letter not in _SPACE or self._depth > 1:
            self._add(letter)

    def _add(self, letter: str) -> None:
        if self._depth == 1 and not self._in_value and letter != '"' and not self._in_string:
            self.failed = True  # a key is a string
            return
        self._token += letter
        if self._streams:
            self._pending += letter

    @property
    def _streams(self) -> bool:
        """Checks whether the letter belongs to arguments that are an object, which are passed on at once."""
        return self._in_value and self._key in self._keys and self._token.startswith("{")

    def _open(self, letter: str) -> None:
        if self._depth == 0:
            self._depth = 1
            return
        self._depth += 1
        self._add(letter)

    def _close(self, letter: str) -> None:
        if self._depth > 1:
            self._add(letter)
            self._depth -= 1
        elif letter == "}":
            self._end_value()
            self._end_object()
        else:
            self.failed = True

    def _end_key(self) -> None:
        key = _string(self._token)
        if key is None:
            self.failed = True
            return
        self._key, self._token, self._in_value = key, "", True

    def _end_value(self) -> None:
        if not self._in_value:
            self.failed = self.failed or bool(self._token)
            return
        if self._key == "name":
            self.name = _string(self._token) or ""
            self.failed = self.failed or not self.name
        elif self._key in self._keys:
            self._has_arguments = True
            if not self._token.startswith("{"):
                # Some models write the arguments as a string with JSON in it, or null.
                self._pending += _string(self._token) or "{}"
        self._token, self._in_value = "", False

    def _end_object(self) -> None:
        if not self.name:
            self.failed = True
            return
        if not self._has_arguments:
            self._pending += "{}"
        self.complete = not self.failed


def _string(text: str) -> str | None:
    """A JSON string's value; None for any other text."""
    try:
        return msgspec.json.decode(text, type=str)
    except UNDECODABLE:
        return None
