"""Tests of the checker: histories that are right pass, and each made-up wrong one is refused by its rule."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import DEPLOYED_S, REVOKED_S, RULES, check
from tests.chaos.history import (
    Answered,
    AnyEvent,
    Deployed,
    Fault,
    Invoked,
    Kind,
    Led,
    Ran,
    Recorder,
    Revoked,
    Row,
    Settled,
    Streamed,
    decode,
)

COST = "0.000000010"


def good(
    number: int, *, kind: Kind = "sync", at_s: float = 0.0, gateway: str = "gateway-0", version: int = 1
) -> list[AnyEvent]:
    """A call that went well: asked, run, answered."""
    call, request, ticket = f"c{number}", f"r{number}", f"t{number}"
    key = f"k{number}" if kind == "keyed" else ""
    answer = Answered(
        at_s=at_s + 0.2, call=call, status=202 if kind == "async" else 200, request=request, version=version,
        run=0 if kind == "async" else number, ticket="" if kind == "async" else ticket,
        cost="" if kind == "async" else COST,
    )  # fmt: skip
    return [
        Invoked(at_s=at_s, call=call, kind=kind, gateway=gateway, request=request, ticket=ticket, key=key),
        Ran(at_s=at_s + 0.1, run=number, ticket=ticket, request=request, version=version),
        answer,
        *([Settled(at_s=at_s + 9, request=request, status="succeeded", run=number)] if kind == "async" else []),
    ]


def rows_of(history: list[AnyEvent]) -> list[Row]:
    ran = [event for event in history if isinstance(event, Ran)]
    return [Row(id=run.request, status=200, version=run.version, cost=COST) for run in ran]


def refused_by(history: list[AnyEvent], rows: list[Row] | None = None) -> set[str]:
    return {finding.rule for finding in check(history, rows_of(history) if rows is None else rows)}


def changed(event: AnyEvent, **changes: object) -> AnyEvent:
    return msgspec.structs.replace(event, **changes)


def again(history: list[AnyEvent], *, at_s: float, run: int) -> list[AnyEvent]:
    """The same keyed call once more, which runs again: as invocation and run of another number."""
    asked, ran, answer = history[:3]
    return [
        changed(asked, at_s=at_s, call=f"again{run}", request=f"ragain{run}"),
        changed(ran, at_s=at_s + 0.1, run=run, request=f"ragain{run}"),
        changed(answer, at_s=at_s + 0.2, call=f"again{run}", request=f"ragain{run}", run=run),
    ]


@pytest.mark.parametrize("kind", ["sync", "keyed", "async"])
def test_what_went_well_has_no_findings(kind: Kind) -> None:
    assert refused_by(good(1, kind=kind)) == set()


def test_each_rule_has_a_wrong_history_below() -> None:
    text = Path(__file__).read_text()
    assert [rule.__name__ for rule in RULES if text.count(f'"{rule.__name__}"') == 0] == []


# ── wrong histories ────────────────────────────────────────────────────────────────────────────────


def test_a_row_twice_is_found() -> None:
    history = good(1)
    assert refused_by(history, rows_of(history) * 2) == {"one_row_a_run"}


def test_a_run_without_a_row_is_found() -> None:
    assert refused_by(good(1)[:2], []) == {"one_row_a_run"}


def test_a_run_has_no_row_only_if_its_gateway_was_killed_while_redis_took_no_writes() -> None:
    history = good(1)
    history[2] = changed(history[2], status=0, run=0)
    killed = Fault(at_s=0.15, healed_s=1, kind="kill", targets=["gateway-0"])
    full = Fault(at_s=-2, healed_s=1, kind="full disk", targets=["redis"])
    assert refused_by([killed, full, *history], []) == set()
    for faults in ([killed], [full], [full, changed(killed, targets=["gateway-1"])]):
        assert refused_by([*faults, *history], []) == {"one_row_a_run"}
    history[2] = changed(history[2], status=200)
    assert "one_row_a_run" in refused_by([killed, full, *history], [])


@pytest.mark.parametrize("change", [{"status": 502}, {"version": 2}, {"cost": "0.5"}])
def test_a_row_that_says_something_else_than_the_answer_is_found(change: dict[str, object]) -> None:
    history = good(1)
    assert refused_by(history, [msgspec.structs.replace(rows_of(history)[0], **change)]) == {"each_answer_billed_once"}


def test_two_gateways_may_name_two_costs_of_a_keyed_call_if_the_first_one_was_silent() -> None:
    silent = Fault(at_s=0.05, healed_s=4.05, kind="part", targets=["gateway-0", "control"])
    for kind, faults, found in (
        ("keyed", [silent], set()),
        ("keyed", [], {"each_answer_billed_once"}),
        ("keyed", [changed(silent, healed_s=1)], {"each_answer_billed_once"}),
        ("sync", [silent], {"each_answer_billed_once"}),
    ):
        history = good(1, kind=kind)  # type: ignore[arg-type]
        rows = [msgspec.structs.replace(rows_of(history)[0], cost="0.5")]
        assert refused_by([*faults, *history], rows) == found, (kind, faults)


def test_an_answer_without_a_row_is_found() -> None:
    history = good(1)
    del history[1]
    history[1] = changed(history[1], run=0)
    assert refused_by(history, []) == {"each_answer_billed_once"}


@pytest.mark.parametrize("change", [{"run": 7}, {"ticket": "t9"}])
def test_an_answer_of_no_run_and_an_answer_of_another_call_are_found(change: dict[str, object]) -> None:
    history = good(1)
    history[2] = changed(history[2], **change)
    assert refused_by(history) == {"answers_are_of_runs"}


def test_a_call_that_ran_twice_is_found() -> None:
    history = good(1)
    history.insert(2, changed(history[1], run=2))
    assert refused_by(history, rows_of(history)[:1]) == {"sync_calls_run_once"}


def test_a_key_that_ran_twice_is_found_also_beside_faults_of_nodes_and_of_redis() -> None:
    history = good(1, kind="keyed")
    history += again(history, at_s=1, run=2)
    faults = [
        Fault(at_s=0, healed_s=20, kind="kill", targets=["node-0"]),
        Fault(at_s=0, healed_s=20, kind="stop", targets=["redis"]),
        Fault(at_s=0, healed_s=20, kind="part", targets=["gateway-0", "node-0"]),
    ]
    assert refused_by([*faults, *history]) == {"one_run_a_key", "one_answer_a_key", "a_second_run_is_told"}


def test_a_key_may_run_again_after_an_answer_that_is_not_kept() -> None:
    history = good(1, kind="keyed")
    history[2] = changed(history[2], status=502, run=0)
    history += again(history, at_s=1, run=2)
    history[-1] = changed(history[-1], status=200, run=2)
    rows = rows_of(history)
    rows[0] = msgspec.structs.replace(rows[0], status=502)
    assert refused_by(history, rows) == set()


def test_a_run_that_was_told_to_be_lost_may_come_after_the_next() -> None:
    history = good(1, kind="keyed")
    lost = changed(history[1], at_s=5.0, run=3, request="rlost")
    rows = [*rows_of(history), Row(id="rlost", status=502, version=1, cost=COST)]
    assert refused_by([*history, lost], rows) == set()
    rows[-1] = msgspec.structs.replace(rows[-1], status=200)
    assert refused_by([*history, lost], rows) == {"one_run_a_key"}


def test_a_key_may_run_again_if_its_gateway_was_stopped_for_longer_than_the_claim() -> None:
    history = good(1, kind="keyed")
    history[2] = changed(history[2], status=0, run=0)
    history += again(history, at_s=7, run=2)
    history[-1] = changed(history[-1], status=200, run=2)
    history[-1] = changed(history[-1], retaken=True)
    short, long = (Fault(at_s=0.05, healed_s=0.05 + s, kind="stop", targets=["gateway-0"]) for s in (8, 11))
    assert refused_by([short, *history]) == {"one_run_a_key"}
    assert refused_by([long, *history]) == set()
    history[-1] = changed(history[-1], retaken=False)
    assert refused_by([long, *history]) == {"a_second_run_is_told"}


def test_two_answers_to_one_key_are_found() -> None:
    history = good(1, kind="keyed")
    history += again(history, at_s=1, run=2)
    rows = rows_of(history)
    rows[0] = msgspec.structs.replace(rows[0], status=502)  # which lets it run again, and not be answered twice
    assert refused_by(history, rows) >= {"one_answer_a_key"}


def test_two_leaders_of_one_fence_are_found() -> None:
    history: list[AnyEvent] = [Led(at_s=1, fence=3, gateway="a"), Led(at_s=2, fence=3, gateway="b")]
    assert refused_by(history) == {"one_leader_a_fence"}


def test_a_fence_that_falls_is_found() -> None:
    history: list[AnyEvent] = [Led(at_s=1, fence=3, gateway="a"), Led(at_s=2, fence=2, gateway="b")]
    assert refused_by(history) == {"one_leader_a_fence"}


def test_a_lease_that_lapsed_and_changed_hands_is_well() -> None:
    history: list[AnyEvent] = [
        Led(at_s=1, fence=3, gateway="a"),
        Led(at_s=2, fence=3, gateway=""),
        Led(at_s=3, fence=4, gateway="b"),
    ]
    assert refused_by(history) == set()


def probe(*, at_s: float, revoked_s: float = 10.0) -> list[AnyEvent]:
    asked = Invoked(at_s=at_s, call="p", kind="probe", gateway="gateway-0", request="p", ticket="", token="app")
    return [Revoked(at_s=revoked_s, token="app"), asked, Answered(at_s=at_s + 0.1, call="p", status=200)]


def test_a_revoked_key_that_is_taken_after_the_bound_is_found() -> None:
    assert refused_by(probe(at_s=10 + REVOKED_S + 0.1)) == {"revoked_is_refused"}
    assert refused_by(probe(at_s=10 + REVOKED_S - 0.1)) == set()


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        (Fault(at_s=9, healed_s=14, kind="part", targets=["gateway-0", "control"]), True),
        (Fault(at_s=9, healed_s=14, kind="part", targets=["gateway-1", "control"]), False),
        (Fault(at_s=9, healed_s=14, kind="part", targets=["gateway-0", "node-0"]), False),
        (Fault(at_s=9, healed_s=14, kind="stop", targets=["redis"]), True),
        (Fault(at_s=9, healed_s=14, kind="readonly", targets=["redis"]), False),
        (Fault(at_s=1, healed_s=4, kind="stop", targets=["redis"]), False),
    ],
)
def test_a_gateway_that_cannot_read_redis_is_excused_until_it_can(fault: Fault, excused: bool) -> None:
    assert refused_by([fault, *probe(at_s=14 + REVOKED_S - 0.5)]) == (set() if excused else {"revoked_is_refused"})
    assert refused_by([fault, *probe(at_s=14 + REVOKED_S + 0.5)]) == {"revoked_is_refused"}


def test_a_version_that_goes_back_at_one_gateway_is_found_at_once() -> None:
    history = good(1, version=2) + good(2, at_s=0.3, version=1)
    assert refused_by(history) == {"versions_never_go_back"}
    assert refused_by(good(1, version=2) + good(2, at_s=0.1, version=1)) == set(), "they overlap"
    assert refused_by(good(1, version=2) + good(2, at_s=0.3, version=1, gateway="gateway-1")) == set()


def test_an_old_version_long_after_the_deploy_is_found_at_any_gateway() -> None:
    deployed = Deployed(at_s=1, version=2, function="work")
    assert refused_by([deployed, *good(1, at_s=1 + DEPLOYED_S + 0.1)]) == {"versions_never_go_back"}
    assert refused_by([deployed, *good(1, at_s=1 + DEPLOYED_S - 0.1)]) == set()


@pytest.mark.parametrize("end", [None, "failed", "running", ""])
def test_an_accepted_call_that_did_not_succeed_is_found(end: str | None) -> None:
    history = good(1, kind="async")
    settled = history.pop()
    if end is not None:
        history.append(changed(settled, status=end))
    assert refused_by(history) == {"no_accepted_call_lost"}


@pytest.mark.parametrize("told", [{"code": "handler_error"}, {"code": "worker_lost", "dead_letter": True}])
def test_a_handlers_error_and_a_dead_letter_are_ends_that_are_told(told: dict[str, object]) -> None:
    history = good(1, kind="async")
    history[-1] = changed(history[-1], status="failed", **told)
    assert refused_by(history) == set()


def test_an_accepted_call_that_never_ran_is_found() -> None:
    history = good(1, kind="async")
    del history[1]
    assert refused_by(history, []) == {"no_accepted_call_lost"}


@pytest.mark.parametrize(
    ("got", "whole"),
    [(["0", "2"], False), (["1"], False), (["0", "0"], False), (["0", "1"], True), (["0", "1", "2", "3"], False)],
)
def test_a_wrong_a_missing_and_a_second_token_are_found(got: list[str], whole: bool) -> None:
    stream = Streamed(at_s=1, call="s", expected=["0", "1", "2"], got=got, whole=whole)
    assert refused_by([stream]) == {"no_token_wrong"}


def test_a_stream_that_was_cut_is_well() -> None:
    assert refused_by([Streamed(at_s=1, call="s", expected=["0", "1", "2"], got=["0"], whole=False)]) == set()


# ── laws ───────────────────────────────────────────────────────────────────────────────────────────

KINDS: st.SearchStrategy[Kind] = st.sampled_from(["sync", "keyed", "async"])


@st.composite
def right_histories(draw: st.DrawFn) -> list[AnyEvent]:
    """Calls that went well, side by side or one after another, at gateways that know all versions at once."""
    history: list[AnyEvent] = []
    at_s, version = 0.0, 1
    for number in range(1, draw(st.integers(1, 12)) + 1):
        at_s += draw(st.floats(0.3, 5))
        if draw(st.booleans()):
            version += 1
            history.append(Deployed(at_s=at_s, version=version, function="work"))
        gateway = draw(st.sampled_from(["gateway-0", "gateway-1"]))
        history += good(number, kind=draw(KINDS), at_s=at_s + 0.01, gateway=gateway, version=version)
    return history


@given(right_histories())
def test_right_histories_have_no_findings(history: list[AnyEvent]) -> None:
    assert check(history, rows_of(history)) == []


@given(right_histories(), st.randoms(use_true_random=False))
def test_a_row_that_is_lost_or_doubled_is_always_found(history: list[AnyEvent], chance: random.Random) -> None:
    rows = rows_of(history)
    at = chance.randrange(len(rows))
    assert check(history, rows[:at] + rows[at + 1 :])
    assert check(history, [*rows, rows[at]])


@given(right_histories(), st.randoms(use_true_random=False))
def test_an_answer_that_is_swapped_with_another_is_always_found(history: list[AnyEvent], chance: random.Random) -> None:
    at = [number for number, event in enumerate(history) if isinstance(event, Answered) and event.run]
    if len(at) < 2:
        return
    one, other = chance.sample(at, 2)
    first, second = history[one], history[other]
    assert isinstance(first, Answered)
    assert isinstance(second, Answered)
    history[one] = changed(first, run=second.run, ticket=second.ticket)
    assert check(history, rows_of(history))


@given(right_histories())
def test_a_history_survives_its_file(tmp_path_factory: pytest.TempPathFactory, history: list[AnyEvent]) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    recorder = Recorder(path)
    for event in history:
        recorder.write(event)
    recorder.close()
    assert decode(path.read_bytes().splitlines()) == history
