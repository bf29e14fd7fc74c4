from __future__ import annotations

from fleetstart.controller.billing.lost_gateways import LOST_NS, LostGateways

LOOK_NS = 5_000_000_000
BOTH = {"gw-own", "gw-other"}


def looks(lost: LostGateways, begin_ns: int, end_ns: int, alive: set[str]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for now_ns in range(begin_ns, end_ns + 1, LOOK_NS):
        found = lost.look(BOTH, alive, own="gw-own", now_ns=now_ns)
    return found


def test_a_gateway_is_lost_after_thirty_seconds_without_a_lease() -> None:
    lost = LostGateways()
    assert not looks(lost, 0, LOST_NS - LOOK_NS, {"gw-own"})
    assert looks(lost, LOST_NS, LOST_NS, {"gw-own"}) == {"gw-other"}


def test_an_own_gateway_is_never_lost() -> None:
    lost = LostGateways()
    assert not looks(lost, 0, 3 * LOST_NS, set())
    assert "gw-own" not in looks(lost, 3 * LOST_NS, 9 * LOST_NS, {"gw-own"})


def test_the_time_begins_again_when_the_looker_cannot_renew_its_lease_either() -> None:
    lost = LostGateways()
    looks(lost, 0, LOST_NS - LOOK_NS, {"gw-own"})
    assert not looks(lost, LOST_NS, LOST_NS, set()), "Redis takes no writes"
    assert not looks(lost, LOST_NS + LOOK_NS, 2 * LOST_NS, {"gw-own"})
    assert looks(lost, 2 * LOST_NS + LOOK_NS, 2 * LOST_NS + LOOK_NS, {"gw-own"}) == {"gw-other"}


def test_the_time_begins_again_after_a_pause_of_the_looker() -> None:
    lost = LostGateways()
    looks(lost, 0, LOOK_NS, {"gw-own"})
    assert not looks(lost, 2 * LOST_NS, 2 * LOST_NS, {"gw-own"})


def test_a_gateway_that_came_back_is_not_lost() -> None:
    lost = LostGateways()
    looks(lost, 0, LOST_NS - LOOK_NS, {"gw-own"})
    looks(lost, LOST_NS, LOST_NS, BOTH)
    assert not looks(lost, LOST_NS + LOOK_NS, 2 * LOST_NS, {"gw-own"})
