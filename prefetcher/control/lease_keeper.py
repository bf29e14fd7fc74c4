"""Keeps the node's lease from a thread of its own while the daemon's loop is late.

A loop that is busy for some seconds is not a lost node. The thread extends the lease that the loop wrote last, and only
that one: what another daemon has written under this name, or what has expired, it leaves alone. A loop that stands
still for `STALL_S` is lost after all.
"""

from __future__ import annotations

import contextlib
import threading
import time

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import NodeId

STALL_S = 20.0
"""Longest stall of the loop that the thread covers: calls of a node whose loop stands still are served, but nothing is
started or ended there."""
_EXTEND = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"


class LeaseKeeper:
    def __init__(self, url: str, node: NodeId, *, lease_ms: int, stall_s: float = STALL_S) -> None:
        self._url = url
        self._key = keys.node(node)
        self._lease_ms = lease_ms
        self._stall_s = stall_s
        self._written: tuple[bytes, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wrote(self, lease: bytes) -> None:
        """The loop has just written this lease."""
        self._written = lease, time.monotonic()

    def close(self) -> None:
        """Ends the thread; waits for it not longer than for Redis to answer."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(self._lease_ms / 1000)

    def _run(self) -> None:
        wait_s = self._lease_ms / 1000
        client: redis.Redis = redis.Redis.from_url(
            self._url, socket_timeout=wait_s / 2, socket_connect_timeout=wait_s / 2, retry=Retry(NoBackoff(), 0)
        )
        while not self._stop.wait(wait_s / 6):
            written = self._written
            if written is None or not wait_s / 2 < time.monotonic() - written[1] < self._stall_s:
                continue
            with contextlib.suppress(redis.RedisError, OSError):
                client.eval(_EXTEND, 1, self._key, written[0], self._lease_ms)
        client.close()
