"""Links that are shared: eq. 3 and 4 by hand, and that no promise is broken by a later one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.links.contention import NEVER, Link, PendingFetch
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from tests.controller.planner.worlds import late_ones

C = CheckpointId("c")


def fetch(name: str, pending: float, deadline_s: float = NEVER) -> PendingFetch:
    return PendingFetch(WorkerId(name), CheckpointId(name), pending, deadline_s)


def link(*fetches: PendingFetch, at_s: float = 0.0) -> Link:
    return Link(bytes_per_s=100.0, at_s=at_s, fetches=fetches)


def pending(of: Link) -> dict[str, float]:
    return {one.worker: one.pending_bytes for one in of.fetches}


def test_eq_3_refuses_what_would_make_another_late() -> None:
    # 400 bytes at 100/s alone take 4 s, beside as many 8 s, beside 100 bytes 5 s.
    assert link(fetch("a", 400, 8.0)).accepts(400, 0.0)
    assert not link(fetch("a", 400, 7.9)).accepts(400, 0.0)
    assert link(fetch("a", 400, 5.0)).accepts(100, 0.0)
    assert not link(fetch("a", 400, 4.9)).accepts(100, 0.0)
    assert link(fetch("a", 100, 2.0)).accepts(1e9, 0.0), "it has half of the link until it ends"
    assert not link(fetch("a", 400, 8.0)).with_fetch(fetch("b", 1), 0.0).accepts(400, 0.0), "a third one is too many"


def test_a_newcomer_gets_the_shares_of_those_that_end_before_it() -> None:
    shared = link(fetch("a", 400), fetch("b", 100))
    assert shared.fetch_s(100, 0.0) == pytest.approx(3.0), "a third of the link"
    assert shared.fetch_s(200, 0.0) == pytest.approx(5.0), "and half of it from then on"
    assert shared.ends_s(1.0) == pytest.approx([5.0, 2.0])


def test_eq_4_takes_off_what_came_meanwhile() -> None:
    shared = link(fetch("a", 400, 8.0), fetch("b", 100))
    assert pending(shared.at(1.0)) == {"a": 350, "b": 50}
    assert pending(shared.at(2.0)) == {"a": 300}, "b has come, and is no longer on the list"
    assert pending(shared.at(3.0)) == {"a": 200}, "and a has the link alone"
    assert pending(shared.at(5.0)) == {}


def test_who_promised_nothing_objects_to_nothing() -> None:
    assert link(fetch("a", 1e12)).accepts(1e12, 0.0)


def test_a_promise_that_is_broken_already_closes_the_node_to_nobody() -> None:
    late = link(fetch("a", 400, 1.0))
    assert late_ones(late, 0.0) == ("a",)
    assert late.accepts(1e12, 0.0)


def test_a_worker_that_joins_a_fetch_waits_for_it_only() -> None:
    shared = link(fetch("a", 400), fetch("b", 100))
    assert shared.pending_s(CheckpointId("a"), 0.0) == pytest.approx(5.0)
    assert shared.pending_s(CheckpointId("b"), 0.0) == pytest.approx(2.0)
    assert shared.pending_s(CheckpointId("z"), 0.0) == 0


fetches = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 20)), min_size=1, max_size=6)


@given(fetches, st.floats(0, 20), st.floats(0, 20))
def test_time_passes_the_same_in_one_step_or_two(of: list[tuple[int, float]], first_s: float, more_s: float) -> None:
    start = link(*(fetch(str(i), size) for i, (size, _) in enumerate(of)))
    once, twice = start.at(first_s + more_s), start.at(first_s).at(first_s + more_s)
    assert sum(pending(once).values()) == pytest.approx(sum(pending(twice).values()), abs=1e-6)
    moved = sum(size for size, _ in of) - sum(pending(once).values())
    assert moved == pytest.approx(min(sum(size for size, _ in of), 100 * (first_s + more_s)), abs=1e-6)


@given(fetches, st.integers(1, 1000))
def test_a_fetch_takes_as_long_as_was_said(of: list[tuple[int, float]], size: int) -> None:
    before = link(*(fetch(str(i), pending) for i, (pending, _) in enumerate(of)))
    took_s = before.fetch_s(size, 0.0)
    with_it = before.with_fetch(fetch("new", size), 0.0)
    assert "new" in pending(with_it.at(took_s * 0.999 - 1e-6))
    assert "new" not in pending(with_it.at(took_s * 1.001 + 1e-6))


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 60), st.floats(0, 5)), min_size=1, max_size=8))
def test_every_promise_kept_at_acceptance_stays_kept(arrivals: list[tuple[int, float, float]]) -> None:
    now_s, current, promised = 0.0, link(), set()
    for index, (size, within_s, wait_s) in enumerate(arrivals):
        now_s += wait_s
        if current.accepts(size, now_s):
            newcomer = fetch(str(index), size, now_s + within_s)
            current = current.with_fetch(newcomer, now_s)
            if newcomer.worker not in late_ones(current, now_s):
                promised.add(newcomer.worker)
        assert not promised & set(late_ones(current, now_s))
    while current.fetches:
        now_s += 0.25
        assert not promised & set(late_ones(current, now_s))
        current = current.at(now_s)
