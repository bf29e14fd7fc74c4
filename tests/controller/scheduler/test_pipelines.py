"""Pipelines among the orders: stages learn of each other, and leave together."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.controller.scheduler.pipelines import consolidation_orders, update_pipelines
from fleetstart.controller.state.records import is_helper
from fleetstart.runtime.contract.ids import FunctionName, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import NO_PEER, WorkerOrder, WorkerStatus
from fleetstart.runtime.contract.weights.stage import Stage
from tests.controller.scheduler.test_autoscaler import spec

CUTS = ((0, 2), (2, 4), (4, 6))


def orders(**fields: Any) -> list[WorkerOrder]:
    return [
        WorkerOrder(
            worker=WorkerId(f"w-{index}"),
            node=NodeId(f"n-{index}"),
            epoch="e",
            version=Version(1),
            spec=spec(),
            ordered_unix_ns=1,
            stage=Stage(pipeline=PipelineId("p"), index=index, cuts=CUTS),
            peers=("",) * len(CUTS),
            grow=index == 0,
            **fields,
        )
        for index in range(len(CUTS))
    ]


def status(order: WorkerOrder, state: Any = "starting", *, whole: bool = False, link: str = "x") -> WorkerStatus:
    return WorkerStatus(
        worker=order.worker,
        node=order.node,
        function=FunctionName("f"),
        version=order.version,
        state=state,
        link=link and f"10.0.0.{order.worker[-1]}:5",
        whole=whole,
    )


def said(*statuses: WorkerStatus) -> dict[WorkerId, WorkerStatus]:
    return {one.worker: one for one in statuses}


NOBODY: frozenset[WorkerId] = frozenset()


def test_a_stage_hears_which_others_found_no_way_to_it_and_what_it_heard_stays() -> None:
    three = orders()
    cut_off = msgspec.structs.replace(status(three[2], link=""), relayed=(0, 1))
    told = update_pipelines(three, said(cut_off), NOBODY, 2)
    assert [(order.stage.index, order.relayed) for order in told if order.stage is not None] == [(0, (2,)), (1, (2,))]
    now = [*told, three[2]]
    assert not update_pipelines(now, said(cut_off), NOBODY, 3)
    assert not update_pipelines(now, {}, NOBODY, 3)
    both = said(cut_off, msgspec.structs.replace(status(three[0], link=""), relayed=(1,)))
    assert [order.relayed for order in update_pipelines(now, both, NOBODY, 4)] == [(0, 2)]


def test_stages_are_told_where_the_others_are_once_each() -> None:
    three = orders()
    first = update_pipelines(three, said(status(three[1])), NOBODY, 2)
    assert [order.peers for order in first] == [("", "10.0.0.1:5", "")] * 3
    assert all(order.ordered_unix_ns == 2 for order in first)
    assert not update_pipelines(first, said(status(three[1])), NOBODY, 3)

    everywhere = said(*map(status, three))
    second = update_pipelines(first, everywhere, NOBODY, 4)
    assert [order.peers for order in second] == [("10.0.0.0:5", "10.0.0.1:5", "10.0.0.2:5")] * 3
    assert not update_pipelines(second, everywhere, NOBODY, 5)


def test_helpers_leave_when_the_first_is_whole() -> None:
    three = orders()
    statuses = said(status(three[0], "ready", whole=True), status(three[1], "ready"), status(three[2], "ready"))
    changed = update_pipelines(three, statuses, NOBODY, 2)
    assert [(order.worker, order.wanted) for order in changed] == [("w-1", "drain"), ("w-2", "drain")]
    assert not update_pipelines([three[0], *changed], statuses, NOBODY, 3)


def test_helpers_leave_with_the_first_however_it_goes() -> None:
    three = orders()
    alive = [status(order, "ready") for order in three]
    for left, statuses, lost in (
        (three[1:], alive, NOBODY),
        (three, [status(three[0], "failed"), *alive[1:]], NOBODY),
        (three, alive, frozenset({three[0].worker})),
    ):
        changed = update_pipelines(left, said(*statuses), lost, 2)
        assert [(order.worker, order.wanted) for order in changed] == [("w-1", "drain"), ("w-2", "drain")]


def test_a_helper_that_is_lost_is_not_told_anything() -> None:
    three = orders()
    changed = update_pipelines(
        three, said(status(three[1], "failed"), status(three[2])), frozenset({three[2].worker}), 2
    )
    assert [order.worker for order in changed] == ["w-0"]
    assert changed[0].peers == ("", "10.0.0.1:5", NO_PEER)


def test_who_helps() -> None:
    three = orders()
    assert [is_helper(order, None) for order in three] == [False, True, True]
    assert not is_helper(three[1], status(three[1], "ready", whole=True))
    assert not is_helper(msgspec.structs.replace(three[1], stage=None), None)


def test_a_first_stage_that_is_drained_keeps_its_helpers_for_its_last_calls() -> None:
    three = orders()
    drained = msgspec.structs.replace(three[0], wanted="drain")
    statuses = said(status(three[0], "draining", link=""), *(status(order, "ready", link="") for order in three[1:]))
    assert not update_pipelines([drained, *three[1:]], statuses, NOBODY, 2)


def test_helpers_become_workers_where_more_are_wanted() -> None:
    three = orders()
    statuses = said(*(status(order, "ready") for order in three))
    [second] = consolidation_orders(three, statuses, NOBODY, 1, memory_bytes=spec().memory_bytes, now_unix_ns=5)
    assert (second.worker, second.grow, second.ordered_unix_ns) == ("w-1", True, 5)
    assert [
        order.worker
        for order in consolidation_orders(
            [three[0], second, three[2]], statuses, NOBODY, 2, memory_bytes=spec().memory_bytes, now_unix_ns=6
        )
    ] == ["w-2"]
    assert not consolidation_orders(
        three,
        statuses,
        frozenset({three[1].worker, three[2].worker}),
        2,
        memory_bytes=spec().memory_bytes,
        now_unix_ns=5,
    )


def test_a_helper_with_less_memory_than_a_worker_stays_one() -> None:
    three = orders()
    assert not consolidation_orders(three, {}, NOBODY, 2, memory_bytes=spec().memory_bytes + 1, now_unix_ns=5)


def test_a_helper_that_grows_stays_when_its_pipeline_goes_but_not_for_ever() -> None:
    three = orders()
    [second] = consolidation_orders(three, {}, NOBODY, 1, memory_bytes=spec().memory_bytes, now_unix_ns=5)
    left, overdue = [second, three[2]], frozenset({second.worker})
    assert [order.worker for order in update_pipelines(left, {}, NOBODY, 6)] == ["w-2"]
    assert {order.worker for order in update_pipelines(left, {}, NOBODY, 6, overdue)} == {"w-1", "w-2"}


def test_a_stage_that_is_gone_before_it_told_of_its_link_is_waited_for_by_nobody() -> None:
    three = orders()
    (first, second) = update_pipelines(three, said(status(three[1])), frozenset({three[2].worker}), 2)
    assert first.peers == second.peers == ("", "10.0.0.1:5", NO_PEER)
    again = update_pipelines([first, second], said(status(three[0]), status(three[1])), NOBODY, 3)
    assert [order.peers for order in again] == [("10.0.0.0:5", "10.0.0.1:5", NO_PEER)] * 2
