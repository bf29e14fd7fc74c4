"""What `fs explain` says, line by line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.controller.api.traces import invocation_plan
from fleetstart.controller.cli.commands.explain import render_plan
from fleetstart.controller.cli.waterfall import trace_summary
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.plan import Plan
from fleetstart.controller.planner.selection import make_plan
from fleetstart.controller.schemas.functions import Prediction
from fleetstart.controller.schemas.planning import InvocationPlan
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import SecondEngine
from fleetstart.runtime.contract.node.speed import ModeSwitch
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.planner.worlds import measured, node, request

MS = 1_000_000
ACCEPTED_MS = 1_000_000


def planned(decided_ms: int, nodes: int = 3, **fields: Any) -> Plan:
    wanted = request(slo=SLO(ttft_s=2.5), measures=measured(prefill_s=0.0))
    found = make_plan(wanted, Cluster(node(f"n{index}") for index in range(nodes)), 0.0)
    return Plan(**{**_fields(found), "decided_unix_ms": ACCEPTED_MS + decided_ms, **fields})


def _fields(found: Plan) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__}


def told(
    start: Any = "cold",
    *,
    decided_ms: int = 100,
    answered: bool = True,
    by: Plan | None = None,
    relayed: tuple[int, ...] = (),
    second: SecondEngine | None = None,
    **rest: Any,
) -> InvocationPlan:
    """2.6 s until the first of 41 tokens, which then come every 100 ms."""
    row = InvocationRow(
        id=InvocationId("inv-1"), function=FunctionName("chat"), version=Version(3), worker=WorkerId("w-1"),
        status=200, start=start, accepted_unix_ms=ACCEPTED_MS, queue_ms=0, billed_ms=0, memory_bytes=1, cost_nusd=0,
        first_byte_ms=2600 if answered else None,
    )  # fmt: skip
    timeline = Timeline()
    timeline.add("queue", 5 * MS, 2405 * MS)
    timeline.add("execute", 2405 * MS, 2605 * MS)  # also of a call whose client left, or whose time was up
    if answered:
        timeline.add("respond", 2605 * MS, 6605 * MS)
    trace = InvocationTrace(row=row, timeline=timeline, events=43, relayed=relayed, second_engine=second)
    values: dict[str, Any] = {"engine": "native", "image": "", "prediction": None, **rest}
    return invocation_plan(trace, by or planned(decided_ms), **values)


def test_a_cold_call_shows_what_was_predicted_and_what_came() -> None:
    found = told(prediction=Prediction(error=0.1234, starts=5, calibrated=True))
    said = render_plan(found)
    assert said.startswith("inv-1   chat@3, cold start, HTTP 200, worker w-1, engine native\n")
    assert "the caller waited 2.600 s for the first byte, 0.100 s of it before its worker was ordered" in said
    assert "TTFT, s      2.000      2.500     20%" in said
    ttft, tpot, _ = found.explanation.compared
    assert ttft.observed == pytest.approx(2.5)
    assert tpot.observed == pytest.approx(0.1)
    assert "a pipeline of 2: the cheapest of" in said
    assert "TTFT 4.00 s is above 2.5 s" in said
    assert said.endswith("TTFT predictions for chat@3 were off by 12% on average, over 5 starts")


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (SecondEngine(engine="vllm"), "vllm waits behind the first engine"),
        (
            SecondEngine(engine="vllm", state="starting", waited_ms=130),
            "vllm began 130 ms after the first engine and was not up yet",
        ),
        (
            SecondEngine(engine="vllm", state="running", waited_ms=130, took_ms=2900, moved=1),
            "vllm began 130 ms after the first engine and came up in 2900 ms, 1 stream moved to it",
        ),
        (
            SecondEngine(engine="vllm", state="failed", waited_ms=130, error="no room"),
            "vllm began 130 ms after the first engine and did not come up: no room",
        ),
    ],
)
def test_an_engine_behind_the_first_one_is_told(second: SecondEngine, line: str) -> None:
    found = told(second=second, engine="vllm")
    assert render_plan(found).splitlines()[1] == line
    row = InvocationTrace(row=found.row, timeline=Timeline(), second_engine=second)
    assert line in trace_summary(row)


def test_a_call_that_no_worker_took_has_no_kind_of_start() -> None:
    row = msgspec.structs.replace(told().row, worker=WorkerId(""), status=503, error="queue_timeout")
    summary = trace_summary(InvocationTrace(row=row, timeline=Timeline()))
    assert summary == "inv-1   chat@3, HTTP 503 queue_timeout, worker none"


def test_the_image_of_its_containers_is_named() -> None:
    first = render_plan(told(image="ours:1")).splitlines()[0]
    assert first == "inv-1   chat@3, cold start, HTTP 200, worker w-1, engine native, image ours:1"


def test_guesses_are_not_judged() -> None:
    said = render_plan(told(prediction=Prediction(error=10.59, starts=1)))
    assert said.endswith("TTFT predictions for chat@3 are not calibrated yet: 1 start compared, 3 are needed")
    assert "1059%" not in said


def test_a_function_without_tokens_has_a_first_byte() -> None:
    found = told(engine="", prediction=Prediction(error=0.1234, starts=5, calibrated=True))
    said = render_plan(found)
    assert "first byte, s" in said
    assert said.endswith("predictions of the first byte for chat@3 were off by 12% on average, over 5 starts")
    assert not any(word in said for word in ("TTFT", "TPOT"))


def test_a_hot_call_says_that_it_met_the_worker_of_another() -> None:
    found = told("hot", decided_ms=-35_000)
    said = render_plan(found)
    assert "its worker was ready when it arrived, the caller waited 2.600 s for the first byte" in said
    assert "this is how that worker was started, 35s before this call" in said
    assert all(one.observed is None for one in found.explanation.compared)
    assert said.endswith("no start of chat@3 has been compared with its prediction yet")


def test_a_call_that_joined_a_start_under_way_is_compared_from_the_decision_on() -> None:
    found = told(decided_ms=-500)
    assert found.explanation.compared[0].observed == pytest.approx(3.1)
    assert "its worker had been ordered 0.500 s before it arrived" in render_plan(found)


def test_what_was_not_observed_is_not_made_up() -> None:
    unanswered = told(answered=False)
    assert unanswered.ttft_s is None
    assert unanswered.explanation.compared[0].observed is None
    assert "it had no answer; its worker was ordered 0.100 s after it arrived" in render_plan(unanswered)
    assert told(engine="").explanation.compared[1].observed is None, "its events are no tokens"


def test_stages_that_were_reached_through_the_store_are_named() -> None:
    found = told(relayed=(1, 3))
    assert "could not connect to stages 1, 3: what they said went through the object store" in render_plan(found)
    assert "object store" not in render_plan(told())


def test_the_cost_is_what_was_held_until_there_was_one_whole_worker() -> None:
    """Its memory, 300 to 500 MB a worker, times seconds."""
    alone = planned(100, nodes=1)
    (cost,) = [one for one in told(by=alone).explanation.compared if one.what.startswith("cost")]
    assert cost.observed == pytest.approx(alone.stages[0].reserved_bytes * 2.5 / GIB)

    growing, held_bytes = planned(100), sum(stage.reserved_bytes for stage in planned(100).stages)
    assert told(by=growing).explanation.compared[2].observed is None, "nobody knows yet how long"
    whole = planned(100, whole_unix_ms=ACCEPTED_MS + 100 + 6000)
    cost = told(by=whole).explanation.compared[2]
    assert cost.observed == pytest.approx(held_bytes * 6.0 / GIB)
    assert cost.predicted == pytest.approx(held_bytes * 4.0 / GIB), "2 s of fetching, and as long for the other half"
    assert "cost, GiB·s" in render_plan(told(by=whole))


def test_how_running_requests_were_taken_over_is_told_with_what_was_predicted() -> None:
    switch = ModeSwitch(copied_tokens=64, recomputed_tokens=500, copy_s=2.5, recompute_s=0.75, took_s=1.0)
    shown = render_plan(told(by=planned(100, whole_unix_ms=ACCEPTED_MS + 6000, switch=switch)))
    assert "those of 64 tokens were copied and those of 500 tokens were computed again, in 1.000 s" in shown
    assert "predicted 2.500 s to copy all, 0.750 s to compute all" in shown
    assert "no request ran" in render_plan(told(by=planned(100, switch=ModeSwitch())))
