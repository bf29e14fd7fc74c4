"""The addresses of the platform that functions may not reach: the node's own, those of Redis and of the controllers.

They are looked up again while functions connect, since an interface may come up and a name may move. A name that cannot
be looked up keeps its last addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import psutil

from fleetstart.runtime.contract.function.egress_denials import EgressDenials, denials
from fleetstart.runtime.contract.function.public_addresses import Address, Network, literal

from .dialer import ConnectFailed, resolve

FRESH_S = 30.0
"""Time for which looked-up addresses are taken for current."""
UNKNOWN_S = 1.0
"""The same while a name has no address yet: what it stands for is not denied until then."""
LOOKUP_S = 5.0


class PlatformAddresses:
    """The denials of one node, with what its names mean now. Used in the I/O thread."""

    def __init__(
        self, hosts: Mapping[str, str], *, operator: tuple[Network, ...] = (), allowed: tuple[Network, ...] = ()
    ) -> None:
        """`hosts`: what each host or address is, such as "Redis"."""
        self._hosts = dict(hosts)
        self._operator = operator
        self._allowed = allowed
        self._known: dict[str, tuple[Address, ...]] = {}
        self._denials = EgressDenials()
        self._fresh_until_s = 0.0
        self._looking = asyncio.Lock()

    async def denials(self) -> EgressDenials:
        async with self._looking:
            if time.monotonic() >= self._fresh_until_s:
                await self._look_up()
                are_known = self._known.keys() == self._hosts.keys()
                self._fresh_until_s = time.monotonic() + (FRESH_S if are_known else UNKNOWN_S)
            return self._denials

    async def _look_up(self) -> None:
        await asyncio.gather(*map(self._resolve, self._hosts))
        platform = [(address, f"an address of {what}") for what, address in self._found()]
        platform += [(address, "an address of this node") for address in own_addresses()]
        self._denials = denials(operator=self._operator, allowed=self._allowed, platform=platform)

    def _found(self) -> list[tuple[str, Address]]:
        return [(self._hosts[host], address) for host, found in self._known.items() for address in found]

    async def _resolve(self, host: str) -> None:
        if (own := literal(host)) is not None:
            self._known[host] = (own,)
            return
        try:
            async with asyncio.timeout(LOOKUP_S):
                self._known[host] = await resolve(host, 0)
        except (ConnectFailed, TimeoutError):
            return


def own_addresses() -> list[Address]:
    """The addresses of this machine's interfaces."""
    texts = (one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found)
    return [address for text in texts if (address := _parsed(text)) is not None]


def _parsed(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:  # a hardware address
        return None


def platform_hosts(redis_url: str, node_address: str, servers: str) -> dict[str, str]:
    """Hosts of the platform and what they are. `servers`: URLs of controllers, separated by commas."""
    urls = [(redis_url, "Redis"), *((url.strip(), "a controller") for url in servers.split(","))]
    named = {host: what for url, what in urls if (host := urlsplit(url).hostname)}
    return {**named, node_address: "this node"}
