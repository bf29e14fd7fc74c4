"""A Redis that cannot be used is told apart: no password, a wrong one, refused, no such host, no such socket."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.controller.state.redis_probe import shown_url, try_redis
from fleetstart.runtime.contract.errors import Unavailable
from tests.servers import RedisServer, end, free_port, spawn, valkey_binary, wait_until

PASSWORD = "correct-horse"


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    """The port of a Redis with a password."""
    port = free_port()
    argv: list[str | Path] = [valkey_binary(), "--port", str(port), "--requirepass", PASSWORD, "--save", ""]
    process = spawn(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: problem(f"redis://:{PASSWORD}@127.0.0.1:{port}") == "", what="redis")
        yield port
    finally:
        end(process)


def problem(url: str) -> str:
    try:
        asyncio.run(try_redis(url, timeout_s=2.0))
    except Unavailable as error:
        return f"{error.message} ({error.hint})"
    return ""


def test_one_that_keeps_what_is_written_passes_and_nothing_is_left(redis_server: RedisServer) -> None:
    assert problem(redis_server.url) == ""
    with redis_server.client() as client:
        assert client.keys("fs:probe:*") == []


def test_passwords_are_told_apart_and_never_shown(locked: int) -> None:
    assert "it wants a password (NOAUTH)" in problem(f"redis://127.0.0.1:{locked}")
    wrong = problem(f"redis://:battery-staple@127.0.0.1:{locked}/0")
    assert "the user or the password is wrong (WRONGPASS)" in wrong
    assert "battery-staple" not in wrong
    assert f"redis://:***@127.0.0.1:{locked}/0" in wrong


@pytest.mark.parametrize(("url", "says"), [
    ("redis://127.0.0.1:1/0", "it refused the connection"),
    ("redis://no-such-host.invalid:6379", "there is no host of this name"),
    ("unix:///nowhere/redis.sock", "there is no such socket"),
    ("http://127.0.0.1:6379", "is no URL of a Redis"),
])  # fmt: skip
def test_what_is_not_there_is_said_at_once(url: str, says: str) -> None:
    assert says in problem(url)


def test_a_url_is_shown_without_its_password() -> None:
    assert shown_url("rediss://fs:s3cret@host:6380/2") == "rediss://fs:***@host:6380/2"
    assert shown_url("unix:///run/redis.sock") == "unix:///run/redis.sock"
