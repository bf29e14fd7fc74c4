"""Faults of cold starts that are pipelines, on real hosts with slow links: a stage, a node, a link, the store, the
controller, each before the first token, in mid-stream or in mid-consolidation.

Whoever calls gets the right tokens, or the right error, in time; and afterwards nothing of the fault is left.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.e2e.pipelines.fleet import LAYERS, LONG, MBIT, ONE, SHORT, Fleet, Function
from tests.servers import wait_until

pytestmark = [
    pytest.mark.bed,
    pytest.mark.isolations("namespaces", why="pipelines over several nodes are of functions in namespaces"),
]

SLOW_MBIT = 15
"""For a phase that must not be over before it is seen."""
LOST_S = 15.0


def test_streams_are_right_while_a_pipeline_becomes_one_worker(fleet: Fleet, function: Function) -> None:
    prompts = ["Once upon a time ", "It was a dark and stormy night, and "]
    calls = [fleet.call(function, LONG, prompt) for prompt in prompts]
    orders = fleet.pipeline(function)
    assert [order.stage.cuts[0] for order in orders if order.stage is not None] == [(0, LAYERS // 3)] * 3
    calls[0].wait_for(1)
    head = fleet.status_of(orders[0])
    assert head is not None
    assert not head.whole
    for call, prompt in zip(calls, prompts, strict=True):
        assert call.join().text == function.answer(LONG, prompt)
        assert call.start == "cold"
    worker = fleet.settled(function)
    assert worker.worker == orders[0].worker
    explained = partial(fleet.bed.fs, "explain", function.name)
    wait_until(lambda: "when it became one worker" in explained().out, what="how the running requests were taken over")
    fleet.check_after(function)


@pytest.mark.parametrize(("victim", "when"), [(1, "before"), (2, "growth")])
def test_a_later_stage_is_killed(fleet: Fleet, function: Function, victim: int, when: str) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    if when == "growth":
        call.wait_for(5)
        fleet.bed.limit(orders[0].node, SLOW_MBIT)
        fleet.wait_growing(orders[0])
    fleet.kill(orders[victim])
    fleet.bed.limit(orders[0].node, MBIT)
    assert call.join().text == function.answer(LONG), call
    assert fleet.settled(function).worker == orders[0].worker
    fleet.check_after(function)


def test_the_first_stage_is_killed_before_its_first_token_and_the_call_tried_again(
    fleet: Fleet, function: Function
) -> None:
    call = fleet.call(function, SHORT)
    orders = fleet.pipeline(function)
    fleet.kill(orders[0])
    assert call.join().text == function.answer(SHORT), call
    fleet.check_after(function)


@pytest.mark.parametrize("when", ["before", "stream"])
def test_the_host_of_a_later_stage_is_cut_off(fleet: Fleet, function: Function, when: str) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    if when == "before":
        fleet.reached(orders[2], "starting")
    else:
        call.wait_for(5)
    fleet.bed.cut(orders[2].node)
    try:
        assert call.join().text == function.answer(LONG), call
    finally:
        fleet.bed.mend(orders[2].node)
    assert fleet.settled(function).worker == orders[0].worker
    fleet.check_after(function)


def test_the_host_of_the_first_stage_is_cut_off_before_its_first_token_and_the_call_tried_again(
    fleet: Fleet, function: Function
) -> None:
    """The retry comes once the node's lease has ended: until then it might answer."""
    call = fleet.call(function, SHORT)
    orders = fleet.pipeline(function)
    fleet.reached(orders[0], "starting")
    fleet.bed.cut(orders[0].node)
    try:
        assert call.join().text == function.answer(SHORT), call
    finally:
        fleet.bed.mend(orders[0].node)
    fleet.check_after(function)


