"""A timeline as spans: every phase is there, under the one that did it, and nothing begins outside its parent."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.observability.spans import Span, spans_of
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, TraceContext
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId
from fleetstart.runtime.contract.timeline import PhaseName, Timeline

CONTEXT = TraceContext("a" * 32, "b" * 16, parent_id="c" * 16, sampled=True)
NAMES: list[PhaseName] = ["queue", "place", "start", "fetch", "device", "import", "load", "execute", "respond", "move"]


def spans(
    *phases: tuple[PhaseName, int, int], status: int = 200, error: str = "", context: TraceContext = CONTEXT
) -> dict[str, Span]:
    timeline = Timeline(origin_unix_ns=10**18)
    for phase in phases:
        timeline.add(*phase)
    row = InvocationRow(
        id=InvocationId("inv-1"), function=FunctionName("f"), version=Version(2), worker=WorkerId("w-1"), status=status,
        error=error, accepted_unix_ms=0, queue_ms=0, billed_ms=0, memory_bytes=0, cost_nusd=0,
    )  # fmt: skip
    numbers = itertools.count(1)
    found = spans_of(
        InvocationTrace(row=row, timeline=timeline, node="n", fetched={"store": 5}, context=context),
        lambda: f"{next(numbers):016x}",
    )
    return {span.name: span for span in found}


def test_a_cold_start_is_one_tree_over_gateway_node_and_worker() -> None:
    found = spans(
        ("queue", 0, 90), ("place", 0, 5), ("start", 6, 20), ("fetch", 6, 80), ("load", 30, 89), ("execute", 90, 95),
        ("respond", 95, 99),
    )  # fmt: skip
    by_id = {span.span_id: span.name for span in found.values()}
    parents = {name: by_id.get(span.parent_id, span.parent_id) for name, span in found.items()}
    assert parents == {
        "invoke f": "c" * 16, "queue": "invoke f", "place": "queue", "start": "queue", "fetch": "queue",
        "load": "queue",
        "attempt": "invoke f", "execute": "attempt", "respond": "attempt",
    }  # fmt: skip
    services = {name: span.service for name, span in found.items() if span.service != "gateway"}
    assert services == {"start": "node", "fetch": "node", "load": "worker", "execute": "worker"}
    assert found["attempt"].span_id == CONTEXT.span_id
    assert found["fetch"].attributes["fleetstart.fetched.store"] == 5
    assert found["invoke f"].started_unix_ns == 10**18
    assert found["invoke f"].ended_unix_ns == 10**18 + 99


def test_a_servers_error_is_one_and_a_callers_is_not() -> None:
    assert spans(("queue", 0, 1), status=502, error="worker_lost")["invoke f"].error == "worker_lost"
    assert spans(("queue", 0, 1), status=429, error="queue_full")["invoke f"].error == ""


def test_there_is_nothing_to_tell_of_a_call_that_was_lost() -> None:
    assert spans() == {}
    assert spans(("queue", 0, 1), context=TraceContext()) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 1000), st.integers(0, 1000)).map(
            lambda phase: (phase[0], min(phase[1:]), max(phase[1:]))
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda phase: phase[0],
    )
)
def test_each_phase_has_its_span_within_the_root(phases: list[tuple[PhaseName, int, int]]) -> None:
    found = spans(*phases)
    root = found["invoke f"]
    ids = {span.span_id for span in found.values()}
    assert len(ids) == len(found)
    for name, begin, end in phases:
        span = found[name]
        assert (span.started_unix_ns, span.ended_unix_ns) == (10**18 + begin, 10**18 + end)
        assert span.parent_id in ids
        assert root.started_unix_ns <= span.started_unix_ns <= span.ended_unix_ns <= root.ended_unix_ns
