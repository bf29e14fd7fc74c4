"""A node's state as it follows from its report and its orders, and that a new scheduler sees what the old one saw."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.controller.planner.checkpoint_layout import EVERY_LAYER, CheckpointLayout, layer_set
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.estimates import NodeMeasures
from fleetstart.controller.planner.links.contention import NEVER
from fleetstart.controller.planner.node_state import HeldLayers, NodeState, node_state
from fleetstart.controller.planner.order_state import OrderState
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.weights.stage import LayerLayout, Stage
from tests.controller.planner.worlds import CHAT, MB, request, taken
from tests.controller.scheduler.test_autoscaler import spec

SECOND = 1_000_000_000
LAYOUT = LayerLayout(0, [50 * MB] * 8, [(layer * 10, layer * 10 + 10) for layer in range(8)], [])
SHAPE = CheckpointLayout(LAYOUT)
CHATTING = spec(
    name=FunctionName("chat"), weights=CHAT, llm=LLMSettings(), memory_bytes=100 * MB, slo=SLO(ttft_s=6)
)  # fmt: skip


def report(**fields: Any) -> NodeReport:
    values: dict[str, Any] = {
        "node": NodeId("n"), "epoch": "e", "address": "", "memory_bytes": 1000 * MB, "memory_used_bytes": 0, "cpus": 2,
        "bytes_per_s": {"store": 100.0 * MB, "disk": 1000.0 * MB}, **fields,
    }  # fmt: skip
    return NodeReport(**values)


def order(
    name: str = "w", *, stage: Stage | None = None, fetch_by_s: float = 5.9, decided_s: float = 0.0, **fields: Any
) -> WorkerOrder:
    return WorkerOrder(
        worker=WorkerId(name), node=NodeId("n"), epoch="e", version=Version(1), stage=stage,
        spec=msgspec.structs.replace(CHATTING, **fields), ordered_unix_ns=0,
        fetch_by_unix_ns=round(fetch_by_s * SECOND), decided_unix_ns=round(decided_s * SECOND),
    )  # fmt: skip


def status(name: str, state: WorkerState) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId(name), node=NodeId("n"), function=FunctionName("chat"), version=Version(1), state=state
    )


def state_of(
    orders: list[WorkerOrder],
    states: dict[str, WorkerState],
    *,
    now_s: float = 0.0,
    known: NodeReport | None = None,
    copies: tuple[CheckpointId, ...] = (),
) -> NodeState:
    statuses = {name: status(name, state) for name, state in states.items()}
    seen = [OrderState(order=order, status=statuses.get(order.worker), layout=SHAPE) for order in orders]
    return node_state(
        known or report(), seen, NodeMeasures(),
        layouts={CHAT: SHAPE}, now_s=1000 + now_s, now_unix_ns=round(now_s * SECOND), copies=copies,
    )  # fmt: skip


def segment(
    state: Any, ready_bytes: int, ranges: list[tuple[int, int]] | None = None, counted_s: float = 0.0
) -> SegmentReport:
    return SegmentReport(CHAT, state, 400 * MB, ready_bytes, ranges or [], round(counted_s * SECOND))


def stage(index: int, count: int = 4) -> Stage:
    cuts = tuple((part * 8 // count, (part + 1) * 8 // count) for part in range(count))
    return Stage(pipeline=PipelineId("p"), index=index, cuts=cuts)


def test_an_idle_node_has_its_memory_and_the_speeds_that_it_tells() -> None:
    state = state_of([], {})
    assert (state.free_bytes, state.workers, state.link.fetches) == (1000 * MB, 0, ())
    assert (state.link.bytes_per_s, state.disk_bytes_per_s) == (100 * MB, 1000 * MB)


def test_what_was_measured_wins_over_what_was_told_last() -> None:
    known = NodeMeasures(store_bytes_per_s=MovingAverage(7.0 * MB, 3))
    state = node_state(report(), [], known, layouts={}, now_s=0, now_unix_ns=0)
    assert state.link.bytes_per_s == 7 * MB


def test_what_a_node_measured_when_it_came_up_is_believed_until_it_has_fetched() -> None:
    measured = {"store": 25.0 * MB, "disk": 300.0 * MB}
    fresh = state_of([], {}, known=report(bytes_per_s={}, measured=measured))
    assert (fresh.link.bytes_per_s, fresh.disk_bytes_per_s) == (25 * MB, 300 * MB)
    state = state_of([], {}, known=report(measured=measured))
    assert (state.link.bytes_per_s, state.disk_bytes_per_s) == (100 * MB, 1000 * MB)
    nothing = state_of([], {}, known=report(bytes_per_s={}, measured={"store": 0.0}))
    assert nothing.link.bytes_per_s == NodeMeasures().store_bytes_per_s.value


def test_a_copy_that_came_from_a_busy_store_is_sent_as_fast_as_the_link_was_when_the_node_came_up() -> None:
    slow = NodeMeasures(store_bytes_per_s=MovingAverage(25.0 * MB, 3))
    known = report(bytes_per_s={}, measured={"store": 50.0 * MB}, peer_address="10.0.0.1:7000")
    state = node_state(known, [], slow, layouts={}, now_s=0, now_unix_ns=0)
    assert state.link.bytes_per_s == 25 * MB, "of the store it gets no more"
    assert state.down_bytes_per_s == 50 * MB
    assert state.up is not None
    assert state.up.bytes_per_s == 50 * MB


def test_an_order_that_is_not_answered_takes_memory_and_fetches_all() -> None:
    state = state_of([order()], {})
    assert state.free_bytes == 500 * MB
    assert state.workers == 1
    assert state.held == {CHAT: HeldLayers(coming=EVERY_LAYER)}
    (fetch,) = state.link.fetches
    assert fetch.pending_bytes == 400 * MB
    assert fetch.deadline_s == pytest.approx(1000 + 6 - 0.1)


def test_a_copy_that_was_promised_takes_memory_until_the_node_counts_it() -> None:
    assert state_of([], {}, copies=(CHAT,)).free_bytes == 600 * MB
    assert state_of([order()], {}, copies=(CHAT,)).free_bytes == 500 * MB, "the worker attaches the copy"
    part = report(segments=[segment("partial", 100 * MB, [(0, 20)])], memory_used_bytes=100 * MB)
    assert state_of([], {}, copies=(CHAT,), known=part).free_bytes == 600 * MB, "the rest of a stage's segment"
    for state in ("filling", "ready"):
        counted = report(segments=[segment(state, 400 * MB)], memory_used_bytes=400 * MB)
        assert state_of([], {}, copies=(CHAT,), known=counted).free_bytes == 600 * MB
    assert state_of([], {}, copies=(CheckpointId("?"),)).free_bytes == 1000 * MB, "of no deployed version"


def test_no_start_is_placed_on_memory_that_a_copy_was_promised() -> None:
    other = CheckpointId("other" * 8)
    seen = node_state(
        report(memory_bytes=600 * MB), [], NodeMeasures(),
        layouts={CHAT: SHAPE, other: SHAPE}, now_s=0, now_unix_ns=0, copies=(other,),
    )  # fmt: skip
    wanted = request(layout=SHAPE, slo=CHATTING.slo)
    assert make_plan(wanted, Cluster([seen]), 0.0).error is not None
    free = state_of([], {}, known=report(memory_bytes=600 * MB))
    assert make_plan(wanted, Cluster([free]), 0.0).error is None


def test_what_came_is_pending_no_more_and_the_promise_stays_what_it_was() -> None:
    known = report(segments=[segment("filling", 300 * MB)], memory_used_bytes=500 * MB)
    state = state_of([order()], {"w": "starting"}, now_s=3.0, known=known)
    assert state.free_bytes == 500 * MB, "the node has counted it itself"
    (fetch,) = state.link.fetches
    assert fetch.pending_bytes == 100 * MB
    assert fetch.deadline_s == pytest.approx(1000 + 5.9)


def test_what_must_have_come_since_the_report_or_the_order_is_pending_no_more() -> None:
    """Eq. 4, at 100 MB/s."""
    (fetch,) = state_of([order(decided_s=1.0)], {}, now_s=3.0).link.fetches
    assert fetch.pending_bytes == pytest.approx(200 * MB), "no report of it yet"
    known = report(segments=[segment("filling", 250 * MB, counted_s=2.5)])
    (fetch,) = state_of([order(decided_s=1.0)], {"w": "starting"}, now_s=3.0, known=known).link.fetches
    assert fetch.pending_bytes == pytest.approx(100 * MB)
    assert state_of([order(decided_s=1.0)], {"w": "starting"}, now_s=4.5, known=known).link.fetches == ()
    stalled = report(segments=[segment("filling", 250 * MB, counted_s=4.5)])
    (fetch,) = state_of([order(decided_s=1.0)], {"w": "starting"}, now_s=4.5, known=stalled).link.fetches
    assert fetch.pending_bytes == pytest.approx(150 * MB), "the next report tells that it has not come"


def test_a_whole_segment_is_held_and_fetched_by_nobody() -> None:
    known = report(segments=[segment("ready", 400 * MB)])
    state = state_of([order()], {"w": "starting"}, known=known)
    assert state.link.fetches == ()
    assert state.held == {CHAT: HeldLayers(host=EVERY_LAYER)}


def test_chunks_that_are_there_are_layers_that_are_held() -> None:
    known = report(
        segments=[segment("partial", 100 * MB, [(0, 10), (35, 50)])],
        disk={CHAT: [(0, 30)], CheckpointId("?"): [(0, 9)]},
    )
    state = state_of([], {}, known=known)
    assert state.held == {CHAT: HeldLayers(host=layer_set(0, 1) | layer_set(4, 5), disk=layer_set(0, 3))}


def test_a_stage_fetches_its_own_layers_only() -> None:
    known = report(segments=[segment("filling", 150 * MB, [(0, 10), (60, 80)])])
    state = state_of([order(stage=stage(0))], {"w": "starting"}, known=known)
    assert state.held == {CHAT: HeldLayers(host=layer_set(0, 1) | layer_set(6, 8), coming=layer_set(1, 2))}
    assert [fetch.pending_bytes for fetch in state.link.fetches] == [50 * MB]


def test_a_start_that_was_promised_nothing_objects_to_nothing() -> None:
    (fetch,) = state_of([order(fetch_by_s=0.0)], {}).link.fetches
    assert fetch.deadline_s == NEVER


@pytest.mark.parametrize("ended", ["ready", "draining", "failed", "gone"])
def test_who_is_ready_or_has_ended_fetches_nothing(ended: WorkerState) -> None:
    state = state_of([order()], {"w": ended})
    assert state.link.fetches == ()
    assert state.workers == (0 if ended in ("failed", "gone") else 1)


def test_a_new_scheduler_refuses_what_the_old_one_would_have_refused() -> None:
    cluster = Cluster([state_of([], {})])
    wanted = request(layout=SHAPE, slo=CHATTING.slo)
    taken(make_plan(wanted, cluster, 1000.0), cluster, wanted, 1000.0)
    old, new = cluster[NodeId("n")].link, state_of([order()], {}).link
    assert [fetch[1:3] for fetch in old.fetches] == [fetch[1:3] for fetch in new.fetches]
    for later_s in (0.0, 1.0, 2.0, 3.0, 3.9):
        assert old.accepts(100 * MB, 1000 + later_s) == new.accepts(100 * MB, 1000 + later_s)
