"""The import of aiohttp without the certificates of the world.

aiohttp reads them twice at its import, for the TLS contexts of requests that bring none: 57 ms of a core, an eighth of
a controller's start. The contexts stay empty, so that a request which brings none trusts no server at all. Webhooks
bring their own, and nodes are known by the fleet's.
"""

from __future__ import annotations

import ssl
import sys
from typing import Any


def import_aiohttp() -> None:
    if "aiohttp" in sys.modules:
        return
    context: Any = ssl.SSLContext
    context.set_default_verify_paths = _read_none
    try:
        import aiohttp  # noqa: F401
    finally:
        del context.set_default_verify_paths  # the base class has it


def _read_none(_: ssl.SSLContext) -> None:
    return None
