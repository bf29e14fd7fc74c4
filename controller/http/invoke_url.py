"""The invoke URL: `/fn/{name}[@{version|alias}][/path...]`."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from fleetstart.runtime.contract.ids import LIVE, FunctionName, Version

PREFIX = "/fn/"


class Target(NamedTuple):
    name: FunctionName
    version: Version | None
    """None: the one that the alias points at, and for `live` one of the split."""
    rest: str
    """Path and query for the worker."""
    alias: str = LIVE
    root: str = ""
    """The function's own part of the path as it was written, such as `/fn/web@2`."""


def parse_target(path: str, raw_path: bytes, query: bytes) -> Target:
    """The parts of an invoke URL; the worker gets its own part as it was written, escapes and all."""
    name, _, _ = path.removeprefix(PREFIX).partition("/")
    raw = raw_path.decode("latin-1").removeprefix(PREFIX)
    own, _, below = raw.partition("/")
    root, rest = PREFIX + own, "/" + below
    if query:
        rest += "?" + query.decode("latin-1")
    name, at, version = unquote(name).partition("@")
    if not at:
        return Target(FunctionName(name), None, rest, root=root)
    if version.isascii() and version.isdecimal() and len(version) <= 9:
        return Target(FunctionName(name), Version(int(version)), rest, root=root)
    return Target(FunctionName(name), None, rest, version, root)
