"""The address of `fs up --listen`, where other machines reach the controller beside the loopback address."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from fleetstart.runtime.contract.errors import InvalidInput

PORT = 7443
"""Default port: that of loopback, 7433, cannot be bound on all addresses as well."""
_PORT_MAX = 65_535


class ListenAddress(NamedTuple):
    """An IP address and a port to listen on."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def parse_listen(text: str) -> ListenAddress:
    """Parses `0.0.0.0`, `10.0.0.5:8443` or `[::]:8443`. Errors: InvalidInput."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise _invalid(text)
        port = rest[1:]
        if rest == ":":
            raise _invalid(text)
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        if not port:
            raise _invalid(text)
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise _invalid(text) from error
    if port and not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= _PORT_MAX):
        raise InvalidInput(f"--listen {text[:80]!r}: a port is a number from 0 to {_PORT_MAX}")
    return ListenAddress(str(address), int(port) if port else PORT)


def _invalid(text: str) -> InvalidInput:
    return InvalidInput(
        f"--listen {text[:80]!r} is not an IP address with or without a port",
        hint="0.0.0.0 is all addresses of this machine, [::] those of IPv6 too: --listen 0.0.0.0:7443",
    )
