"""The invoke URL: `/fn/{name}[@{version}][/path...]`."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.ids import FunctionName, Version

PREFIX = "/fn/"


class Target(NamedTuple):
    name: FunctionName
    version: Version | None
    """None: the live one."""
    rest: str
    """Path and query for the worker."""


def parse_target(path: str, raw_path: bytes, query: bytes) -> Target:
    """The parts of an invoke URL; the worker gets its own part as it was written, escapes and all."""
    name, _, _ = path.removeprefix(PREFIX).partition("/")
    raw = raw_path.decode("latin-1").removeprefix(PREFIX)
    rest = "/" + raw.partition("/")[2]
    if query:
        rest += "?" + query.decode("latin-1")
    name, at, version = unquote(name).partition("@")
    if not at or version == "live":
        return Target(FunctionName(name), None, rest)
    if not version.isdecimal() or len(version) > 9:
        raise NotFound(f"{name}@{version[:50]}: a version is a number, or live", hint=f"`fs status {name}` tells it")
    return Target(FunctionName(name), Version(int(version)), rest)
