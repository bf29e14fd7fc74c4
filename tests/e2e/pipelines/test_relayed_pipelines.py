"""Pipelines whose nodes reach store, Redis and controller, and not each other (HydraServe section 8.5).

What the stages say goes through the object store: the right tokens come, the pipeline becomes one worker, stages that
are lost are noticed, and nothing of what was said stays in the bucket.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.e2e.pipelines.fleet import HOSTS, SETTLED_S, Fleet, Function, function_name
from tests.servers import wait_until

pytestmark = [
    pytest.mark.bed,
    pytest.mark.isolations("namespaces", why="pipelines over several nodes are of functions in namespaces"),
]

SHAPE: dict[str, Any] = {"num_hidden_layers": 8}
"""Two layers a stage."""
LONG = 200
"""Tokens that go on until a pipeline is one worker: through the store it gives a few dozen a second."""


@pytest.fixture(scope="module")
def parted_fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    shared_fleet.bed.part()
    yield shared_fleet
    shared_fleet.bed.join()


@pytest.fixture
def fleet(parted_fleet: Fleet) -> Fleet:
    """Four hosts, none of which reaches another one."""
    parted_fleet.run_hosts(HOSTS)
    return parted_fleet


@pytest.fixture
def function(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Function]:
    function = fleet.deploy(function_name(request), **SHAPE)
    yield function
    fleet.remove(function)


def check_after(fleet: Fleet, function: Function) -> None:
    """One whole worker is left, which answers at once; and nothing in the bucket of what stages said."""
    fleet.check_after(function)
    said = fleet.bed.bucket / "relay"

    def left() -> list[str]:
        return [os.path.join(folder, name) for folder, _, names in os.walk(said) for name in names]

    # Late writes of a busy store and requests without an answer are repeated for some seconds.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), 2 * SETTLED_S)
    assert left() == []


def shows(shown: Callable[[], str], text: str) -> bool:
    return text in shown()


def relays(fleet: Fleet, order: WorkerOrder, others: tuple[int, ...]) -> bool:
    """Checks whether the stage has reported that it reaches these through the store."""
    status = fleet.status_of(order)
    return status is not None and status.relayed == others


def said(fleet: Fleet, verb: str, function: Function) -> str:
    return fleet.bed.fs(verb, function.name).out


def test_a_pipeline_of_four_serves_through_the_store_and_becomes_one_worker(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(1)
    for order in orders:
        assert order.stage is not None
        others = tuple(index for index in range(HOSTS) if index != order.stage.index)
        wait_until(partial(relays, fleet, order, others), what=f"stage {order.stage.index} to relay to {others}")
    assert [order.relayed for order in fleet.orders(function)] == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]
    assert call.join().text == function.answer(LONG), call
    assert fleet.settled(function).worker == orders[0].worker
    for shown, text in (
        (fleet.node_of(orders[0]).log, "reached through the object store"),
        (partial(said, fleet, "logs", function), "stage 1 cannot be reached directly"),
        (partial(said, fleet, "trace", function), "stages 1, 2, 3 reached through the object store"),
        (partial(said, fleet, "explain", function), "could not connect to stages 1, 2, 3"),
        (partial(said, fleet, "explain", function), "when it became one worker"),
    ):
        wait_until(partial(shows, shown, text), what=text)
    check_after(fleet, function)


def test_the_last_stage_is_killed_in_mid_stream(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(3)
    fleet.kill(orders[-1])
    assert call.join().text == function.answer(LONG), call
    assert fleet.settled(function).worker == orders[0].worker
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
            assert order.stage is not None
            others = tuple(index for index in range(HOSTS) if index != apart)
            wanted = others if order.stage.index == apart else (apart,)
            wait_until(partial(relays, fleet, order, wanted), what=f"stage {order.stage.index} to relay to {wanted}")
        assert call.join().text == function.answer(LONG), call
        check_after(fleet, function)
    finally:
        fleet.bed.part()


def test_the_node_of_a_later_stage_is_killed_in_mid_stream(fleet: Fleet) -> None:
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
