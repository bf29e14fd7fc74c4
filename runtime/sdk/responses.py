"""An answer that is more than a value: bytes with a content type, headers, a status of its own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]{0,8192}")
_OURS = frozenset(("content-length", "content-type", "connection", "transfer-encoding"))
BYTES = "application/octet-stream"
TEXT = "text/plain; charset=utf-8"


class Response:
    """What a handler may return: `return Response(png, content_type="image/png", headers={"x-seed": "7"})`.

    `body` is bytes, text, anything that has a JSON form, or an iterator of bytes, which is sent piece by piece.
    Errors: ValueError for a status, a header or a content type that HTTP does not allow.
    """

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str | Iterator[bytes] | AsyncIterator[bytes] | Any = b"",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> None:
        if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:
            raise ValueError(f"Response(status={status!r}): must be 200 to 599")
        if not _VALUE.fullmatch(content_type):
            raise ValueError(f"Response(content_type={content_type[:80]!r}) cannot stand in a header")
        for name, value in (headers or {}).items():
            if not _NAME.fullmatch(name) or not isinstance(value, str) or not _VALUE.fullmatch(value):
                raise ValueError(f"Response(headers=...): {name[:80]!r}: {str(value)[:80]!r} cannot stand in a header")
            if name.lower() in _OURS:
                hint = "give content_type=" if name.lower() == "content-type" else "leave it out"
                raise ValueError(f"Response(headers=...): {name} is written by the platform: {hint}")
        self.body = body
        self.content_type = content_type
        self.headers = dict(headers or {})
        self.status = status

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]

    def __repr__(self) -> str:
        return f"Response({type(self.body).__name__}, {self.content_type!r}, status={self.status})"
