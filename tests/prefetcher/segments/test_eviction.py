"""Eviction keeps its laws, and evicts what is cheapest to lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.segments.eviction import HALF_LIFE_S, EvictionCandidate, benefit, choose_evictions
from fleetstart.runtime.contract.ids import CheckpointId


def held(
    name: str, size_bytes: int = 100, *, used_s: float = 0.0, uses: int = 1, fetch_s: float = 1.0
) -> EvictionCandidate:
    return EvictionCandidate(
        checkpoint=CheckpointId(name),
        size_bytes=size_bytes,
        fetch_s=fetch_s,
        uses=uses,
        last_used_s=used_s,
        pinned=False,
    )


def test_nothing_is_evicted_while_there_is_room() -> None:
    assert choose_evictions(100, 100, [held("a")], 10.0) == []


def test_between_equals_the_least_recently_used_goes() -> None:
    assert choose_evictions(100, 0, [held("new", used_s=9), held("old", used_s=1)], 10.0) == ["old"]


def test_what_is_dear_to_fetch_outlives_what_was_used_later() -> None:
    dear, cheap = held("dear", used_s=1, fetch_s=50), held("cheap", used_s=9, fetch_s=0.1)

    assert choose_evictions(100, 0, [dear, cheap], 10.0) == ["cheap"]


def test_what_was_used_often_is_forgotten_after_some_half_lives() -> None:
    often, once = held("often", uses=8, used_s=0), held("once", used_s=5 * HALF_LIFE_S)

    assert benefit(often, 1.0) > benefit(once, 5 * HALF_LIFE_S)
    assert choose_evictions(100, 0, [often, once], 5 * HALF_LIFE_S) == ["often"]


def test_a_large_victim_spares_the_small_ones_that_it_made_needless() -> None:
    small, large = held("small", 10, used_s=0, fetch_s=0.01), held("large", 1000, used_s=5, fetch_s=10)

    assert choose_evictions(500, 0, [small, large], 10.0) == ["large"]


entries = st.builds(
    EvictionCandidate,
    checkpoint=st.uuids().map(lambda value: CheckpointId(value.hex)),
    size_bytes=st.integers(1, 1000),
    fetch_s=st.floats(0, 100),
    uses=st.integers(1, 50),
    last_used_s=st.floats(0, 10_000),
    pinned=st.booleans(),
)


@given(
    needed=st.integers(0, 3000),
    free=st.integers(-500, 2000),
    entries=st.lists(entries, max_size=12, unique_by=lambda entry: entry.checkpoint),
)
def test_evictions_make_room_spare_the_pinned_and_take_nothing_needless(
    needed: int, free: int, entries: list[EvictionCandidate]
) -> None:
    chosen = choose_evictions(needed, free, entries, 10_000.0)

    by_name = {entry.checkpoint: entry for entry in entries}
    if chosen is None:
        assert free + sum(entry.size_bytes for entry in entries if not entry.pinned) < needed
        return
    sizes = [by_name[name].size_bytes for name in chosen]
    assert not any(by_name[name].pinned for name in chosen)
    assert len(set(chosen)) == len(chosen)
    assert free + sum(sizes) >= needed or not needed
    assert all(free + sum(sizes) - size < needed for size in sizes)
