"""The wait model, against a queue that is simulated call by call."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.gateway.admission.wait_model import (
    SAMPLES,
    UNKNOWN_S,
    FillRate,
    QueueState,
    predicted_wait_s,
    remaining_fetch_s,
    remaining_start_s,
)
from fleetstart.runtime.contract.wait_estimate import PendingStart

SECOND = 1_000_000_000


def line(queued: int = 0, slots: int = 1, running: int = 1, elapsed_s: float = 0.0, **more: object) -> QueueState:
    fields = {"call_s": 2.0, **more}
    return QueueState(queued=queued, slots=slots, running=running, elapsed_s=elapsed_s, **fields)  # type: ignore[arg-type]


def walked(queued: int, left_s: list[float], call_s: float, coming: list[PendingStart]) -> float:
    """The turn of the call behind `queued` others, if each takes exactly `call_s`."""
    free_s = [*left_s, *(worker.ready_s for worker in coming for _ in range(worker.slots))]
    heapq.heapify(free_s)
    for _ in range(queued):
        heapq.heapreplace(free_s, free_s[0] + call_s)
    return free_s[0]


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [
        (line(slots=2, running=1), 0.0),
        (line(elapsed_s=0.5), 1.5),
        (line(queued=3, elapsed_s=0.5), 7.5),
        (line(queued=3, slots=2, running=2, elapsed_s=2.0), 3.5),
        (line(slots=0, running=0), UNKNOWN_S),
        (line(slots=0, running=0, coming=[PendingStart(ready_s=4.0)]), 4.0),
        (line(slots=0, running=0, queued=1, coming=[PendingStart(ready_s=4.0, slots=2)]), 4.0),
        (line(queued=9, elapsed_s=0.0, coming=[PendingStart(ready_s=1.0, slots=100)]), 1.0),
        (line(elapsed_s=99.0), 0.0),
    ],
)
def test_turns(given: QueueState, expected_s: float) -> None:
    assert predicted_wait_s(given) == pytest.approx(expected_s)


@given(
    st.integers(0, 200),
    st.lists(st.floats(0, 1), max_size=12),
    st.floats(0.01, 10),
    st.lists(st.builds(PendingStart, ready_s=st.floats(0, 30), slots=st.integers(1, 8)), max_size=4),
)
def test_a_turn_comes_within_two_calls_of_when_it_was_told(
    queued: int, left: list[float], call_s: float, coming: list[PendingStart]
) -> None:
    """A fluid of calls is never further than a round of the slots from the calls themselves."""
    told_s = predicted_wait_s(
        line(
            queued,
            slots=len(left),
            running=len(left),
            elapsed_s=sum(1 - share for share in left) * call_s,
            call_s=call_s,
            coming=coming,
        )
    )
    if not left and not coming:
        assert math.isinf(told_s)
        return
    walked_s = walked(queued, [share * call_s for share in left], call_s, coming)
    assert abs(told_s - walked_s) <= 2 * call_s + 1e-6


@given(st.integers(0, 100), st.integers(1, 20), st.floats(0, 5), st.floats(0.01, 5))
def test_more_in_front_is_never_quicker(queued: int, slots: int, ready_s: float, call_s: float) -> None:
    coming = [PendingStart(ready_s=ready_s, slots=3)]
    fields = {"slots": slots, "running": slots, "call_s": call_s, "coming": coming}
    assert predicted_wait_s(line(queued, **fields)) <= predicted_wait_s(line(queued + 1, **fields)) + 1e-9  # type: ignore[arg-type]


def test_a_start_is_as_late_as_its_slower_half() -> None:
    assert remaining_start_s(own_s=2.0, since_s=0.5, fetch_s=0.3) == 1.5
    assert remaining_start_s(own_s=2.0, since_s=0.5, fetch_s=9.0) == 9.0
    assert remaining_start_s(own_s=2.0, since_s=5.0, fetch_s=0.0) == pytest.approx(0.5), "late, and likely soon"


def test_bytes_come_at_the_rate_at_which_they_were_seen_to_come() -> None:
    seen = FillRate()
    assert seen.bytes_per_s is None
    seen.note(10 * SECOND, 1000)
    seen.note(10 * SECOND, 1000)
    assert seen.bytes_per_s is None, "one report, told twice"
    seen.note(12 * SECOND, 5000)
    assert seen.bytes_per_s == 2000
    assert remaining_fetch_s(6000, 2000, since_counted_s=0.5) == 2.5
    assert remaining_fetch_s(6000, 2000, since_counted_s=60) == 0.0
    seen.note(13 * SECOND, 10)
    assert seen.bytes_per_s is None, "evicted, and begun anew"
    seen.note(14 * SECOND, 10)
    assert seen.bytes_per_s is None, "nothing comes"


def test_a_store_that_slows_down_is_believed_after_a_few_reports() -> None:
    seen = FillRate()
    for second in range(10):
        seen.note(second * SECOND, second * 1000)
    for second in range(10, 20):
        seen.note(second * SECOND, 9000 + (second - 9) * 10)
    assert seen.bytes_per_s == pytest.approx(10)


def test_a_rate_is_steady_unless_a_stall_is_among_its_reports() -> None:
    seen = FillRate()
    assert seen.steady, "nothing speaks against it"
    for second in range(8):
        seen.note(second * SECOND, second * 1000)
        assert seen.steady
    for second in range(8, 11):
        seen.note(second * SECOND, 7000)
    assert seen.steady, "half of what was: within what waves of chunks do"
    for second in range(11, 14):
        seen.note(second * SECOND, 7000)
    assert not seen.steady
    for second in range(14, 30):
        seen.note(second * SECOND, 7000)
    assert seen.bytes_per_s is None, "it stands still, and nothing else is seen"
    seen.note(30 * SECOND, 8000)
    assert not seen.steady, "it comes again"
    for second in range(31, 45):
        seen.note(second * SECOND, (second - 22) * 1000)
    assert seen.steady


def test_a_stall_soon_after_the_first_bytes_is_seen() -> None:
    seen = FillRate()
    for second, ready_bytes in enumerate((0, 1000, *[2000] * 7)):
        seen.note(second * SECOND, ready_bytes)
    assert not seen.steady


def test_a_stall_among_the_first_reports_is_seen_during_it_and_after() -> None:
    """The mean of so few falls slowly: to 2/7 of what it was at first."""
    seen = FillRate()
    for second, ready_bytes in enumerate((0, *[4000] * 4)):
        seen.note(second * SECOND, ready_bytes)
        assert seen.steady, "no longer than between two waves of chunks"
    for second in range(5, 8):
        seen.note(second * SECOND, 4000)
        assert not seen.steady
    seen.note(8 * SECOND, 8000)
    assert not seen.steady, "it comes again"
    for second in range(9, 20):
        seen.note(second * SECOND, (second - 6) * 4000)
    assert seen.steady


def test_a_report_long_after_the_last_one_starts_over() -> None:
    seen = FillRate()
    for second, ready_bytes in ((0, 1000), (1, 2000), (57, 2100)):
        seen.note(second * SECOND, ready_bytes)
    assert seen.bytes_per_s is None, "the store stalled for a minute that no call noted"


@given(st.integers(1, 32), st.floats(1.0, 6.0), st.lists(st.floats(0.8, 1.2), min_size=8, max_size=8))
def test_chunks_that_arrive_in_waves_have_a_steady_rate(chunks: int, wave_s: float, jitter: list[float]) -> None:
    """Threads that share a link end their chunks at about the same time: nothing for seconds, then many at once."""
    seen = FillRate()
    waves = [wave_s * sum(jitter[: number + 1]) for number in range(len(jitter))]
    for second in range(int(waves[-1])):
        seen.note((second + 1) * SECOND, sum(at <= second for at in waves) * chunks * 1000)
        if second >= 2 * SAMPLES:
            assert seen.steady, second


@given(st.lists(st.integers(500, 1000), min_size=1, max_size=20))
def test_rates_that_differ_by_half_are_steady(brought: list[int]) -> None:
    seen, ready_bytes = FillRate(), 0
    for second, count in enumerate(brought):
        ready_bytes += count
        seen.note(second * SECOND, ready_bytes)
        assert seen.steady
