"""Sub-groups, Algorithm 1 (order of transmission) and Algorithm 2 (execution pipelines) of λScale."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.multicast.execution_pipelines import divided, execution_pipelines, pipeline_members
from fleetstart.controller.planner.multicast.groups import sub_groups, transmission_orders
from tests.controller.planner.multicast.fleets import RATE, nodes


@given(st.integers(1, 40), st.integers(1, 6), st.sets(st.integers(0, 39)))
def test_the_first_group_begins_with_what_comes_first_and_each_gets_all(
    blocks: int, groups: int, begin_with: set[int]
) -> None:
    begin_with = {block for block in begin_with if block < blocks}
    orders = transmission_orders(blocks, groups, begin_with)
    assert set(orders[0][: len(begin_with)]) == begin_with
    assert all(sorted(order) == list(range(blocks)) for order in orders)


def test_what_comes_first_is_one_groups_part_also_where_it_is_more_than_its_share() -> None:
    assert transmission_orders(6, 2, {0, 1, 4, 5}) == [(0, 1, 4, 5, 2, 3), (2, 3, 4, 0, 1, 5)]
    assert transmission_orders(5, 3, {0, 1, 2, 3, 4}) == [(0, 1, 2, 3, 4)] * 3


def test_groups_begin_with_different_parts_as_in_figure_5() -> None:
    assert transmission_orders(4, 2) == [(0, 1, 2, 3), (2, 3, 0, 1)]
    assert transmission_orders(5, 3) == [(0, 1, 2, 3, 4), (2, 3, 4, 0, 1), (4, 0, 1, 2, 3)]


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_order_has_every_block_once(blocks: int, groups: int) -> None:
    for order in transmission_orders(blocks, groups):
        assert sorted(order) == list(range(blocks))


@given(st.integers(1, 40), st.integers(1, 12))
def test_together_the_groups_hold_the_model_after_the_kth_part(blocks: int, groups: int) -> None:
    first = -(-blocks // groups)
    assert {block for order in transmission_orders(blocks, groups) for block in order[:first]} == set(range(blocks))


@given(st.integers(1, 6), st.integers(1, 30))
def test_receivers_are_spread_evenly_each_in_one_group(sources: int, receivers: int) -> None:
    members = nodes(sources + receivers, sources)
    groups = sub_groups(members, range(sources), range(sources, sources + receivers), 8)
    sizes = [len(group.receivers) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == min(sources, receivers)
    assert sorted(node for group in groups for node in group.receivers) == [*range(sources, sources + receivers)]


def test_receivers_go_to_the_source_on_their_leaf_and_chains_cross_once_to_each() -> None:
    leaves = ["a", "b", "b", "a", "b", "c", "a", "c"]
    members = [replace(node, leaf=leaf) for node, leaf in zip(nodes(8, 2), leaves, strict=True)]
    here, there = sub_groups(members, [0, 1], range(2, 8), 8)
    assert set(here.receivers[:2]) == {3, 6}
    assert set(there.receivers[:2]) == {2, 4}
    alone = sub_groups(members, [0], range(1, 8), 8)[0]
    assert [leaves[node] for node in alone.nodes] == ["a", "a", "a", "b", "b", "b", "c", "c"]


def test_links_fall_in_speed_along_a_group_and_slow_sources_are_left_out() -> None:
    members = [
        replace(node, up_bytes_per_s=RATE * speed) for node, speed in zip(nodes(6, 2), [1, 2, 3, 1, 4, 2], strict=True)
    ]
    assert sub_groups(members, [0, 1], [4], 2)[0].source == 1
    receivers = sub_groups(members, [1], range(2, 6), 2)[0].receivers
    speeds = [min(members[node].up_bytes_per_s, members[node].down_bytes_per_s) for node in receivers]
    assert speeds == sorted(speeds, reverse=True)


def test_pipelines_take_one_node_of_each_group_as_in_figure_5() -> None:
    assert pipeline_members([(3, 4, 5), (6, 7, 8)]) == [(3, 6), (4, 7), (5, 8)]
    assert pipeline_members([(1, 2, 3)]) == [(1, 2, 3)]
    assert pipeline_members([(1,), (2, 3), (4, 5, 6, 7)]) == [(1, 2, 4), (3, 5), (6, 7)]


@given(st.lists(st.integers(0, 9), max_size=6))
def test_pipelines_cover_each_node_once(sizes: list[int]) -> None:
    groups, first = [], 0
    for size in sizes:
        groups.append(range(first, first + size))
        first += size
    assert sorted(node for members in pipeline_members(groups) for node in members) == list(range(first))


@given(st.data(), st.integers(1, 5), st.integers(1, 10))
def test_stages_cover_the_model_with_blocks_that_have_arrived(data: st.DataObject, members: int, blocks: int) -> None:
    times = st.floats(0, 100)
    arrivals = [{block: data.draw(times) for block in range(blocks)} for _ in range(members)]
    found = divided(range(members), arrivals, blocks)
    assert found.nodes == set(range(members))
    serving = [stage for stage in found.stages if stage.end > stage.first]
    assert [stage.first for stage in serving] == [0, *(stage.end for stage in serving[:-1])]
    assert serving[-1].end == blocks
    used = [arrivals[stage.node][block] for stage in serving for block in range(stage.first, stage.end)]
    assert max(used) == pytest.approx(found.ready_s)
    least_s = max(min(arrived[block] for arrived in arrivals) for block in range(blocks))
    assert least_s <= found.ready_s <= min(max(arrived.values()) for arrived in arrivals)


def test_two_groups_serve_after_half_of_the_time() -> None:
    """2 → 8 in four blocks (figure 5): each group's first half is the other's second."""
    halves = [{0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, {2: 1.0, 3: 2.0, 0: 3.0, 1: 4.0}]
    (pipeline,) = execution_pipelines([[0], [1]], halves, 4)
    assert pipeline.ready_s == 2.0
    assert [(stage.node, stage.first, stage.end) for stage in pipeline.stages] == [(0, 0, 2), (1, 2, 4)]


def test_a_pipeline_that_lacks_a_block_is_never_ready() -> None:
    assert divided([0, 1], [{0: 1.0}, {0: 2.0}], 2).ready_s == float("inf")


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_no_division_is_ready_sooner(data: st.DataObject, members: int, blocks: int) -> None:
    arrivals = [{block: float(data.draw(st.integers(0, 9))) for block in range(blocks)} for _ in range(members)]
    cuts = [
        (0, *inner, blocks)
        for size in range(members)
        for inner in combinations(range(1, blocks), min(size, blocks - 1))
    ]
    soonest = min(
        max(
            arrivals[node][block]
            for node, first, end in zip(order, cut, cut[1:], strict=False)
            for block in range(first, end)
        )
        for cut in cuts
        for order in permutations(range(members))
        if len(cut) - 1 <= members
    )
    assert divided(range(members), arrivals, blocks).ready_s == soonest
