"""What a list of `network=` lets through: its names at their ports, and nobody's own addresses unless it names them."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.egress_denials import ALWAYS_DENIED, EgressDenials, denials
from fleetstart.runtime.contract.function.egress_policy import (
    ENTRIES_MAX,
    EVERYWHERE,
    Name,
    Range,
    decide,
    must_look_up,
    parse_rules,
    plain_host,
    plain_name,
)
from fleetstart.runtime.contract.function.public_addresses import Address, is_public, literal
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName

PUBLIC = ipaddress.ip_address("93.184.216.34")
LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.integers(1, 65_535)
ADDRESSES = st.ip_addresses()
UNMAPPED = ADDRESSES.filter(lambda address: getattr(address, "ipv4_mapped", None) is None)
PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fd00:ec2::254", "::ffff:127.0.0.1", "2002:7f00:1::", "ff02::1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "fec0::1", "192.0.0.8", "2001:db8::1", "198.18.0.1", "::127.0.0.1",
)  # fmt: skip


# ── entries ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ("api.example.com", Name("api.example.com", False, 443)),
        ("API.Example.com.:80", Name("api.example.com", False, 80)),
        ("*.example.org:8443", Name("example.org", True, 8443)),
        ("203.0.113.0/24:443", Range(ipaddress.ip_network("203.0.113.0/24"), 443)),
        ("203.0.113.7", Range(ipaddress.ip_network("203.0.113.7/32"), 443)),
        ("2001:db8::/32", Range(ipaddress.ip_network("2001:db8::/32"), 443)),
        ("[2001:db8::1]:5432", Range(ipaddress.ip_network("2001:db8::1/128"), 5432)),
        ("[::1]", Range(ipaddress.ip_network("::1/128"), 443)),
    ],
)
def test_an_entry_is_a_host_a_wildcard_or_a_range(entry: str, rule: Name | Range) -> None:
    assert parse_rules([entry]) == (rule,)


@pytest.mark.parametrize(
    "entry",
    [
        "", "*", "*.", "a.*.b", "*example.org", "https://api.example.com", "api.example.com/path", "api.example.com:0",
        "api.example.com:99999", "api.example.com:", "api.example.com:https", "user@host", "ex ample.com", "münchen.de",
        "203.0.113.7/24", "203.0.113.0/33", "1.2.3", "127.1", "2130706433", "0x7f.1", "::1:443:x", "[::1", "a..b",
        "x" * 64 + ".com", ".".join(["abcdefgh"] * 40), "-a.com", "fe80::1%eth0",
    ],
)  # fmt: skip
def test_what_is_none_is_refused_and_named(entry: str) -> None:
    with pytest.raises(InvalidSpec, match="network") as refused:
        parse_rules(["api.example.com", entry])
    assert entry[:60] in refused.value.message
    assert refused.value.hint


def test_a_list_has_its_length() -> None:
    assert len(parse_rules(["a.example"] * ENTRIES_MAX)) == ENTRIES_MAX
    with pytest.raises(InvalidSpec, match="101"):
        parse_rules(["a.example"] * (ENTRIES_MAX + 1))


@pytest.mark.slow
@given(st.text(max_size=60))
def test_any_text_is_an_entry_or_refused(entry: str) -> None:
    try:
        (rule,) = parse_rules([entry])
    except InvalidSpec:
        return
    assert 1 <= rule.port <= 65_535


def test_a_function_is_checked_and_keeps_its_list() -> None:
    fields: dict[str, Any] = {"name": FunctionName("f"), "bundle": BundleId("b" * 64), "entry": "handler:f"}
    spec = FunctionSpec(**fields, network=["api.example.com"])
    assert spec.egress == ["api.example.com"]
    assert FunctionSpec(**fields, network=True).egress == FunctionSpec(**fields).egress == []
    with pytest.raises(InvalidSpec, match="no host"):
        FunctionSpec(**fields, network=["no host"])


# ── decisions ──────────────────────────────────────────────────────────────────────────────────────


def goes(host: str, port: int, addresses: list[Address], *entries: str) -> tuple[Address, ...]:
    return decide(host, port, addresses, parse_rules(entries)).addresses


@given(NAMES, PORTS, NAMES, PORTS)
def test_a_name_covers_itself_at_its_port_alone(listed: str, port: int, host: str, at: int) -> None:
    for asked, asked_port in ((listed, port), (listed, at), (host, port), (f"{host}.{listed}", port)):
        good = goes(asked, asked_port, [PUBLIC], f"{listed}:{port}")
        assert bool(good) == ((asked, asked_port) == (listed, port))


@given(NAMES, PORTS, NAMES)
def test_a_wildcard_covers_all_below_and_not_itself(listed: str, port: int, host: str) -> None:
    entry = f"*.{listed}:{port}"
    assert goes(f"{host}.{listed}", port, [PUBLIC], entry) == (PUBLIC,)
    assert not goes(listed, port, [PUBLIC], entry)
    assert not goes(f"{host}{listed}"[:253], port, [PUBLIC], entry) or "." in host


@pytest.mark.slow
@given(st.lists(ADDRESSES, max_size=6), NAMES, st.lists(st.sampled_from(["0.0.0.0/0", "::/0", "8.0.0.0/7", "b.c"])))
def test_without_a_range_of_its_own_nothing_private_is_reached(
    found: list[Address], name: str, more: list[str]
) -> None:
    """Whatever a look-up answers, and however wide the ranges beside it are."""
    candidates = [*found, *map(ipaddress.ip_address, PRIVATE)]
    for address in goes(name, 443, candidates, name, *more):
        assert is_public(address)
    for address in candidates:
        assert all(map(is_public, goes(str(address), 443, [address], name, *more)))


@given(UNMAPPED, st.integers(0, 128), PORTS)
def test_a_range_covers_its_addresses_as_literals(address: Address, bits: int, port: int) -> None:
    prefix = min(bits, address.max_prefixlen)
    network = ipaddress.ip_network((address, prefix), strict=False)
    entry = f"[{network}]:{port}" if network.version == 6 else f"{network}:{port}"
    narrow = prefix >= (8 if network.version == 4 else 7)
    own = plain_host(f"[{address}]" if network.version == 6 else str(address))
    assert own is not None
    reached = goes(own, port, [address], entry)
    assert set(reached) <= {address}
    if EVERYWHERE.why(address):
        assert not reached
    elif is_public(address):
        assert reached == (address,)
    elif reached:
        assert narrow
    assert not goes(own, port % 65_535 + 1, [address], entry)


@pytest.mark.parametrize("private", ["10.1.2.3", "192.168.7.7", "100.64.0.1", "fd12::1", "203.0.113.9"])
def test_a_range_names_what_is_private(private: str) -> None:
    address = ipaddress.ip_address(private)
    entry = f"{ipaddress.ip_network((address, 24 if address.version == 4 else 120), strict=False)}"
    assert goes(str(address), 443, [address], entry) == (address,)
    assert goes("db.internal", 443, [address], entry, "db.internal") == (address,)
    assert not goes("db.internal", 443, [address], entry)
    assert not goes("db.internal", 443, [address], "db.internal")


@given(ADDRESSES, st.sampled_from([text for text, _ in ALWAYS_DENIED]), st.booleans())
def test_what_is_denied_is_reached_by_no_list_until_its_operator_names_it(
    address: Address, text: str, mapped: bool
) -> None:
    network = ipaddress.ip_network(text)
    inside = network[int(address) % network.num_addresses]
    found = ipaddress.ip_address(f"::ffff:{inside}") if mapped and inside.version == 4 else inside
    entries = [f"[{inside}]:443" if inside.version == 6 else f"{inside}:443", "listed.example", text]
    for host in (str(inside), "listed.example"):
        decision = decide(host, 443, [found], parse_rules(entries))
        assert decision.addresses == ()
        if not inside.is_unspecified:
            assert "whatever a list says" in decision.why
    exactly = EgressDenials(allowed=[ipaddress.ip_network(inside)])
    assert decide("listed.example", 443, [found], parse_rules(entries), exactly).addresses == (inside,)


def test_the_more_exact_of_what_is_denied_and_allowed_decides() -> None:
    redis, beside = ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("10.0.0.6")
    wide, own = ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network(redis)
    assert denials(platform=[(redis, "an address of Redis")], allowed=[wide]).why(redis) == "an address of Redis"
    assert denials(platform=[(redis, "an address of Redis")], allowed=[own]).why(redis) == ""
    assert "FS_EGRESS_DENY" in denials(operator=[wide], allowed=[own]).why(beside)
    assert denials(operator=[wide], allowed=[own]).why(redis) == ""
    assert denials(operator=[wide], allowed=[wide]).why(beside) == ""


def test_only_the_addresses_that_may_be_reached_are_left() -> None:
    loop = ipaddress.ip_address("127.0.0.1")
    assert goes("a.example", 443, [loop, PUBLIC, loop, PUBLIC], "a.example") == (PUBLIC,)


def test_a_mapped_address_is_what_it_reaches() -> None:
    mapped = ipaddress.ip_address("::ffff:10.0.0.1")
    assert goes("10.0.0.1", 443, [mapped], "10.0.0.0/8") == (ipaddress.ip_address("10.0.0.1"),)
    assert not goes("10.0.0.1", 443, [mapped], "::ffff:0:0/96")


def test_a_range_of_mapped_addresses_is_the_range_that_they_reach() -> None:
    own, other = ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("8.8.8.8")
    assert goes("::ffff:10.0.0.1", 443, [own], "::ffff:10.0.0.0/104") == (own,)
    denied = ipaddress.ip_network("::ffff:8.8.8.0/120")
    assert "FS_EGRESS_DENY" in denials(operator=[denied]).why(other)
    assert denials(operator=[denied], allowed=[ipaddress.ip_network("::ffff:8.8.8.8")]).why(other) == ""
    assert denials(platform=[(ipaddress.ip_address("::ffff:8.8.8.8"), "an address of Redis")]).why(other)


@pytest.mark.parametrize(
    ("wide", "private", "own"),
    [("64:ff9b::/96", "64:ff9b::a00:1", "64:ff9b::a00:0/104"), ("2002::/16", "2002:a00:1::1", "2002:a00::/24")],
)
def test_all_of_ipv4_inside_ipv6_names_no_private_address_and_a_private_network_does(
    wide: str, private: str, own: str
) -> None:
    address = ipaddress.ip_address(private)
    assert goes(private, 443, [address], wide) == ()
    assert goes(private, 443, [address], own) == (address,)
    public = ipaddress.ip_address("64:ff9b::808:808")
    assert goes(str(public), 443, [public], "64:ff9b::/96") == (public,)


def test_a_literal_reaches_no_address_but_itself() -> None:
    assert not goes("93.184.216.35", 443, [PUBLIC], "93.184.216.0/24")


@pytest.mark.parametrize(
    ("host", "found", "why"),
    [
        ("b.example", [], "b.example:443 is not in the list"),
        ("a.example", [], "no address"),
        ("a.example", ["10.0.0.1", "127.0.0.1"], "10.0.0.1, 127.0.0.1"),
        ("10.0.0.1", ["10.0.0.1"], "10.0.0.1:443 is in no range"),
    ],
)
def test_a_refusal_says_why(host: str, found: list[str], why: str) -> None:
    decision = decide(host, 443, [ipaddress.ip_address(text) for text in found], parse_rules(["a.example"]))
    assert decision.addresses == ()
    assert why in decision.why


@given(NAMES, PORTS)
def test_only_what_is_listed_is_looked_up(host: str, port: int) -> None:
    rules = parse_rules(["listed.example", "10.0.0.0/8", "0.0.0.0/0"])
    assert must_look_up("listed.example", 443, rules)
    assert not must_look_up("10.0.0.1", 443, rules)
    assert not must_look_up(host, port, rules) or (host, port) == ("listed.example", 443)


@given(st.text(max_size=80))
def test_a_host_is_a_name_an_address_or_nothing(text: str) -> None:
    host = plain_host(text)
    assert host is None or (literal(host) is not None and str(literal(host)) == host) or plain_name(host) == host


@pytest.mark.parametrize(
    ("text", "host"),
    [("127.1", "127.0.0.1"), ("2130706433", "127.0.0.1"), ("[::FFFF:127.0.0.1]", "127.0.0.1"),
     ("LocalHost.", "localhost"), 
     ("fe80::1%lo", None), ("a\x00b", None), ("127.0.0.1 x", None), ("", None), ("1.2.3.4.5", None)],
)  # fmt: skip
def test_hosts_have_one_way_to_be_written(text: str, host: str | None) -> None:
    assert plain_host(text) == host
