"""Who takes which chunk: whoever is expected to finish it soonest, and always somebody."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.fetch.choice import (
    COSTLY_FACTOR,
    FIRST_FACTOR,
    PLANNED_PATIENCE_S,
    Load,
    SourceRate,
    bytes_to_leave,
    is_late,
    planned_patience_s,
)

MIB = 1 << 20
RATES = st.none() | st.floats(1e3, 1e10)
LOADS = st.builds(Load, RATES, st.integers(0, 1 << 32), st.booleans())


@given(st.lists(LOADS, min_size=1, max_size=6), st.integers(1, 64 * MIB))
def test_somebody_takes_the_next_chunk_at_once(loads: list[Load], size_bytes: int) -> None:
    left = [bytes_to_leave(load, loads[:at] + loads[at + 1 :], size_bytes) for at, load in enumerate(loads)]
    assert min(left) == 0
    assert all(amount >= 0 for amount in left)


@given(st.floats(1e3, 1e9), st.lists(st.builds(Load, st.floats(1e3, 1e9), st.integers(0, 1 << 30)), min_size=1))
def test_a_quicker_source_leaves_less(rate: float, others: list[Load]) -> None:
    slow, quick = (bytes_to_leave(Load(own), others, MIB) for own in (rate, 2 * rate))
    assert quick <= slow


@given(st.floats(1e6, 1e9), st.integers(2, 50), st.integers(0, 16))
def test_what_is_left_is_what_the_other_does_meanwhile(rate: float, times: int, chunks: int) -> None:
    """A source that is slower by a factor finishes one chunk while the quick one finishes as many as that."""
    quick = Load(rate, chunks * MIB)
    left = bytes_to_leave(Load(rate / times), [quick], MIB)
    assert math.isclose(left, max(0, times - 1 - chunks) * MIB, abs_tol=1.0)
    assert bytes_to_leave(quick, [Load(rate / times)], MIB) < 1 or chunks + 1 > times, "bytes, but for rounding"


def test_the_store_leaves_chunks_to_peers_that_are_nearly_as_quick() -> None:
    peer, others = Load(100e6, 64 * MIB), [Load(100e6, 64 * MIB)]
    for rate in (None, 100e6, COSTLY_FACTOR * 100e6):
        assert bytes_to_leave(Load(rate, costly=True), others, MIB) == math.inf
        assert bytes_to_leave(peer, [Load(rate, costly=True)], MIB) == 0
    quick = Load(10 * COSTLY_FACTOR * 100e6, costly=True)
    assert bytes_to_leave(quick, others, MIB) == 0
    assert bytes_to_leave(peer, [quick], MIB) > 0
    assert bytes_to_leave(quick, [Load(None)], MIB) == math.inf, "a peer that was not measured is tried first"
    assert bytes_to_leave(quick, [], MIB) == 0
    assert bytes_to_leave(quick, [Load(1e9, costly=True)], MIB) == 0, "nobody else has it"


def test_a_rate_is_bytes_over_the_time_of_reading() -> None:
    rate = SourceRate(None, 2.0)
    rate.begin(10.0)
    assert rate.at(11.0) is None
    rate.add(8 * MIB, 12.0)
    assert rate.at(12.0) == 4 * MIB
    rate.end(12.0)
    assert rate.at(100.0) == 4 * MIB, "idle time is not slowness"
    rate.begin(100.0)
    assert rate.at(102.0) == 2 * MIB
    assert rate.delivered == 4 * MIB


def test_a_source_from_which_nothing_comes_is_slow_after_a_while() -> None:
    rate = SourceRate(1e9, 2.0)
    rate.begin(0.0)
    assert rate.at(2.0 * FIRST_FACTOR - 0.1) == 1e9
    assert (rate.at(3.0 * FIRST_FACTOR) or math.inf) < 10e6


def test_little_that_came_quickly_says_nothing() -> None:
    rate = SourceRate(None, 2.0)
    rate.begin(0.0)
    rate.add(1000, 0.000001)
    assert rate.at(0.000001) is None


def test_a_chunk_is_late_after_a_multiple_of_its_time_and_never_before_it_may_be() -> None:
    assert not is_late(1.9, 0, None, 2.0)
    assert is_late(2.1, 0, None, 2.0)
    assert not is_late(2.1, 100 * MIB, 100 * MIB, 2.0)
    assert is_late(4.1, 100 * MIB, 100 * MIB, 2.0)


PATIENCES = st.floats(0.1, 10.0)


@given(PATIENCES, st.integers(0, 1 << 40), st.lists(LOADS, min_size=1, max_size=4), st.booleans())
def test_a_plan_s_source_is_waited_for_no_longer_than_the_others_would_need_for_all(
    patience_s: float, missing_bytes: int, others: list[Load], has_delivered: bool
) -> None:
    waits_s = planned_patience_s(
        patience_s, missing_bytes, others, has_delivered=has_delivered, most_s=PLANNED_PATIENCE_S
    )
    assert patience_s <= waits_s <= PLANNED_PATIENCE_S
    rates = [load.bytes_per_s for load in others if load.bytes_per_s]
    if has_delivered:
        assert waits_s == patience_s, "its pace is known"
    elif rates:
        assert waits_s <= max(COSTLY_FACTOR * patience_s, missing_bytes / max(rates))
    else:
        assert waits_s == PLANNED_PATIENCE_S, "there is nothing to predict by"


@given(PATIENCES, st.integers(0, 1 << 40), st.floats(1e3, 1e10), st.booleans())
def test_quicker_others_and_cheap_ones_take_over_no_later(
    patience_s: float, missing_bytes: int, rate: float, costly: bool
) -> None:
    def waits_s(*others: Load) -> float:
        return planned_patience_s(patience_s, missing_bytes, others, has_delivered=False, most_s=PLANNED_PATIENCE_S)

    assert waits_s(Load(2 * rate, costly=costly)) <= waits_s(Load(rate, costly=costly))
    assert waits_s(Load(rate)) <= waits_s(Load(rate, costly=True))
