"""Counts of calls: however calls are divided over minutes and gateways, their counts add up to the same."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.history.call_counts import CallCounts, decode, encode, merged
from fleetstart.controller.observability.latency_sketch import BOUNDS_MS, STEP
from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId

CELL_MAX_BYTES = 2_000
"""A minute with calls in every bucket of both sketches, a hundred thousand in each."""

rows = st.builds(
    InvocationRow,
    id=st.just(InvocationId("i")),
    function=st.just(FunctionName("f")),
    version=st.just(Version(1)),
    worker=st.sampled_from([WorkerId(""), WorkerId("w")]),
    status=st.sampled_from([200, 204, 400, 404, 429, 499, 500, 502]),
    start=st.sampled_from(["hot", "warm", "cold"]),
    accepted_unix_ms=st.just(0),
    queue_ms=st.integers(0, 10**6),
    total_ms=st.integers(0, 10**8),
    billed_ms=st.just(0),
    memory_bytes=st.just(0),
    cost_nusd=st.integers(0, 10**9),
)
parts = st.lists(st.lists(rows, max_size=8), max_size=6)


def counted(of: list[InvocationRow]) -> CallCounts:
    counts = CallCounts()
    for row in of:
        counts.add(row)
    return counts


@given(parts)
def test_merged_parts_are_the_counts_of_all_their_calls(parts: list[list[InvocationRow]]) -> None:
    assert merged(map(counted, parts)) == counted([row for part in parts for row in part])


@pytest.mark.slow
@given(parts)
def test_the_order_of_merging_does_not_matter(parts: list[list[InvocationRow]]) -> None:
    assert merged(map(counted, parts)) == merged(map(counted, reversed(parts)))


@given(st.lists(rows, max_size=8))
def test_counts_are_read_as_they_were_written(of: list[InvocationRow]) -> None:
    assert decode(encode(counted(of))) == counted(of)


@given(st.lists(rows, min_size=1, max_size=20))
def test_a_point_says_what_its_calls_were(of: list[InvocationRow]) -> None:
    point = counted(of).point(60_000)
    waited = [row for row in of if row.worker and row.start != "hot"]
    assert (point.begin_unix_ms, point.calls, point.cost_nusd) == (60_000, len(of), sum(row.cost_nusd for row in of))
    assert point.failed == sum(row.status in (499, 500, 502) for row in of)
    assert point.refused == sum(row.status in (400, 404, 429) for row in of)
    assert point.warm + point.cold == len(waited)
    assert (point.wait_p50_ms is None) == (not waited)
    longest = max(row.total_ms for row in of)
    assert point.p50_ms is not None
    assert point.p95_ms is not None
    assert point.p50_ms <= point.p95_ms <= max(longest * STEP, 8)


def test_a_cell_is_bounded() -> None:
    sketch = dict.fromkeys(range(len(BOUNDS_MS)), 100_000)
    full = CallCounts(
        calls=10**9, failed=10**9, refused=10**9, warm=10**9, cold=10**9, cost_nusd=10**18, total_ms=sketch,
        wait_ms=sketch,
    )  # fmt: skip
    assert len(encode(full)) <= CELL_MAX_BYTES


@pytest.mark.parametrize("data", [b"", b"\x01", b"no", b"\x91\xa1x", b"\xc1", b"[1]"])
def test_what_is_no_cell_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)
