"""Hint for an error of user code that comes of what a worker may write."""

from __future__ import annotations

import errno

from .network_hint import chain

_HINTS = {
    errno.ENOSPC: "its files in /tmp have half of the function's `memory` at most: raise it, or write less",
    errno.EROFS: 'a worker may write in /tmp alone; what shall last is for a volume: volumes=["NAME:rw"]',
}


def files_hint(error: BaseException) -> str:
    """Hint of what to change so that the error does not come again; empty if it is not about files."""
    codes = (one.errno for one in chain(error) if isinstance(one, OSError) and one.errno is not None)
    return next((_HINTS[code] for code in codes if code in _HINTS), "")
