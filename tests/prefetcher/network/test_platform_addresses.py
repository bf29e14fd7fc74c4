"""Addresses of the platform: when they are looked up again, and what is kept."""

from __future__ import annotations

import asyncio
import ipaddress
from types import SimpleNamespace

import pytest

from fleetstart.prefetcher.network.dialer import ConnectFailed
from fleetstart.prefetcher.network.platform_addresses import FRESH_S, UNKNOWN_S, PlatformAddresses
from fleetstart.runtime.contract.function.public_addresses import Address

FIRST, SECOND = ipaddress.ip_address("10.0.0.7"), ipaddress.ip_address("10.0.0.8")


class Names:
    """Name servers and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: Address | None = None
        self.now_s = 1000.0
        monkeypatch.setattr(f"{PlatformAddresses.__module__}.resolve", self.resolve)
        monkeypatch.setattr(f"{PlatformAddresses.__module__}.time", SimpleNamespace(monotonic=lambda: self.now_s))

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        if self.address is None:
            raise ConnectFailed(f"{host} cannot be looked up")
        return (self.address,)


def why(addresses: PlatformAddresses, address: Address) -> str:
    return asyncio.run(addresses.denials()).why(address)


def test_a_name_that_could_not_be_looked_up_is_soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a failure at the first connection would leave Redis open to lists for half a minute."""
    names = Names(monkeypatch)
    addresses = PlatformAddresses({"redis.internal": "Redis", "10.9.9.9": "a controller"})
    assert why(addresses, FIRST) == ""
    names.address = FIRST
    names.now_s += UNKNOWN_S
    assert why(addresses, FIRST) == "an address of Redis"


def test_a_name_that_moves_is_looked_up_again_and_keeps_its_address_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch)
    addresses = PlatformAddresses({"redis.internal": "Redis"})
    names.address = FIRST
    assert why(addresses, FIRST)
    names.address = None
    names.now_s += FRESH_S
    assert why(addresses, FIRST), "it cannot be looked up now"
    names.address = SECOND
    names.now_s += UNKNOWN_S
    assert why(addresses, FIRST), "it is taken for current"
    names.now_s += FRESH_S
    assert why(addresses, SECOND)
