"""Scanner of a call whose parameters are tags with text, as Qwen's models of code write it.

`<function=name>`, for each parameter `<parameter=key>`, its value on lines of its own and `</parameter>`, then
`</function>`. What it passes on is the same call in JSON. The value of a parameter that is text by the function's
schema streams as it comes; others are passed on at their end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .parameter_values import json_text, parameters_of, value_types

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT = frozenset({"string"})


class ParameterCallScanner:
    """Scanner of one call, from the letter after FUNCTION."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON schemas of the functions' arguments by name."""
        self._schemas = schemas
        self._state: Literal["name", "between", "key", "value"] = "name"
        self._read = ""
        """What was read in this state, without what was passed on."""
        self._pending = ""
        self._count = 0
        self._types = _TEXT
        self._at_start = False
        self.name = ""
        self.failed = self.complete = False

    @property
    def started(self) -> bool:
        return bool(self.name)

    def take(self) -> str:
        taken, self._pending = self._pending, ""
        return taken

    def feed(self, letter: str) -> None:
        if self._state == "value":
            self._read_value(letter)
        elif self._state == "between":
            self._read_between(letter)
        elif letter != ">":
            self._read += letter
        elif self._state == "key":
            self._begin_value()
        elif _NAME.fullmatch(self._read.strip()):
            self.name, self._read, self._state = self._read.strip(), "", "between"
        else:
            self.failed = True

    def _read_between(self, letter: str) -> None:
        self._read = (self._read + letter).lstrip()
        if self._read == PARAMETER:
            self._read, self._state = "", "key"
        elif self._read == FUNCTION_END:
            self._pending += "}" if self._count else "{}"
            self.complete = True
        elif not (PARAMETER.startswith(self._read) or FUNCTION_END.startswith(self._read)):
            self.failed = True

    def _begin_value(self) -> None:
        key = self._read.strip()
        schema = self._schemas.get(self.name, {})
        self._types = value_types(parameters_of(schema).get(key), schema)
        self._pending += ("{" if not self._count else ", ") + _escaped(key, quoted=True) + ": "
        self._pending += '"' if self._types == _TEXT else ""
        self._count += 1
        self._read, self._state, self._at_start = "", "value", True

    def _read_value(self, letter: str) -> None:
        if self._at_start:
            self._at_start = False
            if letter == "\n":
                return
        self._read += letter
        if self._read.endswith(PARAMETER_END):
            text = self._read.removesuffix(PARAMETER_END).removesuffix("\n")
            self._pending += _escaped(text) + '"' if self._types == _TEXT else json_text(text, self._types)
            self._read, self._state = "", "between"
        elif self._types == _TEXT:
            shown = len(self._read) - max(overlap(self._read, end) for end in (PARAMETER_END, f"\n{PARAMETER_END}"))
            self._pending += _escaped(self._read[:shown])
            self._read = self._read[shown:]


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _escaped(text: str, *, quoted: bool = False) -> str:
    """A text as JSON writes it, with or without quotation marks."""
    written = msgspec.json.encode(text).decode()
    return written if quoted else written[1:-1]
