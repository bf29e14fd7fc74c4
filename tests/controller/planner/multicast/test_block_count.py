"""The number of blocks at the elbow, from measured costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.multicast import BlockCost, elbow, fit_cost, multicast_s

GB = 1_000_000_000


@given(st.floats(1e6, 1e11), st.floats(0, 0.1), st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True))
def test_the_cost_is_found_again_in_what_it_makes(rate: float, overhead_s: float, blocks: list[int]) -> None:
    measured = [(count, GB / rate + count * overhead_s) for count in blocks]
    found = fit_cost(GB, measured)
    assert found.overhead_s == pytest.approx(overhead_s, rel=1e-3, abs=1e-6 * GB / rate)
    assert found.bytes_per_s == pytest.approx(rate, rel=1e-2)


def test_one_number_of_blocks_says_nothing_about_a_block() -> None:
    with pytest.raises(ValueError, match="two numbers of blocks"):
        fit_cost(GB, [(4, 1.0), (4, 1.1)])


@given(
    st.floats(1e7, 1e10), st.floats(0, 0.05), st.integers(2, 64), st.integers(1, 400), st.integers(1, 20)
)  # fmt: skip
def test_the_elbow_is_near_the_least_time_with_the_fewest_blocks(
    rate: float, overhead_s: float, nodes: int, chunks: int, sizes: int
) -> None:
    size_bytes, cost = chunks * 4_000_000, BlockCost(rate, overhead_s)
    found = elbow(size_bytes, cost, nodes, chunks)
    assert 1 <= found <= min(chunks, 256)
    with_size = -(-chunks // sizes)
    if with_size <= 256:
        padded = multicast_s(size_bytes * with_size * sizes / chunks, cost, nodes, with_size)
        elbow_size = -(-chunks // found)
        reached = multicast_s(size_bytes * found * elbow_size / chunks, cost, nodes, found)
        assert reached <= padded * 1.04


def test_dearer_blocks_make_fewer_and_more_nodes_make_more() -> None:
    def count(overhead_s: float, nodes: int) -> int:
        return elbow(2 * GB, BlockCost(GB, overhead_s), nodes, 500)

    assert count(0.1, 8) < count(0.01, 8) < count(0.001, 8)
    assert count(0.01, 2) == 1, "one receiver gains nothing from blocks"
    assert count(0.01, 4) < count(0.01, 64)
