"""Decides whether an address is public on the internet, and parses addresses in every notation.

Used where the platform connects on a caller's behalf (webhooks, workers' egress), against server-side request forgery.
Pure, and strict where Python's `is_global` is not.
"""

from __future__ import annotations

import ipaddress
import socket

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_EMBEDDING = (_MAPPED, _NAT64, ipaddress.IPv6Network("2002::/16"))
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "64:ff9b:1::/48", "fec0::/10", "3fff::/20")),
)
"""Protocol assignments, local NAT64, former site-local, examples: `is_global` takes (some of) them for public."""


def literal(host: str) -> Address | None:
    """Parses the host of a URL as an address, also forms such as 2130706433 or 127.1; None if it is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 address embeds; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def unmapped(network: Network) -> Network:
    """The IPv4 range that a range of mapped addresses is, which connections go to; else the range itself."""
    is_mapped = isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED)
    return embedded_network(network) if is_mapped else network


def embedded_network(network: Network) -> Network:
    """The IPv4 range that an IPv6 range embeds; else the range itself."""
    if isinstance(network, ipaddress.IPv6Network):
        prefix = next((one for one in _EMBEDDING if network.subnet_of(one)), None)
        if prefix is not None:
            length = min(32, network.prefixlen - prefix.prefixlen)
            return ipaddress.IPv4Network((int(embedded(network.network_address)), length))
    return network


def is_public(address: Address) -> bool:
    """Checks whether it is a host's on the internet: not private, loopback, link-local, multicast or reserved."""
    meant = embedded(address)
    if not meant.is_global or meant.is_multicast or meant.is_reserved or meant.is_unspecified or meant.is_link_local:
        return False
    return not any(meant in network for network in _NOT_PUBLIC)
