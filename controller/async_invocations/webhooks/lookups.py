"""Name lookups of webhooks, and the platform's own addresses, to which no webhook may lead.

Lookups have threads of their own: names come from callers, a name server may be theirs and slow, and the controller's
other work shares one pool. A lookup has a deadline, after which its thread may still be busy: no project has more than
a share of them, and one thread looks a name up for all that wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from fleetstart.runtime.contract.function.public_addresses import Address, embedded

LOOKUP_S = 3.0
"""Deadline of a lookup, well below that of a delivery, which is tried again."""
THREADS = 64
THREADS_OF_ONE = 4
"""Threads of one project: sixteen whose name servers do not answer must be there before others wait."""
FRESH_S = 30.0
"""Time for which the platform's own addresses are taken for current."""

Found = list[tuple[Any, ...]]
Asked = tuple[str, int, int]
"""Host, port and family of a lookup."""


class NameLookups:
    def __init__(self, urls: Iterable[str]) -> None:
        """`urls`: where the platform is reached, perhaps through a proxy or a translated address."""
        self._hosts = sorted({host for url in urls if (host := urlsplit(url).hostname)})
        self._threads = asyncio.Semaphore(THREADS)
        self._shares: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(THREADS_OF_ONE))
        self._under_way: dict[Asked, asyncio.Task[Found]] = {}
        self._own: frozenset[Address] = frozenset()
        self._fresh_until_s = 0.0

    async def resolve(self, host: str, port: int, family: int = socket.AF_UNSPEC, *, project: str = "") -> Found:
        """What getaddrinfo returns; `project` is whose share it is part of. Errors: OSError, TimeoutError."""
        asked = (host, port, family)
        looking = self._under_way.get(asked)
        if looking is None:
            looking = self._under_way[asked] = asyncio.create_task(self._look_up(asked, project))
            looking.add_done_callback(lambda task: self._ended(asked, task))
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await asyncio.shield(looking)
        except TimeoutError as error:
            raise TimeoutError(f"{host} was not looked up within {LOOKUP_S:g} s") from error

    async def _look_up(self, asked: Asked, project: str) -> Found:
        """Looks a name up in a thread, and ends with it: however late that is, it holds its places until then."""
        async with contextlib.AsyncExitStack() as places:
            async with asyncio.timeout(LOOKUP_S):
                await places.enter_async_context(self._shares[project])
                await places.enter_async_context(self._threads)
            return await _in_a_thread(asked)

    def _ended(self, asked: Asked, task: asyncio.Task[Found]) -> None:
        del self._under_way[asked]
        if not task.cancelled():
            task.exception()  # of one that all had given up

    async def is_own(self, address: Address) -> bool:
        """True if the platform is at this address: one of this machine's, or of the name that it is reached by."""
        if time.monotonic() >= self._fresh_until_s:
            found = set(_interfaces())
            for host in self._hosts:
                try:
                    found |= {ipaddress.ip_address(str(one[4][0])) for one in await self.resolve(host, 0)}
                except (OSError, ValueError):
                    found |= self._own  # a name that cannot be looked up keeps its last addresses
            self._own = frozenset(found)
            self._fresh_until_s = time.monotonic() + FRESH_S
        return embedded(address) in self._own or address in self._own

    def close(self) -> None:
        for looking in self._under_way.values():
            looking.cancel()


async def _in_a_thread(asked: Asked) -> Found:
    """Calls getaddrinfo in a thread that the end of the process does not wait for, as it would for a pool's."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Found] = loop.create_future()

    def look_up() -> None:
        host, port, family = asked
        try:
            answer = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        except Exception as error:
            end(found.set_exception, error)
        else:
            end(found.set_result, list(answer))

    def end(settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if found.done() else settle(outcome))

    threading.Thread(target=look_up, name="webhook-lookup", daemon=True).start()
    return await found


def _interfaces() -> Iterable[Address]:
    import psutil  # late: most systems send no webhooks

    for found in psutil.net_if_addrs().values():
        for one in found:
            try:
                yield ipaddress.ip_address(one.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
