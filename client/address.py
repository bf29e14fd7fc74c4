"""Address of the server and the API key for it, found as the command line finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fleetstart.runtime.contract.errors import Unauthorized

from .errors import Unreachable


class Address(NamedTuple):
    """URL of a server, and the API key for it; an empty key is none."""

    url: str
    key: str = ""


def find_address(url: str | None, key: str | None, environ: Mapping[str, str] = os.environ) -> Address:
    """The address given, else FS_URL and FS_KEY, else the server that `fs up` started in FS_HOME, with its key.

    The home's key is sent to the server of that home only. Errors: Unreachable if there is no URL, Unauthorized if the
    key cannot be one.
    """
    home = Path(environ.get("FS_HOME") or Path.home() / ".fleetstart")
    own = _text(home / "run" / "endpoint")
    url = (url or environ.get("FS_URL") or own).rstrip("/")
    if not url:
        raise Unreachable(
            "no server runs here", hint="start one with `fs up`, or name one with Client(url=...) or FS_URL"
        )
    if "://" not in url:
        url = "http://" + url
    if key is None:
        key = environ.get("FS_KEY") or (_text(home / "key") if url == own else "")
    if not key.isascii() or not key.isprintable():
        raise Unauthorized("the API key has characters that keys do not have", hint="`fs key ls` lists the keys")
    return Address(url, key)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
