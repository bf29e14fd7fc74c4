"""Parser of the Range header: one range of an object (RFC 9110 section 14)."""

from __future__ import annotations

import re

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class NotSatisfiable(ValueError):
    """Several ranges, one that begins behind the end or ends before it begins, or none at all: 416."""


def parse_range(text: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Offset and size of what is asked for, cut to what there is; None for the whole."""
    if text is None:
        return None
    match = _RANGE.fullmatch(text.strip())
    if match is None or match[1] == match[2] == "":
        raise NotSatisfiable(f"range {text[:80]!r} is not understood: one range of bytes is, such as bytes=0-1023")
    if match[1] == "":
        begin, end = max(0, size_bytes - int(match[2])), size_bytes
    else:
        begin = int(match[1])
        end = min(size_bytes, int(match[2]) + 1) if match[2] else size_bytes
    if begin >= end:
        raise NotSatisfiable(f"range {text[:80]!r} lies outside an object of {size_bytes:,} bytes, or is empty")
    return begin, end - begin