def test_two_later_stages_lose_each_other(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    call.wait_for(5)
    fleet.bed.cut_between(orders[1].node, orders[2].node)
    try:
        assert call.join().text == function.answer(LONG), call
    finally:
        fleet.bed.mend_between(orders[1].node, orders[2].node)
    fleet.check_after(function)


def test_the_store_stalls_before_the_first_token(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, SHORT)
    orders = fleet.pipeline(function)
    fleet.reached(orders[0], "starting")
    fleet.bed.stall_store()
    try:
        during = fleet.call(function, SHORT)
        wait_until(lambda: fleet.bed.info(function.name).queued == 2, what="a call that comes meanwhile")
        assert not call.pieces
    finally:
        fleet.bed.resume_store()
    for each in (call, during):
        assert each.join().text == function.answer(SHORT), each
    fleet.check_after(function)


def test_a_pipeline_serves_while_the_store_stalls_and_grows_after(fleet: Fleet) -> None:
    function = fleet.deploy("grows-after", num_hidden_layers=45)  # it grows for 15 seconds, the others for two
    call = fleet.call(function, 2 * SHORT)
    orders = fleet.pipeline(function)
    call.wait_for(1)  # sooner than the node's reports, which a busy machine has seconds later
    fleet.bed.stall_store()
    try:
        for order in orders:
            fleet.reached(order, "ready")
        assert call.join().text == function.answer(2 * SHORT), call
        again = fleet.call(function, SHORT).join()
        assert again.text == function.answer(SHORT), again
        head = fleet.status_of(orders[0])
        assert head is not None
        assert not head.whole
    finally:
        fleet.bed.resume_store()
    assert fleet.settled(function).worker == orders[0].worker
    fleet.check_after(function)
    fleet.remove(function)


def test_a_store_that_stays_down_ends_the_call_in_its_deadline(fleet: Fleet) -> None:
    function = fleet.deploy("no-store", f"{ONE}, timeout_s=5, start_timeout_s=2")
    call = fleet.call(function, SHORT)
    fleet.pipeline(function)
    fleet.bed.stall_store()
    try:
        call.join()
        assert call.status in (503, 504), call
        assert call.error["code"] in ("start_failed", "deadline_exceeded", "unavailable"), call
    finally:
        fleet.bed.resume_store()
    again = fleet.call(function, SHORT).join()
    assert again.text == function.answer(SHORT), again
    fleet.check_after(function)
    fleet.remove(function)


def test_the_controller_is_killed_while_a_pipeline_starts(fleet: Fleet, function: Function) -> None:
    call = fleet.call(function, SHORT)
    orders = fleet.pipeline(function)
    fleet.reached(orders[1], "starting")
    fleet.bed.controller.kill()
    assert call.join().cut
    fleet.bed.controller.start()
    fleet.bed.wait_ready(fleet.hosts)
    assert fleet.settled(function).worker == orders[0].worker
    fleet.check_after(function)


def test_a_start_that_would_break_a_promise_waits_for_the_links_to_be_free(fleet: Fleet) -> None:
    """The first takes a stage on each node, and keeps its SLO only if it has the links to itself (eq. 3)."""
    tight = fleet.deploy("tight", f"{ONE}, slo=SLO(ttft_s=2.5)", num_hidden_layers=12)
    loose = fleet.deploy("loose", f"{ONE}, slo=SLO(ttft_s=12)")
    first = fleet.call(tight, SHORT)
    orders = fleet.pipeline(tight)
    second = fleet.call(loose, SHORT)
    assert first.join().text == tight.answer(SHORT), first
    assert second.join().text == loose.answer(SHORT), second
    plan = fleet.plan(orders[0])
    others = {order.node: order.ordered_unix_ns for order in fleet.orders(loose)}
    assert others
    for order, stage in zip(orders, plan.stages, strict=True):
        assert stage.fetch_within_s is not None
        fetched_unix_ns = fleet.fetched_unix_ms(order) * 10**6
        kept = fetched_unix_ns / 1e9 <= plan.decided_unix_ms / 1e3 + stage.fetch_within_s
        if kept and order.node in others:  # a promise that a busy machine broke objects to nobody
            # Shortly before its end, a fetch can spare half of its link and still be in time.
            decided_unix_ns = plan.decided_unix_ms * 10**6
            assert others[order.node] - decided_unix_ns > (fetched_unix_ns - decided_unix_ns) / 2
    fleet.remove(tight, loose)


def test_the_node_of_a_later_stage_dies_and_then_that_of_a_first(fleet: Fleet) -> None:
    function = fleet.deploy("no-later-node")
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function)
    fleet.reached(orders[1], "starting")
    lost = fleet.node_of(orders[1])
    lost.kill()
    assert call.join().text == function.answer(LONG), call
    wait_until(lambda: not lost.processes(), LOST_S, what=f"end of {lost.name}'s processes")
    assert fleet.settled(function).worker == orders[0].worker
    fleet.check_after(function)
    fleet.remove(function)

    function = fleet.deploy("no-first-node")
    call = fleet.call(function, LONG)
    orders = fleet.pipeline(function, 2)
    call.wait_for(5)
    lost = fleet.node_of(orders[0])
    lost.kill()
    assert call.join().text == function.answer(LONG), call
    wait_until(lambda: not lost.processes(), LOST_S, what=f"end of {lost.name}'s processes")
    fleet.check_after(function)
    fleet.remove(function)
