"""Scaling out by multicast, on real hosts: new nodes know the rate of their link, read from others, serve as a pipeline
before they are whole, and answer as one worker alone does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.e2e.pipelines.fleet import HOSTS, LAYERS, LINK_SHARE, LONG, SETTLED_S, Fleet, Function, function_name
from tests.servers import wait_until

pytestmark = [
    pytest.mark.bed,
    pytest.mark.isolations("namespaces", why="pipelines over several nodes are of functions in namespaces"),
]

COPIES = 2
ONE_A_NODE = "2200MiB"
"""Memory of a worker, of which a node has room for one."""


@pytest.fixture
def function(shared_fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Function]:
    """A function with a whole worker on each of two hosts; two others have nothing of it."""
    shared_fleet.run_hosts(COPIES)
    settings = f"scale=Scale(min={COPIES}, max={HOSTS}, keep_alive_s=600)"
    function = shared_fleet.deploy(function_name(request), settings, memory=ONE_A_NODE)
    wait_whole(shared_fleet, function, COPIES)
    shared_fleet.run_hosts(HOSTS)
    with shared_fleet.bed.redis() as client:
        wait_until(lambda: client.hlen(keys.PEER_KEYS) >= HOSTS, SETTLED_S, what="peer keys")
    for host in range(HOSTS):
        check_link_is_known(shared_fleet, host)
    wait_until(
        lambda: all(has_a_copy(shared_fleet, host) for host in range(COPIES)), SETTLED_S, what="reports of copies"
    )
    yield function
    shared_fleet.remove_left()


def check_link_is_known(fleet: Fleet, host: int) -> None:
    """Checks that a node which came up has measured its link: its first start would be predicted with a gigabit."""

    def measured() -> float:
        report = fleet.bed.report(host)
        return report.measured.get("store", 0.0) if report is not None else 0.0

    link = fleet.bed.mbit * 1e6 / 8 * LINK_SHARE
    found = wait_until(measured, SETTLED_S, what="a measurement of the link")
    assert link / 2 < found < link * 2, f"{found:,.0f} of {link:,.0f} bytes a second"


def has_a_copy(fleet: Fleet, host: int) -> bool:
    """True once the node has reported a whole segment, which its worker may be ready before."""
    report = fleet.bed.report(host)
    return report is not None and any(one.state == "ready" for one in report.segments)


def wait_whole(fleet: Fleet, function: Function, count: int) -> None:
    def whole() -> bool:
        workers = fleet.bed.workers(function.name)
        return [(one.state, one.whole) for one in workers] == [("ready", True)] * count

    wait_until(whole, 2 * SETTLED_S, what=f"{count} whole workers")


def ordered(fleet: Fleet, function: Function, count: int) -> list[WorkerOrder]:
    def there() -> list[WorkerOrder] | None:
        orders = fleet.orders(function)
        return orders if len(orders) == count else None

    return wait_until(there, SETTLED_S, what=f"{count} orders") or []


def test_nodes_fed_by_two_copies_are_a_pipeline_until_they_are_whole_and_no_token_changes(
    shared_fleet: Fleet, function: Function
) -> None:
    fleet = shared_fleet
    before = {order.worker for order in fleet.orders(function)}
    fleet.bed.fs("scale", function.name, "--min", str(HOSTS))
    new = [order for order in ordered(fleet, function, HOSTS) if order.worker not in before]
    calls = [fleet.call(function, LONG, deadline_s=60) for _ in range(3 * HOSTS)]  # two copies take eight

    plan = fleet.plan(new[0])
    assert plan.pipelines == [[0, 1]] or plan.pipelines == [[1, 0]], plan
    assert plan.serve_s[0] < plan.serve_s[1]
    (cuts,) = {order.stage.cuts for order in new if order.stage is not None}
    assert (cuts[0][0], cuts[-1][1]) == (0, LAYERS)
    assert all(order.grow and order.pulls for order in new)

    for call in calls:
        assert call.join().text == function.answer(LONG), call
    wait_whole(fleet, function, HOSTS)
    for order in new:
        status = fleet.status_of(order)
        assert status is not None
        assert status.fetched.get("store", 0) == 0, f"{status.fetched}: all came from peers"
    assert fleet.call(function, LONG).join().text == function.answer(LONG)
