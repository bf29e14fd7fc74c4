"""Ranges and steps: which cells become which point."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.history.call_counts import CallCounts, merged
from fleetstart.controller.history.series import CELLS, POINTS_MAX, RANGES, history_of, span_of
from fleetstart.controller.schemas.history import RangeName
from fleetstart.runtime.contract.errors import InvalidInput

NOW_MS = 1_800_000_000_000
ranges = st.sampled_from(sorted(RANGES))


@given(ranges, st.integers(NOW_MS, NOW_MS * 2))
def test_a_span_covers_its_range_and_ends_with_the_step_of_now(name: str, now_unix_ms: int) -> None:
    span = span_of(name, "", now_unix_ms)
    assert span.since_unix_ms % span.step_ms == 0
    assert span.until_unix_ms - span.step_ms <= now_unix_ms < span.until_unix_ms
    assert span.steps * span.step_ms == RANGES[span.name][0]
    assert 60 <= span.steps <= 90


@given(ranges, st.integers(NOW_MS, NOW_MS * 2), st.data())
def test_each_cell_counts_to_the_one_step_that_it_lies_in(name: str, now_unix_ms: int, data: st.DataObject) -> None:
    span = span_of(name, "", now_unix_ms)
    cell_ms = CELLS[span.resolution].cell_ms
    first, last = span.since_unix_ms // cell_ms, now_unix_ms // cell_ms
    numbers = data.draw(st.lists(st.integers(first - 5, last + 5), max_size=20))
    cells = [(number * cell_ms, CallCounts(calls=1, total_ms={3: 1})) for number in numbers]
    found = history_of("f", span, cells)
    inside = [at for at, _ in cells if span.since_unix_ms <= at < span.until_unix_ms]
    assert found.total.calls == sum(point.calls for point in found.points) == len(inside)
    for point in found.points:
        assert point.calls == sum(point.begin_unix_ms <= at < point.begin_unix_ms + span.step_ms for at in inside)
    assert found.total == merged(counts for at, counts in cells if at in inside).point(span.since_unix_ms)


@given(ranges, st.integers(NOW_MS, NOW_MS * 2))
def test_every_cell_of_a_span_is_in_its_hashes_and_still_kept(name: str, now_unix_ms: int) -> None:
    span = span_of(name, "", now_unix_ms)
    size = CELLS[span.resolution]
    assert size.hash_ms % size.cell_ms == 0
    for at in (span.since_unix_ms, span.until_unix_ms - 1):
        assert at // size.hash_ms in span.hashes
    # A hash expires some time after the last write to it, which may be in the first cell that the span asks for.
    assert size.kept_s * 1000 >= now_unix_ms - span.since_unix_ms


def test_there_are_the_ranges_that_the_api_names() -> None:
    assert set(RANGES) == set(get_args(RangeName))


@pytest.mark.parametrize(
    ("name", "step", "points"),
    [("1h", "1m", 60), ("24h", "1m", 1440), ("24h", "7m", 206), ("7d", "1h", 168), ("30d", "1d", 30)],
)
def test_a_step_may_be_chosen(name: str, step: str, points: int) -> None:
    span = span_of(name, step, NOW_MS)
    assert span.steps == points <= POINTS_MAX
    assert span.steps * span.step_ms >= RANGES[span.name][0]


@pytest.mark.parametrize(
    ("name", "step"),
    [("2h", ""), ("", ""), ("1h", "30s"), ("1h", "0m"), ("1h", "2h"), ("7d", "90m"), ("7d", "1m"), ("1h", "-1m"),
     ("1h", "1.5m"), ("1h", "m"), ("24h", "9" * 40 + "m"), ("30d", "31d")],
)  # fmt: skip
def test_other_ranges_and_steps_are_refused_with_what_there_is(name: str, step: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        span_of(name, step, NOW_MS)
    assert refused.value.hint
