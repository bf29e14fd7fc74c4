"""Streams whose worker or its host is lost in mid-answer, on real hosts: they go on elsewhere, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.runtime.contract.billing.ledger import InvocationTrace
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.worker_headers import CONTINUE_HEADER
from tests.e2e.pipelines.fleet import LONG, LONGEST, PROMPT, Call, Fleet, Function
from tests.servers import wait_until

pytestmark = pytest.mark.bed


def serving(fleet: Fleet, function: Function, *former: WorkerOrder) -> WorkerOrder:
    """The order of the worker that takes its calls, once it does, and is none of the former ones."""
    gone = {order.worker for order in former}

    def found() -> WorkerOrder | None:
        for order in fleet.orders(function):
            status = fleet.status_of(order) if order.worker not in gone else None
            if status is not None and status.state == "ready" and status.endpoint:
                return order
        return None

    order = wait_until(found, what="a worker that takes calls")
    assert order is not None
    return order


def kill(fleet: Fleet, order: WorkerOrder) -> None:
    status = fleet.status_of(order)
    assert status is not None
    fleet.node_of(order).kill_worker(status)


def trace_of(fleet: Fleet, call: Call) -> InvocationTrace:
    def told() -> InvocationTrace | None:
        answer = httpx.get(f"{fleet.bed.url}/api/v1/invocations/{call.id}", trust_env=False)
        return msgspec.json.decode(answer.content, type=InvocationTrace) if answer.status_code == 200 else None

    trace = wait_until(told, what=f"trace of {call.id}")
    assert trace is not None
    return trace


def check_moved(fleet: Fleet, call: Call, times: int) -> None:
    """Checks the call's trace and bill: what a lost worker did is not billed."""
    trace = trace_of(fleet, call)
    names = [phase.name for phase in trace.timeline.phases]
    assert (names.count("move"), names.count("respond")) == (times, times + 1)
    assert (trace.row.status, trace.row.error) == (200, "")
    assert trace.row.attempts > times
    last = [phase for phase in trace.timeline.phases if phase.name in ("move", "respond")][-2:]
    assert trace.row.billed_ms <= (last[-1].ended_ns - last[0].started_ns) / 1e6 + 1


def test_a_whole_worker_is_killed_in_mid_stream(fleet: Fleet, function: Function) -> None:
    """Drawn tokens follow from seed and position; nothing that a client says can be taken for a stream's marks."""
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    reference = fleet.call(function, LONG, **drawn).join()
    assert reference.status == 200, reference
    fleet.settled(function)
    order = serving(fleet, function)
    calls = [fleet.call(function, LONG), fleet.call(function, LONG, **drawn)]
    for call in calls:
        call.wait_for(5)
    kill(fleet, order)
    assert [call.join().text for call in calls] == [function.answer(LONG), reference.text]
    for call in calls:
        check_moved(fleet, call, 1)
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    hostile = httpx.post(
        f"{fleet.bed.url}/fn/{function.name}/v1/completions",
        json=body, headers={CONTINUE_HEADER: "10"}, trust_env=False,
    )  # fmt: skip
    assert hostile.status_code == 200, hostile.text


@pytest.mark.isolations("namespaces", why="pipelines over several nodes are of functions in namespaces")
def test_a_first_stage_and_its_successor_are_killed_in_mid_stream(fleet: Fleet, function: Function) -> None:
    """A whole answer that is under way is made again."""

    def whole() -> str:
        body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
        url = f"{fleet.bed.url}/fn/{function.name}/v1/completions"
        answer = httpx.post(url, json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(whole)
        call = fleet.call(function, LONG, deadline_s=60)
        orders = fleet.pipeline(function)
        call.wait_for(5)
        fleet.kill(orders[0])
        before = len(call.pieces)
        second = serving(fleet, function, orders[0])
        call.wait_for(before + 5)
        kill(fleet, second)
        assert call.join().text == function.answer(LONG), call
        assert answer.result() == call.text
    check_moved(fleet, call, 2)
    fleet.check_after(function)


def test_the_host_of_a_whole_worker_is_cut_off_in_mid_stream(fleet: Fleet, function: Function) -> None:
    fleet.call(function, 5).join()
    fleet.settled(function)
    call = fleet.call(function, LONGEST, deadline_s=90)
    call.wait_for(5)
    order = serving(fleet, function)
    fleet.bed.cut(order.node)
    try:
        assert call.join().text == function.answer(LONGEST), call
    finally:
        fleet.bed.mend(order.node)
    check_moved(fleet, call, 1)
    fleet.settled(function)
