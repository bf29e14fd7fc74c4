"""The invoke URL: `/fn/{name}[@{version|alias}][/path...]`, with the function's full name."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from fleetstart.runtime.contract.function.names import full_name, is_function_name
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
    raw = raw_path.decode("latin-1").removeprefix(PREFIX)
    own, _, below = raw.partition("/")
    root, rest = PREFIX + own, "/" + below
    if query:
        rest += "?" + query.decode("latin-1")
    name, at, version = _segment(path, raw_path).partition("@")
    if not at:
        return Target(FunctionName(name), None, rest, root=root)
    if version.isascii() and version.isdecimal() and len(version) <= 9:
        return Target(FunctionName(name), Version(int(version)), rest, root=root)
    return Target(FunctionName(name), None, rest, version, root)


def with_full_name(path: str, raw_path: bytes, project: str) -> tuple[str, bytes]:
    """The path with the function's full name, decoded and as written. A name without a project is in `project`."""
    _, slash, below = path.removeprefix(PREFIX).partition("/")
    name, at, version = _segment(path, raw_path).partition("@")
    full = full_name(name, project)
    if full == name or not is_function_name(name):
        return path, raw_path
    _, raw_slash, raw_below = raw_path.decode("latin-1").removeprefix(PREFIX).partition("/")
    written = quote(f"{full}{at}{version}", safe="@")
    return f"{PREFIX}{full}{at}{version}{slash}{below}", f"{PREFIX}{written}{raw_slash}{raw_below}".encode("latin-1")


def _segment(path: str, raw_path: bytes) -> str:
    """The segment of the name, decoded once: of the path as it was written, where an escaped slash does not end it."""
    if not raw_path:
        return path.removeprefix(PREFIX).partition("/")[0]
    return unquote(raw_path.decode("latin-1").removeprefix(PREFIX).partition("/")[0])
