"""Clocks that step: the order of statuses, and the deadlines of workers, do not depend on the time of day."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.worker_pool import START_SLACK_MS
from fleetstart.controller.state.view import View
from fleetstart.prefetcher.control.status_publisher import StatusPublisher
from fleetstart.runtime.contract.function.spec import Scale
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from tests.controller.scheduler.cluster import Cluster

W = WorkerId("w")
NEWS: list[WorkerState] = ["starting", "ready", "draining", "gone"]


def status(state: WorkerState, unix_ns: int, number: int) -> WorkerStatus:
    return WorkerStatus(
        worker=W, node=NodeId("n"), function=FunctionName("f"), version=Version(1), state=state,
        changed_unix_ns=unix_ns, number=number,
    )  # fmt: skip


@given(st.permutations(range(4)), st.lists(st.integers(1, 10**15), min_size=4, max_size=4))
def test_the_last_status_of_a_worker_wins_in_whatever_order_and_whatever_its_clock_said(
    order: list[int], clocks: list[int]
) -> None:
    view = View()
    for index in order:
        view.put_status(status(NEWS[index], clocks[index], index + 1))
    assert view.statuses[W].state == "gone"


def test_a_dead_worker_is_not_ready_after_its_node_s_clock_went_back() -> None:
    view = View()
    view.put_status(status("ready", 10**18, 2))
    view.touched.clear()
    view.put_status(status("draining", 5, 3))
    assert view.statuses[W].state == "draining"
    view.put_status(status("failed", 4, 4))
    assert view.statuses[W].state == "failed"


def test_a_full_read_is_believed_whatever_its_time_unless_news_came_meanwhile() -> None:
    view = View()
    view.put_status(status("starting", 10**18, 0))  # of an earlier release: without numbers
    view.touched.clear()
    view.put_status(status("ready", 5, 0), touch=False)
    assert view.statuses[W].state == "ready"
    view.put_status(status("draining", 10**18, 0))  # published while the next full read was under way
    view.put_status(status("ready", 5, 0), touch=False)
    assert view.statuses[W].state == "draining"


def test_a_node_numbers_its_statuses() -> None:
    class Outbox:
        def __init__(self) -> None:
            self.put_ones: list[WorkerStatus] = []

        def put(self, worker: WorkerId, one: WorkerStatus) -> None:
            self.put_ones.append(one)

    outbox = Outbox()
    publisher = StatusPublisher(outbox)  # type: ignore[arg-type]
    for unix_ns in (10, 5, 7):
        publisher.publish(status("starting", unix_ns, 0))
    assert [one.number for one in outbox.put_ones] == [1, 2, 3]


def test_a_scheduler_s_clock_that_jumps_ahead_fails_no_start() -> None:
    cluster = Cluster()
    cluster.deploy(start_timeout_s=100.0)
    cluster.load(1)
    assert len(cluster.step().orders) == 1
    cluster.clock.step(3600)
    step = cluster.step()
    assert not step.failures
    assert not step.orders
    cluster.clock.advance(100 + START_SLACK_MS / 1000 + 0.001)
    step = cluster.step()
    assert [failure is not None for _, failure in step.failures] == [True]
    assert [order.wanted for order in step.orders] == ["drain"]


def test_a_scheduler_s_clock_that_jumps_back_ends_starts_in_time_and_orders_stay_in_order() -> None:
    cluster = Cluster()
    cluster.deploy(start_timeout_s=100.0, scale=Scale(max=2))
    cluster.load(1)
    [order] = cluster.step().orders
    cluster.clock.step(-3600)
    cluster.clock.advance(106)
    [drained] = cluster.step().orders
    assert drained.wanted == "drain"
    assert drained.ordered_unix_ns > order.ordered_unix_ns, "or other controllers would not take it for news"
    cluster.clock.advance(3700)
    assert msgspec.structs.replace(drained, wanted="run", ordered_unix_ns=order.ordered_unix_ns) == order
