"""The address of `fs up --listen`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.local.listen import PORT, ListenAddress, parse_listen
from fleetstart.runtime.contract.errors import InvalidInput


@given(st.ip_addresses(), st.integers(0, 65_535))
def test_an_address_reads_back_from_its_text(host: object, port: int) -> None:
    address = ListenAddress(str(host), port)
    assert parse_listen(str(address)) == address
    assert parse_listen(str(host)) == ListenAddress(str(host), PORT)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_listen(text)
    except InvalidInput:
        return
    assert parse_listen(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "example.com", "0.0.0.0:", "0.0.0.0:70000", "0.0.0.0:x", "[::1]7", "[::1]:", ":1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_listen(text)


def test_loopback_is_told_from_other_addresses() -> None:
    assert parse_listen("localhost:1").is_loopback
    assert parse_listen("[::1]:1").is_loopback
    assert not parse_listen("0.0.0.0").is_loopback
    assert not parse_listen("::").is_loopback
