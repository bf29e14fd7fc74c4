"""Name resolution, and connections to the first of several addresses that answers."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from fleetstart.runtime.contract.function.public_addresses import Address

from ..concurrency.threads import in_thread

ADDRESSES_MOST = 4
"""Addresses of a host that are tried; each gets its share of the time."""


class ConnectFailed(Exception):
    """The name cannot be resolved or the host does not answer; the message says which."""


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """Resolves a name in a daemon thread: a resolver may take half a minute. Errors: ConnectFailed."""
    try:
        found = await in_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), "egress-lookup")
    except OSError as error:
        raise ConnectFailed(f"{host} cannot be looked up: {error.strerror or error}") from error
    except UnicodeError as error:  # a label that no host name can have
        raise ConnectFailed(f"{host} cannot be looked up: {error}") from error
    names = [str(address[0]).partition("%")[0] for _, _, _, _, address in found]
    return tuple(dict.fromkeys(map(ipaddress.ip_address, names)))


async def connect(addresses: Sequence[Address], port: int, within_s: float) -> socket.socket:
    """Connects to the first address that answers; non-blocking. Errors: ConnectFailed, with the last address's
    error."""
    tried = addresses[:ADDRESSES_MOST]
    last: OSError | None = None
    for address in tried:
        try:
            async with asyncio.timeout(within_s / len(tried)):
                return await _connected(address, port)
        except OSError as error:  # including the timeout
            last = error
    why = "no answer" if isinstance(last, TimeoutError) else (last.strerror or str(last)) if last else "no address"
    raise ConnectFailed(f"{tried[-1] if tried else 'no address'} port {port}: {why}")


async def _connected(address: Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock
