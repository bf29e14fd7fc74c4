"""Events of the history: what becomes one, in which order, and who sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.api.endpoints import endpoints
from fleetstart.controller.billing.budgets import BudgetEvent
from fleetstart.controller.history.events import VERBS, merged_events, visible_events
from fleetstart.controller.scheduler.leader import failure_event
from fleetstart.controller.scheduler.worker_pool import FAILURES_TO_BREAK
from fleetstart.controller.schemas.access import AuditEvent
from fleetstart.controller.schemas.history import SystemEvent
from fleetstart.controller.state.records import Failure, VersionKey
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, Version

times = st.integers(0, 10**13)
changes = st.builds(
    AuditEvent, unix_ms=times, by=st.just("owner"), verb=st.sampled_from(sorted(VERBS)), status=st.just(200),
    object=st.sampled_from(["function f", "function team.f", "node vm2", "budget f"]),
)  # fmt: skip
failures = st.builds(
    SystemEvent, unix_ms=times, kind=st.just("failure"), function=st.sampled_from(["f", "g"]), text=st.text()
)
alerts = st.builds(
    BudgetEvent, function=st.just(FunctionName("f")), stage=st.sampled_from(["alert", "spent"]),
    period=st.just("2026-11"), limit_nusd=st.integers(1, 10**12), spent_nusd=st.integers(0, 10**12), unix_ms=times,
)  # fmt: skip


@given(st.lists(changes), st.lists(failures), st.lists(alerts))
def test_all_events_are_one_list_the_newest_first(
    audited: list[AuditEvent], failed: list[SystemEvent], alerted: list[BudgetEvent]
) -> None:
    found = merged_events(audited, failed, alerted)
    assert len(found) == len(audited) + len(failed) + len(alerted)
    assert [event.unix_ms for event in found] == sorted((event.unix_ms for event in found), reverse=True)
    assert all("owner" not in event.text for event in found), "who made a change is for admins"


@given(st.lists(changes), st.sampled_from(["", "f"]))
def test_a_limited_key_sees_no_nodes_and_no_other_function(audited: list[AuditEvent], function: str) -> None:
    events = merged_events(audited, [], [])
    seen = visible_events(events, function, lambda name: name == "f", limited=True)
    assert all(event.kind != "node" and event.function == "f" for event in seen)
    everything = visible_events(events, "", lambda name: True, limited=False)
    assert everything == events


def test_the_verbs_are_those_of_the_audit_log() -> None:
    assert VERBS.keys() <= {endpoint.audit for endpoint in endpoints()}


@pytest.mark.parametrize(("count", "told"), [(1, True), (2, False), (FAILURES_TO_BREAK, True), (9, False)])
def test_the_first_failed_start_in_a_row_is_an_event_and_the_one_that_breaks(count: int, told: bool) -> None:
    failure = Failure(count=count, last_unix_ms=7, error=ErrorInfo(code="start_failed", message="m" * 5000))
    event = failure_event(VersionKey(FunctionName("f"), Version(3)), failure)
    assert (event is not None) == told
    if event is not None:
        assert (event.unix_ms, event.kind, event.function, event.version) == (7, "failure", "f", 3)
        assert ("no more are tried" in event.text) == (count > 1)
        assert len(event.text) < 400
