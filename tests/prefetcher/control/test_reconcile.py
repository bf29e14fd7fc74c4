"""Reconciliation of orders: tables of actions, and the law that doing them leaves none to do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.control.reconcile import (
    Action,
    DrainWorker,
    ForgetWorker,
    KillWorker,
    KnownWorker,
    RejectOrder,
    StandByWorker,
    StartWorker,
    WakeWorker,
    act_on_order,
    reconcile,
)
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder, WorkerState

W = WorkerId("w-1")
STATES: tuple[WorkerState, ...] = ("starting", "ready", "standby", "draining", "gone", "failed")
ORDER = WorkerOrder(
    worker=W,
    node=NodeId("n"),
    epoch="now",
    version=Version(1),
    spec=FunctionSpec(name=FunctionName("f"), bundle=BundleId("b"), entry="m:a"),
    ordered_unix_ns=0,
)
DRAIN = msgspec.structs.replace(ORDER, wanted="drain")
STANDBY = msgspec.structs.replace(ORDER, wanted="standby")
OLD = msgspec.structs.replace(ORDER, epoch="before")


@pytest.mark.parametrize(
    ("order", "state", "expected"),
    [
        (ORDER, None, StartWorker),
        (OLD, None, RejectOrder),
        (DRAIN, None, RejectOrder),
        (ORDER, "starting", None),
        (ORDER, "ready", None),
        (ORDER, "failed", None),
        (ORDER, "standby", WakeWorker),
        (STANDBY, None, RejectOrder),
        (STANDBY, "starting", None),
        (STANDBY, "ready", StandByWorker),
        (STANDBY, "standby", None),
        (STANDBY, "draining", None),
        (DRAIN, "starting", DrainWorker),
        (DRAIN, "standby", DrainWorker),
        (DRAIN, "ready", DrainWorker),
        (DRAIN, "draining", None),
        (DRAIN, "gone", None),
        (None, "starting", KillWorker),
        (None, "ready", KillWorker),
        (None, "draining", KillWorker),
        (None, "gone", ForgetWorker),
        (None, "failed", ForgetWorker),
    ],
)
def test_each_pair_of_order_and_state_has_one_answer(
    order: WorkerOrder | None, state: WorkerState | None, expected: type[Action] | None
) -> None:
    own = {W: KnownWorker(state=state, seen_ns=1)} if state else {}

    actions = reconcile({W: order} if order else {}, own, (), "now", read_began_ns=2)

    assert [type(action) for action in actions] == ([expected] if expected else [])


def test_a_read_that_began_before_the_order_came_does_not_end_its_worker() -> None:
    own = {W: KnownWorker(state="starting", seen_ns=20)}

    assert reconcile({}, own, (), "now", read_began_ns=10) == []
    assert reconcile({}, own, (), "now", read_began_ns=30) == [KillWorker(W)]


def test_a_refusal_names_the_reason() -> None:
    action = act_on_order(OLD, {}, (), "now")

    assert isinstance(action, RejectOrder)
    assert "earlier start" in action.reason


def test_a_worker_that_has_ended_is_not_started_again_when_a_redis_has_its_order_again() -> None:
    action = act_on_order(ORDER, {}, {W}, "now")

    assert isinstance(action, RejectOrder)
    assert "has ended" in action.reason


workers = st.integers(0, 8).map(lambda number: WorkerId(f"w-{number}"))


@given(
    orders=st.dictionaries(workers, st.sampled_from([ORDER, STANDBY, DRAIN, OLD])),
    own=st.dictionaries(workers, st.sampled_from(STATES)),
)
def test_doing_what_reconcile_says_leaves_nothing_to_do(
    orders: dict[WorkerId, WorkerOrder], own: dict[WorkerId, WorkerState]
) -> None:
    named = {worker: msgspec.structs.replace(order, worker=worker) for worker, order in orders.items()}
    states = {worker: KnownWorker(state=state, seen_ns=0) for worker, state in own.items()}

    for action in reconcile(named, states, (), "now", read_began_ns=1):
        match action:
            case StartWorker(order):
                states[order.worker] = KnownWorker(state="starting", seen_ns=0)
                assert order.epoch == "now"
            case RejectOrder(order):
                states[order.worker] = KnownWorker(state="gone", seen_ns=0)
            case StandByWorker(worker):
                states[worker] = KnownWorker(state="standby", seen_ns=0)
            case WakeWorker(worker):
                states[worker] = KnownWorker(state="ready", seen_ns=0)
            case DrainWorker(worker):
                states[worker] = KnownWorker(state="draining", seen_ns=0)
            case KillWorker(worker):
                states[worker] = KnownWorker(state="gone", seen_ns=0)
            case ForgetWorker(worker):
                assert states.pop(worker).state in FINAL

    assert all(isinstance(left, ForgetWorker) for left in reconcile(named, states, (), "now", read_began_ns=1))
