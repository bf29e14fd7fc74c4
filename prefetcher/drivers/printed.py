"""What a worker's line says of itself: on which stream it was written, and for which call (`runtime.output`)."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_MARK = re.compile("\x1e([12])([A-Za-z0-9._:-]{0,128})\x1f")


class Printed(NamedTuple):
    stream: Literal["stdout", "stderr"]
    invocation: str
    """Empty if it is not known."""
    text: str


def read_line(line: str) -> Printed:
    """The first mark counts; others stand where somebody else's line was cut short, and are taken out."""
    found = _MARK.search(line) if "\x1e" in line else None
    if found is None:
        return Printed("stdout", "", line)
    return Printed("stdout" if found[1] == "1" else "stderr", found[2], _MARK.sub("", line))
