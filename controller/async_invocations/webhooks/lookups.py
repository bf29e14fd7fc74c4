"""Name lookups of webhooks, and the platform's own addresses, to which no webhook may lead.

Lookups have threads of their own: names come from callers, a name server may be theirs and slow, and the controller's
other work shares one pool. A lookup has a deadline, after which its thread may still be busy.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fleetstart.runtime.contract.function.public_addresses import Address, embedded

LOOKUP_S = 3.0
"""Deadline of a lookup, well below that of a delivery, which is tried again."""
THREADS = 8
FRESH_S = 30.0
"""Time for which the platform's own addresses are taken for current."""


class NameLookups:
    def __init__(self, urls: Iterable[str]) -> None:
        """`urls`: where the platform is reached, perhaps through a proxy or a translated address."""
        self._hosts = sorted({host for url in urls if (host := urlsplit(url).hostname)})
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="webhook-lookup")
        self._own: frozenset[Address] = frozenset()
        self._fresh_until_s = 0.0

    async def resolve(self, host: str, port: int, family: int = socket.AF_UNSPEC) -> list[tuple[Any, ...]]:
        """What getaddrinfo returns. Errors: OSError, TimeoutError."""
        looking = asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        )
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await looking
        except TimeoutError as error:
            raise TimeoutError(f"{host} was not looked up within {LOOKUP_S:g} s") from error

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
        self._pool.shutdown(wait=False, cancel_futures=True)


def _interfaces() -> Iterable[Address]:
    import psutil  # late: most systems send no webhooks

    for found in psutil.net_if_addrs().values():
        for one in found:
            try:
                yield ipaddress.ip_address(one.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
