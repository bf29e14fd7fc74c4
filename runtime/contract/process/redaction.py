"""Redaction: takes the values of secrets out of logs and errors. Pure.

Exact values are replaced, also as they stand in JSON, and each line of one that has several (a private key), because
logs come line by line. Values that a handler has encoded in another way are not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

MASK = "***"
LEAST_CHARS = 4
"""Minimum length of a redacted value: shorter ones are no secrets, and occur in every text."""
LINE_LEAST_CHARS = 8
"""Minimum length of a redacted line of a value that has several lines."""


def forms(values: Iterable[str]) -> list[str]:
    """The texts to redact, the longest first: a value may be part of another one."""
    found: set[str] = set()
    for value in values:
        lines = [line.strip() for line in value.splitlines()]
        for part in [value, value.strip(), *(line for line in lines if len(line) >= LINE_LEAST_CHARS)]:
            if len(part) >= LEAST_CHARS:
                found |= {part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}
    return sorted(found, key=lambda form: (-len(form), form))


class Redactor:
    def __init__(self, values: Iterable[str] = ()) -> None:
        self._forms = forms(values)
        self._bytes = [form.encode() for form in self._forms]

    def __bool__(self) -> bool:
        """Checks whether there is anything to redact."""
        return bool(self._forms)

    def text(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        return text

    def data(self, data: bytes) -> bytes:
        for form in self._bytes:
            if form in data:
                data = data.replace(form, MASK.encode())
        return data
