"""Predicted arrivals, by hand and against the steps of schedules."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.multicast.binomial import binomial_pipeline
from fleetstart.controller.planner.multicast.prediction import Links, predict_arrivals
from fleetstart.controller.planner.multicast.schedule import STORE, Schedule, Transfer
from fleetstart.controller.planner.multicast.topologies import chain, from_store


def equal_links(count: int, rate: float = 1.0, overhead_s: float = 0.0) -> Links:
    return Links(up=[rate] * count, down=[rate] * count, overhead_s=overhead_s)


def last_s(schedule: Schedule, count: int, blocks: int, links: Links) -> float:
    arrivals = predict_arrivals(schedule, [(1 << blocks) - 1] + [0] * (count - 1), [1.0] * blocks, links)
    assert all(len(arrived) == blocks for arrived in arrivals[1:])
    return max(max(arrived.values()) for arrived in arrivals[1:])


@given(st.integers(2, 33), st.integers(1, 16))
def test_with_equal_links_a_binomial_pipeline_takes_its_steps_without_barriers(count: int, blocks: int) -> None:
    """Pulls that wait for their holders keep the pace that the steps have: nobody has to wait for all."""
    schedule = binomial_pipeline(range(count), range(blocks))
    expected = blocks + math.ceil(math.log2(count)) - 1
    assert last_s(schedule, count, blocks, equal_links(count)) == pytest.approx(expected)
    assert last_s(schedule, count, blocks, equal_links(count, overhead_s=0.5)) == pytest.approx(1.5 * expected)


def test_a_thousand_nodes_are_predicted_within_seconds() -> None:
    schedule = binomial_pipeline(range(1000), range(16))
    began_s = time.process_time()
    assert last_s(schedule, 1000, 16, equal_links(1000)) == pytest.approx(25)
    assert time.process_time() - began_s < 10


def test_a_transfer_goes_at_the_slower_end() -> None:
    links = Links(up=[2.0, 4.0, 1.0], down=[1.0, 1.0, 0.5])
    arrivals = predict_arrivals(chain([0, 1, 2], [0, 1]), [0b11, 0, 0], [1.0, 3.0], links)
    assert arrivals[1] == {0: 1.0, 1: 4.0}
    assert arrivals[2] == {0: 3.0, 1: 10.0}, "its first block takes 2 s from 1.0 s on; the second 6 s, from 4.0 s on"


def test_a_slow_node_at_the_end_of_a_chain_delays_nobody() -> None:
    quick = predict_arrivals(chain([0, 1, 2], [0, 1, 2]), [7, 0, 0], [1.0] * 3, Links(up=[1] * 3, down=[1, 1, 0.1]))
    slow = predict_arrivals(chain([0, 2, 1], [0, 1, 2]), [7, 0, 0], [1.0] * 3, Links(up=[1] * 3, down=[1, 1, 0.1]))
    assert max(quick[1].values()) == 3
    assert max(slow[1].values()) > 30
    assert max(quick[2].values()) == pytest.approx(31)


def test_who_asked_first_is_served_first_and_who_must_wait_holds_up_nobody() -> None:
    schedule = [Transfer(0, 0, 1, 1), Transfer(1, 0, 2, 0), Transfer(1, 0, 1, 0), Transfer(2, 2, 0, 2)]
    arrivals = predict_arrivals(schedule, [0b011, 0, 0b100], [1.0] * 3, equal_links(3))
    assert arrivals[1] == {1: 1.0, 0: 3.0}
    assert arrivals[2] == {0: 2.0}
    assert arrivals[0] == {2: 1.0}, "sending and receiving do not disturb each other"


def test_readers_of_the_store_share_it() -> None:
    links = Links(up=[1.0] * 3, down=[1.0] * 3, store=1.5)
    arrivals = predict_arrivals(from_store([0, 1, 2], 2), [0, 0, 0], [1.0, 1.0], links)
    assert [max(arrived.values()) for arrived in arrivals] == pytest.approx([4.0] * 3)
    alone = predict_arrivals([Transfer(0, STORE, 0, 0)], [0, 0, 0], [1.0], links)
    assert alone[0] == {0: 1.0}, "one is limited by its own link"


def test_holders_that_send_at_once_share_their_links_among_all_who_ask() -> None:
    both = [Transfer(0, 0, 1, 0), Transfer(1, 0, 2, 0)]
    links = Links(up=[1.0] * 3, down=[1.0] * 3, at_once=True)
    arrivals = predict_arrivals(both, [1, 0, 0], [1.0], links)
    assert arrivals[1] == arrivals[2] == {0: 2.0}
    ahead = Links(up=[1.0] * 3, down=[1.0] * 3, at_once=True, ahead=1)
    arrivals = predict_arrivals([Transfer(0, 0, 2, 0), Transfer(1, 1, 2, 1)], [1, 2, 0], [1.0, 3.0], ahead)
    assert arrivals[2] == {0: 2.0, 1: 4.0}, "a receiver shares its own link among what it asked for"
    chained = predict_arrivals(chain([0, 1, 2], range(4)), [15, 0, 0], [1.0] * 4, ahead)
    assert max(chained[2].values()) == 5, "a chain has one reader everywhere, and keeps its pace"


def test_leaf_switches_are_shared_by_what_crosses_them() -> None:
    schedule = [Transfer(0, 0, 2, 0), Transfer(0, 1, 3, 0), Transfer(1, 0, 1, 1)]
    links = Links(up=[1.0] * 4, down=[1.0] * 4, leaf=["a", "a", "b", "b"], leaf_rates={"a": 1.0})
    arrivals = predict_arrivals(schedule, [0b11, 0b01, 0, 0], [1.0, 1.0], links)
    assert arrivals[2][0] == arrivals[3][0] == pytest.approx(2.0), "two cross, each at half the rate of the switch"
    assert arrivals[1][1] == pytest.approx(3.0), "inside the leaf at full speed, once the holder is free"


def test_a_pull_whose_block_never_comes_does_not_arrive() -> None:
    assert (
        predict_arrivals([Transfer(0, 0, 1, 0), Transfer(1, 0, 1, 1)], [0b10, 0], [1.0, 1.0], equal_links(2))[1] == {}
    )
