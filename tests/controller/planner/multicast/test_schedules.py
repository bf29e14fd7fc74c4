"""What holds of every schedule: each node gets each block exactly once, nobody sends what it has not, one send and one
receive a node and step; and how many steps each topology takes."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.multicast.binomial import binomial_pipeline
from fleetstart.controller.planner.multicast.groups import sub_groups
from fleetstart.controller.planner.multicast.rarest_first import MissingBlocks, rarest_first
from fleetstart.controller.planner.multicast.schedule import Schedule, Transfer, broken_law, steps
from fleetstart.controller.planner.multicast.topologies import (
    binary_tree,
    chain,
    from_store,
    read_once,
    sequential,
    striped_chains,
)
from tests.controller.planner.multicast.fleets import held_masks, nodes

counts = st.integers(2, 40)
block_counts = st.integers(1, 24)


def least_steps(count: int, blocks: int) -> int:
    """No schedule takes fewer from one source: the last block leaves it in step b, and is doubled in each step."""
    return blocks + math.ceil(math.log2(count)) - 1


def assert_laws(schedule: Schedule, count: int, blocks: int, sources: int = 1) -> None:
    held = [(1 << blocks) - 1] * sources + [0] * (count - sources)
    assert broken_law(schedule, held, range(count), blocks) == ""


@given(counts, block_counts, st.randoms())
def test_a_binomial_pipeline_takes_the_fewest_steps_for_any_number_of_nodes(
    count: int, blocks: int, random: Random
) -> None:
    order = list(range(blocks))
    random.shuffle(order)
    schedule = binomial_pipeline(range(count), order)
    assert_laws(schedule, count, blocks)
    assert steps(schedule) == least_steps(count, blocks)


@pytest.mark.parametrize("count", [2, 3, 63, 64, 65, 1000, 1001])
def test_it_does_so_for_a_thousand_nodes(count: int) -> None:
    schedule = binomial_pipeline(range(count), range(16))
    assert_laws(schedule, count, 16)
    assert steps(schedule) == least_steps(count, 16)


@given(counts, block_counts)
def test_a_source_that_sends_each_block_once_takes_a_step_more_at_most(count: int, blocks: int) -> None:
    schedule = read_once(range(count), range(blocks))
    assert_laws(schedule, count, blocks)
    assert sorted(transfer.block for transfer in schedule if transfer.sender == 0) == list(range(blocks))
    assert steps(schedule) <= least_steps(count, blocks) + 1


@given(counts, block_counts, st.integers(1, 6))
def test_several_sources_share_the_receivers(count: int, blocks: int, sources: int) -> None:
    sources = min(sources, count - 1)
    groups = sub_groups(nodes(count, sources), range(sources), range(sources, count), blocks)
    schedule = [transfer for group in groups for transfer in binomial_pipeline(group.nodes, group.order)]
    assert_laws(schedule, count, blocks, sources)
    largest = 1 + math.ceil((count - sources) / sources)
    assert steps(schedule) == least_steps(largest, blocks)


@given(counts, block_counts)
def test_a_chain_takes_a_step_more_for_each_receiver(count: int, blocks: int) -> None:
    schedule = chain(range(count), range(blocks))
    assert_laws(schedule, count, blocks)
    assert steps(schedule) == blocks + count - 2


@given(st.integers(1, 5), st.integers(1, 20), block_counts)
def test_striped_chains_bring_each_part_to_all_and_each_chain_keeps_the_laws(
    sources: int, receivers: int, blocks: int
) -> None:
    count, everything = sources + receivers, (1 << blocks) - 1
    schedule = striped_chains(range(sources), range(sources, count), range(blocks))
    assert len(schedule) == receivers * blocks
    chains = max(sources, receivers)
    size, seen = -(-blocks // chains), 0
    for number in range(chains):
        part = [one for one in schedule if size * number <= one.block < size * (number + 1)]
        mask = sum(1 << block for block in range(size * number, min(blocks, size * (number + 1))))
        held = [everything if node == number % sources else everything & ~mask for node in range(count)]
        others = [node for node in range(count) if node >= sources or node == number % sources]
        assert broken_law(part, held, others, blocks) == ""
        seen += len(part)
    assert seen == len(schedule)
    assert steps(schedule) <= size + receivers - 1


@given(counts, block_counts)
def test_a_binary_tree_sends_each_block_twice_from_a_node_and_one_after_another_to_all(count: int, blocks: int) -> None:
    tree = binary_tree(range(count), range(blocks))
    assert_laws(tree, count, blocks)
    assert steps(tree) >= (2 * blocks if count > 2 else blocks)
    turns = sequential(range(count), range(blocks))
    assert_laws(turns, count, blocks)
    assert steps(turns) == blocks * (count - 1)
    assert broken_law(from_store(range(count), blocks), [0] * count, range(count), blocks) == ""


@given(st.data(), st.integers(2, 12), st.integers(1, 12))
def test_rarest_first_completes_from_any_ownership(data: st.DataObject, count: int, blocks: int) -> None:
    held = data.draw(held_masks(count, blocks))
    schedule = rarest_first(held, range(count), range(count), blocks)
    assert broken_law(schedule, held, range(count), blocks) == ""


@given(st.data(), st.integers(1, 10), st.integers(1, 12), st.integers(1, 4))
def test_what_nobody_has_is_read_from_the_store_once(
    data: st.DataObject, count: int, blocks: int, readers: int
) -> None:
    held = data.draw(st.lists(st.integers(0, (1 << blocks) - 1), min_size=count, max_size=count))
    schedule = rarest_first(held, range(count), range(count), blocks, store_readers=readers)
    assert broken_law(schedule, held, range(count), blocks) == ""
    read = [transfer.block for transfer in schedule if transfer.sender < 0]
    lost = [block for block in range(blocks) if not any(mask >> block & 1 for mask in held)]
    assert sorted(read) == lost


@given(st.data(), st.integers(2, 8), st.integers(1, 8))
def test_nobody_reads_from_a_node_that_may_not_send(data: st.DataObject, count: int, blocks: int) -> None:
    """It receives all the same, from the store if need be."""
    held = data.draw(st.lists(st.integers(0, (1 << blocks) - 1), min_size=count, max_size=count))
    schedule = rarest_first(held, range(count), range(1, count), blocks, store_readers=1)
    assert broken_law(schedule, held, range(count), blocks) == ""
    assert all(transfer.sender != 0 for transfer in schedule)


def test_rarest_first_names_the_blocks_that_are_nowhere() -> None:
    with pytest.raises(MissingBlocks) as raised:
        rarest_first([0b01, 0b00], [0, 1], [0, 1], 2)
    assert raised.value.args == (0b10,)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ([Transfer(0, 1, 2, 0)], "sends block 0, which it does not have"),
        ([Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0)], "sends twice"),
        ([Transfer(0, 0, 1, 0), Transfer(0, -1, 1, 1)], "receives twice"),
        ([Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 0)], "sends block 0, which it does not have"),
        ([Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 0)], "has block 0 already"),
        ([Transfer(0, 0, 1, 0)], "lacks blocks"),
    ],
)
def test_a_broken_law_is_named(schedule: Schedule, said: str) -> None:
    assert said in broken_law(schedule, [0b11, 0, 0], [1, 2], 2)
