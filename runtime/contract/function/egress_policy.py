"""The egress policy of a function: the rules of `network=[...]`, and the decision about one connection. Pure.

An entry is a name (`api.example.com`), every name below one (`*.example.org`), or a range of addresses
(`203.0.113.0/24`, an address for itself), each with a port (`:8443`, 443 if there is none; IPv6 in brackets before it).

A listed name may resolve to any public address. Private, loopback, link-local and reserved addresses are reached only
if a range of the list names them, and never if the node denies them (`egress_denials`). A range that is wider than any
such network (0.0.0.0/0) names none of them. Names that are not listed are not even resolved, since a DNS query carries
data out as well.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidSpec
from .egress_denials import EgressDenials
from .public_addresses import Address, Network, embedded_network, is_public, literal, unmapped

ENTRIES_MAX = 100
DEFAULT_PORT = 443
NAME_MAX = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
EVERYWHERE = EgressDenials()
"""What is denied on every node."""
_WIDEST = {4: 8, 6: 7}
"""Prefixes of 10.0.0.0/8 and fc00::/7: the widest private networks."""
_HINT = 'write a host, a wildcard or a range: network=["api.example.com", "*.example.org:8443", "203.0.113.0/24:443"]'


@dataclass(frozen=True, slots=True)
class Name:
    """A rule for one host name; with `below`, for all names under it, itself excluded."""

    name: str
    below: bool
    port: int

    def covers(self, host: str, port: int) -> bool:
        if port != self.port:
            return False
        return host.endswith(f".{self.name}") if self.below else host == self.name


@dataclass(frozen=True, slots=True)
class Range:
    network: Network
    port: int

    def covers(self, address: Address, port: int) -> bool:
        if port != self.port or address not in self.network:
            return False
        return is_public(address) or self._names_its_own

    @property
    def _names_its_own(self) -> bool:
        meant = embedded_network(self.network)  # 64:ff9b::/96 is all of IPv4
        return meant.prefixlen >= _WIDEST[meant.version] and not any(
            is_public(end) for end in (meant.network_address, meant.broadcast_address)
        )


Rule = Name | Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The addresses to try in turn; none, and the reason, if the connection is refused."""

    addresses: tuple[Address, ...] = ()
    why: str = ""


def parse_rules(entries: Sequence[str]) -> tuple[Rule, ...]:
    """Parses the entries of `network`. Errors: InvalidSpec, naming the entry."""
    if len(entries) > ENTRIES_MAX:
        raise InvalidSpec(f"network has {ENTRIES_MAX} entries at most, got {len(entries)}")
    return tuple(_rule(entry) for entry in entries)


def _rule(entry: str) -> Rule:
    if entry == "*":
        raise InvalidSpec('network: "*" is every host', hint="write network=True for a worker that may reach all")
    if "://" in entry:
        raise InvalidSpec(f"network: {entry[:100]!r} is a URL", hint="write its host alone, and its port if not 443")
    host, port = _split(entry)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if "%" in bare:
            raise ValueError("an address with a zone is not the same on every node")
        return Range(unmapped(ipaddress.ip_network(bare)), port)
    except ValueError as error:
        if "/" in bare or ":" in bare:
            raise InvalidSpec(f"network: {entry[:100]!r}: {str(error)[:200]}", hint=_HINT) from error
    below = host.startswith("*.")
    name = plain_name(host[2:] if below else host)
    if name is None:
        raise InvalidSpec(f"network: {entry[:100]!r} is no host, no wildcard and no range", hint=_HINT)
    return Name(name, below, port)


def _split(entry: str) -> tuple[str, int]:
    """Host and port of an entry. A lone IPv6 address has colons and no port."""
    host, colon, text = entry.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or entry.endswith("]"):
        return entry, DEFAULT_PORT
    port = read_port(text)
    if port is None:
        raise InvalidSpec(f"network: {entry[:100]!r}: its port must be 1 to 65535", hint=_HINT)
    return host, port


def read_port(text: str) -> int | None:
    return int(text) if _PORT.fullmatch(text) and int(text) <= 65_535 else None


def plain_name(host: str) -> str | None:
    """Normalises a host name: lower case, no trailing dot. None if it is invalid or an address."""
    if not host.isascii():
        return None
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > NAME_MAX or not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        return None
    return name


def plain_host(host: str) -> str | None:
    """Normalises a host: a name as `plain_name` does, or a literal address; None if it is neither."""
    if not host.isascii() or not host.isprintable() or "%" in host or " " in host:
        return None
    address = literal(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    return str(_unmapped(address)) if address is not None else plain_name(host)


def must_look_up(host: str, port: int, rules: Sequence[Rule]) -> bool:
    """Checks whether the host must be resolved: it is a name, and a rule lists it. `host` as from `plain_host`."""
    return literal(host) is None and _is_named(host, port, rules)


def decide(
    host: str, port: int, addresses: Sequence[Address], rules: Sequence[Rule], denials: EgressDenials = EVERYWHERE
) -> Decision:
    """Decides one connection. `addresses`: the host itself if it is one, else the resolved ones; none if not resolved.
    `denials` are above the list."""
    listed = _listed(host, port, addresses, rules)
    reasons = {address: denials.why(address) for address in listed.addresses}
    if good := tuple(address for address, why in reasons.items() if not why):
        return Decision(addresses=good)
    if not reasons:
        return listed
    led, why = next(iter(reasons.items()))
    leads = "" if literal(host) is not None else f" leads to {led}, which"
    return Decision(why=f"{host}:{port}{leads} is denied by this node, whatever a list says ({why})")


def _listed(host: str, port: int, addresses: Sequence[Address], rules: Sequence[Rule]) -> Decision:
    """The decision by the function's own list."""
    where = f"{host}:{port}"
    found = [_unmapped(address) for address in addresses]
    if (own := literal(host)) is not None:
        listed = tuple(one for one in found if one == _unmapped(own) and _is_listed(one, port, rules))
        return Decision(addresses=listed) if listed else Decision(why=f"{where} is in no range of the list")
    if not _is_named(host, port, rules):
        return Decision(why=f"{where} is not in the list")
    if not found:
        return Decision(why=f"{where} has no address")
    good = tuple(dict.fromkeys(one for one in found if is_public(one) or _is_listed(one, port, rules)))
    if good:
        return Decision(addresses=good)
    led = ", ".join(map(str, found[:3]))
    return Decision(why=f"{where} leads to {led}, which is no public address and in no range of the list")


def _is_named(host: str, port: int, rules: Sequence[Rule]) -> bool:
    return any(isinstance(rule, Name) and rule.covers(host, port) for rule in rules)


def _is_listed(address: Address, port: int, rules: Sequence[Rule]) -> bool:
    return any(isinstance(rule, Range) and rule.covers(address, port) for rule in rules)


def _unmapped(address: Address) -> Address:
    """The address that is really reached: a connection to ::ffff:10.0.0.1 reaches 10.0.0.1."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
