"""Readers of settings in environment variables (FS_*). A value that cannot be used is a ConfigError that names it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..errors import FleetError
from ..sizes import parse_size
from ..store_url import parse_store
from .log_format import LogFormat

Environment = Mapping[str, str]
"""Variables by name. One that is set to the empty text counts as not set."""
T = TypeVar("T", bound=str)


class ConfigError(ValueError):
    """A variable that cannot be used; the message names it and says what it may be."""


def read_required(env: Environment, name: str) -> str:
    """Reads a variable that has no default."""
    if not env.get(name):
        raise ConfigError(f"{name} is not set")
    return env[name]


def read_int(env: Environment, name: str, default: int, *, least: int = 0, most: int) -> int:
    """Reads a whole number within limits."""
    text = env.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text[:40]!r} must be a whole number from {least} to {most}")
    return int(text)


def read_size(env: Environment, name: str, default: int) -> int:
    """Reads a size in bytes, such as 512MiB."""
    text = env.get(name)
    if not text:
        return default
    try:
        return parse_size(text)
    except FleetError as error:
        raise ConfigError(f"{name}: {error}") from error


def read_flag(env: Environment, name: str) -> bool:
    """Reads a switch: 1 turns it on, everything else leaves it off."""
    return env.get(name) == "1"


def read_choice(env: Environment, name: str, choices: Sequence[T]) -> T | None:
    """Reads one of several words; None if the variable is not set."""
    text = env.get(name)
    if not text:
        return None
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"{name}={text[:40]!r} must be {' or '.join(choices)}, or not set")


def read_store(env: Environment, name: str, default: str = "") -> str:
    """Reads the URL of an object store, a folder or s3://bucket/prefix."""
    text = env.get(name) or default or read_required(env, name)
    try:
        parse_store(text)
    except FleetError as error:
        raise ConfigError(f"{name}: {error}") from error
    return text


def read_log_format(env: Environment) -> LogFormat:
    """Reads FS_LOG_FORMAT: text unless it is json."""
    forms: tuple[LogFormat, ...] = ("text", "json")
    return read_choice(env, "FS_LOG_FORMAT", forms) or "text"


def read_links(env: Environment) -> str:
    """Reads FS_LINKS, how controllers and nodes on different machines talk: tls, unless it is plain."""
    return read_choice(env, "FS_LINKS", ("tls", "plain")) or "tls"


def read_networks(env: Environment, name: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Reads networks that are separated by commas. Errors: ConfigError."""
    text = env.get(name) or ""
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} must be networks such as 10.0.0.0/8,127.0.0.1: {error}") from error
