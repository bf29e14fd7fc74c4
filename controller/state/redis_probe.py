"""Trial of a Redis: writes a key, reads it back and deletes it; and what its errors mean."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from fleetstart.runtime.contract.errors import Unavailable

from .redis_server.server_facts import CLUSTER, ServerFacts, facts_of

FORM = "redis://:PASSWORD@HOST:6379/0, or rediss:// with TLS, or redis://USER:PASSWORD@HOST:6379/0"
KEPT_S = 10
"""Lifetime of the probe's key, should its deletion be lost."""


def shown_url(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


async def try_redis(url: str, *, timeout_s: float) -> None:
    """Returns if the Redis keeps what is written. Errors: Unavailable, with the cause and what to do."""
    try:
        client = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
    except (ValueError, RedisError) as error:
        raise Unavailable(f"Redis: {shown_url(url)!r} is no URL of a Redis: {error}", hint=f"write {FORM}") from error
    key, value = f"fs:probe:{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        async with asyncio.timeout(timeout_s):
            if facts_of(await client.info()).cluster:
                raise Unavailable(f"Redis {shown_url(url)}: {CLUSTER}")
            await client.set(key, value, ex=KEPT_S)
            if await client.get(key) != value:
                raise Unavailable(f"Redis {shown_url(url)} gave back another value than was written")
            await client.delete(key)
    except (RedisError, OSError, TimeoutError) as error:
        sentence, hint = explain(error)
        raise Unavailable(f"Redis {shown_url(url)}: {sentence}", hint=hint) from error
    finally:
        await client.aclose()


async def read_facts(url: str, *, timeout_s: float) -> ServerFacts:
    """What the server says of itself. Errors: REDIS_ERRORS."""
    client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        return facts_of(await client.info())
    finally:
        await client.aclose()


_SAID = (
    ("called without any password", "it has no password, and the URL has one", f"the URL's form is {FORM}"),
    ("HELLO must be called with the client already", "it wants a password (NOAUTH)", f"the URL's form is {FORM}"),
    ("Authentication required", "it wants a password (NOAUTH)", f"the URL's form is {FORM}"),
    ("invalid username-password", "the user or the password is wrong (WRONGPASS)", f"the URL's form is {FORM}"),
    ("invalid password", "the password is wrong (WRONGPASS)", f"the URL's form is {FORM}"),
    (
        "max number of clients",
        "all its connections are taken (maxclients)",
        "raise maxclients: a controller opens up to 114, a node a few",
    ),
    ("no permissions", "this user may not do what is needed", "it needs all commands, on the keys and channels fs:*"),
)
"""What Redis says, the sentence and the hint."""
_RAISED: tuple[tuple[type[BaseException], str, str], ...] = (
    (socket.gaierror, "there is no host of this name", "correct the host in the URL"),
    (ConnectionRefusedError, "it refused the connection", "start it, or correct the port in the URL"),
    (FileNotFoundError, "there is no such socket", "start it, or correct the path in the URL"),
    (
        ssl.SSLError,
        "TLS failed",
        "redis:// is without TLS, rediss:// with it; name the file of the certificates that its own is checked by in "
        "FS_REDIS_CA",
    ),
    (TimeoutError, "it did not answer in time", "check host and port in the URL, and whether it wants TLS: rediss://"),
    (redis.TimeoutError, "it did not answer in time", "check host and port, and whether it wants TLS: rediss://"),
)


def explain(error: BaseException) -> tuple[str, str]:
    """The cause in a sentence, and what to do."""
    causes = list(_causes(error))
    said = " ".join(str(cause) for cause in causes)
    for part, sentence, hint in _SAID:
        if part in said:
            return sentence, hint
    for kind, sentence, hint in _RAISED:
        if any(isinstance(cause, kind) for cause in causes):
            return sentence, hint
    if isinstance(error, ResponseError):
        return f"it answered: {error}", "it must take writes: it may be a replica, or full"
    return str(error) or type(error).__name__, "check the URL, and whether it wants TLS: rediss://"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
