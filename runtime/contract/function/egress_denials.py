"""Addresses that no function reaches through the egress proxy, whatever its list says: the platform's and the denied.

The more exact of two ranges decides, and of equal ones that of FS_EGRESS_ALLOW: an operator who allows 127.0.0.2/32
opens that address and no other of the loopback, and one who allows 10.0.0.0/8 does not open the Redis that lies in it.
Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .public_addresses import Address, Network, embedded, unmapped

ALWAYS_DENIED: tuple[tuple[str, str], ...] = (
    ("127.0.0.0/8", "the node's loopback"),
    ("::1/128", "the node's loopback"),
    ("0.0.0.0/8", "the node's loopback"),
    ("::/128", "the node's loopback"),
    ("169.254.0.0/16", "link-local, where clouds serve metadata"),
    ("fe80::/10", "link-local"),
    ("fd00:ec2::254/128", "a cloud's metadata service"),
    ("100.100.100.200/32", "a cloud's metadata service"),
    ("168.63.129.16/32", "a cloud's metadata service"),
    ("192.0.0.192/32", "a cloud's metadata service"),
)
"""Ranges that are denied on every node, and why."""


@dataclass(frozen=True, slots=True)
class DeniedRange:
    network: Network
    why: str


_ALWAYS = tuple(DeniedRange(ipaddress.ip_network(text), why) for text, why in ALWAYS_DENIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressDenials:
    """The denied ranges of one node, and those that its operator allows all the same."""

    denied: Sequence[DeniedRange] = _ALWAYS
    allowed: Sequence[Network] = ()

    def why(self, address: Address) -> str:
        """The reason why an address is denied; empty if it is not."""
        for meant in dict.fromkeys((embedded(address), address)):
            rules = [rule for rule in self.denied if meant in rule.network]
            if not rules:
                continue
            nearest = max(rules, key=lambda rule: rule.network.prefixlen)
            prefix = max((one.prefixlen for one in self.allowed if meant in one), default=-1)
            if prefix < nearest.network.prefixlen:
                return nearest.why
        return ""


def denials(
    *, operator: Iterable[Network] = (), allowed: Iterable[Network] = (), platform: Iterable[tuple[Address, str]] = ()
) -> EgressDenials:
    """The denials of a node: those of every node, the operator's (FS_EGRESS_DENY), and addresses of the platform."""
    own = tuple(DeniedRange(unmapped(ipaddress.ip_network(address)), why) for address, why in platform)
    added = tuple(DeniedRange(unmapped(network), "its operator denies it (FS_EGRESS_DENY)") for network in operator)
    return EgressDenials(denied=(*_ALWAYS, *added, *own), allowed=tuple(map(unmapped, allowed)))
