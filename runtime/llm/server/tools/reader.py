"""Tool reader: what the writer of one call's answer needs to find tool calls in it."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .formats import ToolFormat
from .parser import ParsedAnswer, ToolParser

_ALPHABET = string.ascii_letters + string.digits
SHORT_ID = 9


@dataclass(frozen=True, slots=True)
class ToolReader:
    """Format of the calls in an answer, and whether there may be several."""

    form: ToolFormat
    parallel: bool
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the functions' arguments by name: some formats do not say what is text."""

    def parser(self) -> ToolParser:
        return ToolParser(self.form, parallel=self.parallel, schemas=self.schemas)

    def parse(self, text: str) -> ParsedAnswer:
        """Content and calls of a whole answer."""
        parser, answer = self.parser(), ParsedAnswer()
        for part in parser.feed(text) + parser.flush():
            answer.add(part)
        return answer

    def call_id(self, place: str) -> str:
        """Id of the call at a place in an answer: the same again on the worker that resumes a stream."""
        digest = hashlib.sha256(place.encode()).digest()
        if self.form.short_ids:
            return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:SHORT_ID])
        return "call_" + digest.hex()[:24]
