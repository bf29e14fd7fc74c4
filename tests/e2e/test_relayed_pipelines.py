"""Pipelines whose nodes reach store, Redis and controller, and not each other (HydraServe section 8.5).

What the stages say goes through the object store: the right tokens come, the pipeline becomes one worker, stages that
are lost are noticed, and nothing of what was said stays in the bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.pipelines import SETTLED_S, Fleet, Function
from tests.servers import wait_until
from tests.testbed import Testbed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.bed,
    pytest.mark.timeout(120),
]

NODES = 4
MBIT = 40
SHORT, LONG = 40, 400
SHAPE: dict[str, Any] = {"num_hidden_layers": 8}
"""Two layers a stage."""


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    failed_before = request.session.testsfailed
    with Testbed(nodes=NODES, mbit=MBIT, env={"FS_PROFILES": "torch"}) as bed:
        fleet = Fleet(bed, tmp_path_factory.mktemp("functions"))
        fleet.seed()
        bed.part()
        yield fleet
        if request.session.testsfailed > failed_before:
            print(bed.log_tails())


@pytest.fixture
def function(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Function]:
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").strip("]")
    function = fleet.deploy(name[-50:].strip("-"), **SHAPE)
    yield function
    fleet.remove(function)


def check_after(fleet: Fleet, function: Function) -> None:
    """One whole worker is left, which answers at once; and nothing in the bucket of what stages said."""
    fleet.settled(function)
    call = fleet.call(function, SHORT).join()
    assert (call.text, call.start, call.error) == (function.answer(SHORT), "hot", {})
    said = fleet.bed.bucket / "relay"
    left = wait_until(
        lambda: "nothing" if not any(names for _, _, names in os.walk(said)) else "", SETTLED_S, what="an empty bucket"
    )
    assert left == "nothing"


def test_a_pipeline_of_four_serves_through_the_store_and_becomes_one_worker(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(1)
    for order in orders:
        assert order.stage is not None
        others = tuple(index for index in range(NODES) if index != order.stage.index)
        status = fleet.status_of(order)
        assert status is not None
        assert status.relayed == others
        assert not status.whole
    assert [order.relayed for order in fleet.orders(function)] == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]
    assert call.join().text == function.answer(LONG), call
    assert fleet.settled(function).worker == orders[0].worker
    assert "reached through the object store" in fleet.node_of(orders[0]).log()
    assert "stage 1 cannot be reached directly" in fleet.bed.fs("logs", function.name).out
    assert "stages 1, 2, 3 reached through the object store" in fleet.bed.fs("trace", function.name).out
    assert "could not connect to stages 1, 2, 3" in fleet.bed.fs("explain", function.name).out
    check_after(fleet, function)


@pytest.mark.parametrize("victim", [1, 3])
def test_a_later_stage_is_killed_in_mid_stream(fleet: Fleet, function: Function, victim: int) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(3)
    fleet.kill(orders[victim])
    assert call.join().text == function.answer(LONG), call
    assert fleet.settled(function).worker == orders[0].worker
    check_after(fleet, function)


def test_the_first_stage_is_killed_in_mid_stream_and_the_stream_goes_on_elsewhere(
    fleet: Fleet, function: Function
) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(3)
    fleet.kill(orders[0])
    assert call.join().text == function.answer(LONG), call
    check_after(fleet, function)


def test_one_node_that_is_apart_is_reached_through_the_store_and_the_others_directly(
    fleet: Fleet, function: Function
) -> None:
    fleet.bed.join()
    for other in (1, 2, 3):
        fleet.bed.cut_between(0, other)
    try:
        call = fleet.call(function, LONG)
        orders = fleet.pipeline(function)
        call.wait_for(1)
        (apart,) = (order.stage.index for order in orders if order.node == "node-0" and order.stage is not None)
        for order in orders:
            status = fleet.status_of(order)
            assert status is not None
            assert order.stage is not None
            others = tuple(index for index in range(NODES) if index != apart)
            assert status.relayed == (others if order.stage.index == apart else (apart,))
        assert call.join().text == function.answer(LONG), call
        check_after(fleet, function)
    finally:
        fleet.bed.part()


def test_the_node_of_a_later_stage_is_killed_in_mid_stream(fleet: Fleet) -> None:
    """The last of the tests."""
    function = fleet.deploy("no-later-node", **SHAPE)
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(3)
    lost = fleet.node_of(orders[2])
    lost.kill()
    assert call.join().text == function.answer(LONG), call
    wait_until(lambda: not lost.processes(), SETTLED_S, what=f"end of {lost.name}'s processes")
    check_after(fleet, function)
    fleet.remove(function)
