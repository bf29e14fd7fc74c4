"""HTTP response of a handler: a body with content type, headers and status."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from ..contract.worker_headers import RESERVED

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]{0,8192}")
_OURS = frozenset(("content-length", "content-type", "connection", "transfer-encoding"))
BYTES = "application/octet-stream"
TEXT = "text/plain; charset=utf-8"


class Response:
    """A result with its own content type, headers and status.

    return Response(png, content_type="image/png", headers={"x-seed": "7"})
    """

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str | Iterator[bytes] | AsyncIterator[bytes] | Any = b"",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> None:
        """Creates a response.

        Args:
            body: Bytes, text, a value with a JSON form, or an iterator of bytes, which is sent piece by piece.
            content_type: Default: `application/octet-stream` for bytes, UTF-8 text for str, else JSON.
            headers: Further headers; not content-type, content-length, connection and transfer-encoding. Those that
                begin with `fs-` are the platform's, and are left out.
            status: HTTP status, 200 to 599.

        Raises:
            ValueError: For a status, a header or a content type that HTTP does not allow.
        """
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
        """Headers as ASGI has them: lower-case names, bytes."""
        named = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        return [pair for pair in named if not pair[0].startswith(RESERVED)]

    def __repr__(self) -> str:
        return f"Response({type(self.body).__name__}, {self.content_type!r}, status={self.status})"
