"""Tool parser: splits a model's text, piece by piece as it comes, into content and calls.

What comes out depends on the text alone, not on its pieces: a parser that is fed the same text again, after a resume,
is in the same state. Text that looks like a call and is none stays content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from .call_scanner import CallScanner
from .formats import ToolFormat
from .named_call import NamedCallScanner
from .parameter_call import FUNCTION, ParameterCallScanner, overlap

_BETWEEN = " \t\r\n[],;"
"""Characters between calls, which families write in their own ways."""


class Scanner(Protocol):
    """Reads one call, letter by letter, until it is `complete` or has `failed`."""

    name: str
    failed: bool
    complete: bool

    @property
    def started(self) -> bool:
        """Checks whether the name is known."""
        ...

    def feed(self, letter: str) -> None:
        """Adds a letter."""
        ...

    def take(self) -> str:
        """Returns new text of the arguments, as JSON; call it once the name is known."""
        ...


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Part = ContentText | CallStarted | CallArguments


@dataclass(slots=True)
class ParsedCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case ContentText(text=text):
                self.content += text
            case CallStarted(name=name):
                self.calls.append(ParsedCall(name))
            case CallArguments(index=index, text=text):
                self.calls[index].arguments += text


class ToolParser:
    """Parser of one choice's text."""

    def __init__(
        self,
        form: ToolFormat,
        *,
        parallel: bool = True,
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Without `parallel`, what follows the first call is dropped. `schemas`: of the functions' arguments."""
        self._form = form
        self._schemas = schemas
        self._call_opens = FUNCTION if form.kind == "parameters" else "{"
        self._begin, self._end = form.begin, form.end
        # "[" may belong to a mark or be a separator, so marks are compared without it.
        self._marks = [mark.strip(_BETWEEN) for mark in (form.begin, form.end) if mark]
        self._parallel = parallel
        self._parts: list[Part] = []
        self._held = ""
        """Content that may become a mark, or is white space before one."""
        self._in_calls = False
        self._region = ""
        """What was read since the mark or the last call: content again if no call comes."""
        self._gap = ""
        """What was read since the last mark or call, without a scanner."""
        self._at_start = form.bare
        self._scanner: Scanner | None = None
        self.calls = 0
        """Calls that were read to their end."""
        self._calls_before = 0
        """Calls before the block that is being read."""

    @property
    def called(self) -> bool:
        """Checks whether a call has begun."""
        return self.calls > 0 or (self._scanner is not None and self._scanner.started)

    def feed(self, text: str) -> list[Part]:
        """Adds text; returns what it makes known."""
        for letter in text:
            if self.calls and not self._parallel:
                break
            if not self._in_calls:
                self._read_content(letter)
            elif self._scanner is None:
                self._read_gap(letter)
            else:
                self._region += letter
                self._scan(self._scanner, letter)
        return self._take()

    def flush(self) -> list[Part]:
        """Returns what was held back at the end of the text. White space around calls, and what was cut off behind the
        first one before it had a name, are dropped."""
        if self._in_calls:
            if not self.calls and (self._scanner is None or not self._scanner.started):
                self._show(self._region)
        elif self._held.strip() or not self.calls:
            self._show(self._held)
        self._held = self._region = ""
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(last := self._parts[-1], ContentText):
            self._parts[-1] = ContentText(last.text + text)
        else:
            self._parts.append(ContentText(text))

    def _read_content(self, letter: str) -> None:
        self._held += letter
        if self._at_start and letter.strip():
            self._at_start = False
            if letter == "{":
                self._in_calls, self._region, self._held = True, self._held[:-1], ""
                self._read_gap(letter)
                return
        if self._held.endswith(self._begin):
            before = self._held[: -len(self._begin)].rstrip()
            self._show(before)
            self._in_calls, self._region, self._held = True, self._held[len(before) :], ""
            self._calls_before = self.calls
            if self._form.kind == "named":
                self._scanner = NamedCallScanner()
            return
        shown = len(self._held) - _kept(self._held, self._begin)
        self._show(self._held[:shown])
        self._held = self._held[shown:]

    def _read_gap(self, letter: str) -> None:
        self._region += letter
        self._gap += letter
        mark = self._gap.strip(_BETWEEN)
        if mark == self._call_opens:
            self._gap, self._scanner = "", self._new_scanner(letter)
        elif mark in self._marks:
            if mark == self._end.strip(_BETWEEN) and self._calls_before == self.calls:
                self._give_up()  # a block without a call
                return
            if mark == self._end.strip(_BETWEEN):
                self._in_calls, self._region = False, ""
            self._gap = ""
        elif not any(one.startswith(mark) for one in (*self._marks, self._call_opens)):
            self._give_up()

    def _new_scanner(self, letter: str) -> Scanner:
        """The scanner of a call whose beginning was read, with this letter at its end."""
        if self._form.kind == "parameters":
            return ParameterCallScanner(self._schemas)
        scanner = CallScanner(self._form.arguments)
        scanner.feed(letter)
        return scanner

    def _scan(self, scanner: Scanner, letter: str) -> None:
        known = scanner.started
        scanner.feed(letter)
        if scanner.failed and not scanner.started:
            self._give_up()
            return
        if scanner.started and not known:
            self._parts.append(CallStarted(self.calls, scanner.name))
        if scanner.started and (text := scanner.take()):
            if self._parts and isinstance(last := self._parts[-1], CallArguments) and last.index == self.calls:
                self._parts[-1] = CallArguments(self.calls, last.text + text)
            else:
                self._parts.append(CallArguments(self.calls, text))
        if scanner.complete or scanner.failed:
            self._scanner, self._region = None, ""
            self.calls += 1
            if self._form.kind == "named":
                self._in_calls = False  # each call has a mark of its own

    def _give_up(self) -> None:
        """Returns to content: what was read is no call."""
        self._in_calls, self._scanner, self._gap = False, None, ""
        region, self._region = self._region, ""
        self._show(region)


def _kept(text: str, mark: str) -> int:
    """Length of the end of a text that may be white space before a mark, and the mark's beginning."""
    cut = overlap(text, mark)
    body = text[: len(text) - cut]
    return cut + len(body) - len(body.rstrip())
