"""A node's sending rate as its readers have measured it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.links.uplinks import PairRate, pair_rates, uplink_bytes_per_s
from fleetstart.runtime.contract.ids import NodeId

rates = st.floats(1.0, 1e9)
pairs = st.lists(st.builds(PairRate, rates, st.booleans()), max_size=6)


def test_readers_that_could_take_more_have_measured_the_holder() -> None:
    seen = pair_rates({"store": 100.0, "peer": 40.0, "peer:slow": 40.0, "disk": 90.0})
    assert seen == {"slow": PairRate(40.0, False)}
    assert uplink_bytes_per_s(100.0, seen.values()) == 40.0


def test_a_reader_whose_link_was_full_says_only_what_the_holder_sends_at_least() -> None:
    seen = pair_rates({"store": 10.0, "peer": 100.0, "peer:a": 50.0, "peer:b": 50.0})
    assert all(pair.reader_limits for pair in seen.values()), "both at once may have filled it"
    assert uplink_bytes_per_s(80.0, [seen[NodeId("a")]]) == 80.0
    assert uplink_bytes_per_s(30.0, [seen[NodeId("a")]]) == 50.0


def test_without_readers_a_node_sends_as_fast_as_it_receives() -> None:
    assert pair_rates({"store": 10.0, "peer": 100.0}) == {}
    assert uplink_bytes_per_s(70.0, []) == 70.0


@given(rates, pairs)
def test_an_uplink_is_never_slower_than_what_was_read_over_it(receives: float, read_at: list[PairRate]) -> None:
    found = uplink_bytes_per_s(receives, read_at)
    assert all(found >= pair.bytes_per_s for pair in read_at)
    assert found in (receives, *[pair.bytes_per_s for pair in read_at]), "no rate is made up"
    if any(pair.reader_limits for pair in read_at):
        assert found >= receives


@given(rates, pairs, rates)
def test_a_faster_reading_makes_no_uplink_slower(receives: float, read_at: list[PairRate], more: float) -> None:
    if not read_at:
        return
    faster = [pair._replace(bytes_per_s=pair.bytes_per_s + more) for pair in read_at]
    assert uplink_bytes_per_s(receives, faster) >= uplink_bytes_per_s(receives, read_at)


@given(st.dictionaries(st.sampled_from(["store", "disk", "layers", "peer", "peer:a", "peer:b", "peer:c"]), rates))
def test_each_peer_that_was_read_from_has_its_rate(bytes_per_s: dict[str, float]) -> None:
    found = pair_rates(bytes_per_s)
    assert {f"peer:{node}": pair.bytes_per_s for node, pair in found.items()} == {
        name: rate for name, rate in bytes_per_s.items() if name.startswith("peer:")
    }


@pytest.mark.parametrize("useless", [{}, {"peer:": 0.0}, {"peer:a": 0.0}])
def test_what_was_never_measured_says_nothing(useless: dict[str, float]) -> None:
    assert pair_rates(useless) == {}
