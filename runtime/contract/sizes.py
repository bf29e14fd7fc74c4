"""Sizes in bytes: the binary units, and the parser of sizes that people write ("512MiB", "2G")."""

from __future__ import annotations

import re

from .errors import InvalidSpec

MIB = 1024 * 1024
GIB = 1024 * MIB

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*", re.IGNORECASE)
_UNIT = {"": 1, "b": 1, "k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB}


def parse_size(text: str | int) -> int:
    """The number of bytes that "512MiB", "1.5G" or 4096 names. K, M, G, T are binary, with or without "iB".

    Errors: InvalidSpec.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidSpec(f"size {text!r} is not understood", hint='write a size such as "512MiB" or "2GiB"')
    unit = _UNIT[(match[2] or "")[:1].lower()]
    if unit == 1 and "." in match[1]:
        raise InvalidSpec(f"size {text!r} has no unit, and is a part of a byte", hint=f"did you mean {match[1]}GiB?")
    return int(float(match[1]) * unit)
