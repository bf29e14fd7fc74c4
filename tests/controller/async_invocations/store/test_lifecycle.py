"""What becomes of an invocation, whatever happens to it: laws of the transitions, without a process in sight."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.lifecycle import LEASE_MS, LOSSES_MAX, RunOutcome
from fleetstart.controller.state.invocation_records import MOMENTS_MAX, Answer, Envelope, Progress, RunsBill, run_id
from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId

BEGUN = 1_000_000


def envelope(**fields: object) -> Envelope:
    values: dict[str, object] = {
        "id": InvocationId("inv-1"), "function": FunctionName("f"), "method": "POST", "target": "/fn/f", "headers": [],
        "body_bytes": 0, "fingerprint": "", "accepted_unix_ms": BEGUN, "queue_s": 60, "ttl_s": 600, **fields,
    }  # fmt: skip
    return msgspec.convert(values, Envelope)


def answer(status: int = 200) -> Answer:
    return Answer(claim=1, http_status=status, headers=[], body_bytes=0)


def error(code: str, **fields: object) -> ErrorInfo:
    return msgspec.convert({"code": code, "message": "no", **fields}, ErrorInfo)


def running(call: Envelope) -> Progress:
    return lifecycle.claimed(lifecycle.accepted(call), "gw", BEGUN)


OUTCOMES = st.one_of(
    st.builds(RunOutcome, answer=st.sampled_from([answer(200), answer(404), answer(500)])),
    st.builds(
        RunOutcome,
        error=st.sampled_from(
            [error(code) for code in ("worker_lost", "unavailable", "queue_full", "handler_error", "store_error")]
        ),
    ),
    st.just(RunOutcome()),
)
EVENTS = st.lists(st.one_of(OUTCOMES, st.sampled_from(["cancel", "die", "renew", "wait"])), max_size=60)


def row(billed_ms: int, cost_nusd: int) -> InvocationRow:
    return InvocationRow(
        id=InvocationId("inv-1"), function=FunctionName("f"), version=Version(3), accepted_unix_ms=BEGUN, status=502,
        worker=WorkerId("w" * bool(billed_ms)), queue_ms=0, billed_ms=billed_ms, memory_bytes=1, cost_nusd=cost_nusd,
    )  # fmt: skip


def test_its_bill_is_that_of_all_its_runs() -> None:
    """Such as streams that their own worker ended, and that were then repeated."""
    call = envelope()
    lost = lifecycle.ended(running(call), call, RunOutcome(error=error("worker_lost"), row=row(300, 5)), BEGUN)
    again = lifecycle.claimed(lost, "gw", BEGUN)
    stopped = lifecycle.ended(again, call, RunOutcome(row=row(200, 3)), BEGUN)
    assert (stopped.status, stopped.bill) == ("cancelled", RunsBill(billed_ms=500, cost_nusd=8, version=3, start="hot"))
    redriven = lifecycle.claimed(lifecycle.redriven(stopped, call, BEGUN), "gw", BEGUN)
    ended = lifecycle.ended(redriven, call, RunOutcome(answer=answer(), row=row(100, 2)), BEGUN)
    assert ended.bill == RunsBill(billed_ms=600, cost_nusd=10, version=3, start="hot")
    assert lifecycle.ended(running(call), call, RunOutcome(), BEGUN).bill is None, "no run has a row"
    unsent = lifecycle.ended(running(call), call, RunOutcome(row=row(0, 0)), BEGUN).bill
    assert unsent == RunsBill(billed_ms=0, cost_nusd=0, version=3, start=""), "no worker took it"


@given(EVENTS, st.booleans())
def test_it_ends_once_and_stays_as_it_ended(events: list[RunOutcome | str], hook: bool) -> None:
    call = envelope(webhook="https://example.com" if hook else "")
    progress, now = lifecycle.accepted(call), BEGUN
    ends, claims = list[Progress](), 0
    for event in events:
        now += 100
        before = progress
        if progress.ended:
            assert lifecycle.cancelling(progress, call, now) == progress
            assert lifecycle.due_unix_ms(progress) is None
            break
        match lifecycle.next_step(progress, now):
            case "claim":
                progress = lifecycle.claimed(progress, "gw", now)
                assert progress.claims == claims + 1, "each claim has a number of its own"
                claims = progress.claims
            case "expire":
                progress = lifecycle.expired(progress, call, now)
            case "cancel":
                progress = lifecycle.ended(progress, call, RunOutcome(), now)
        if progress.ended:
            pass
        elif event == "cancel":
            progress = lifecycle.cancelling(progress, call, now)
        elif event == "die":
            now += LEASE_MS + 1
        elif event == "wait":
            now += 1_000
        elif progress.status == "running":
            progress = (
                lifecycle.renewed(progress, now)
                if event == "renew"
                else lifecycle.ended(progress, call, event, now)
                if isinstance(event, RunOutcome)
                else progress
            )
        assert progress.losses <= LOSSES_MAX
        assert len(progress.moments) <= MOMENTS_MAX
        assert progress.runs >= before.runs
        if progress.ended:
            ends.append(progress)
            assert (lifecycle.timer_unix_ms(progress) is not None) == hook
            assert progress.finished_unix_ms == now
    assert len(ends) <= 1


@given(st.sampled_from(["worker_lost", "unavailable", "store_error"]))
def test_what_the_platform_loses_is_a_dead_letter_in_the_end(code: str) -> None:
    call, runs = envelope(queue_s=86_400), 0
    progress, now, waits = lifecycle.accepted(call), BEGUN, list[int]()
    while not progress.ended:
        now = max(now, progress.due_unix_ms)
        progress = lifecycle.claimed(progress, "gw", now)
        runs += 1
        progress = lifecycle.ended(progress, call, RunOutcome(error=error(code)), now)
        waits.append(progress.due_unix_ms - now)
    assert (progress.status, progress.dead, runs, progress.runs) == ("failed", True, LOSSES_MAX, LOSSES_MAX)
    assert waits[:-1] == sorted(waits[:-1]), "each wait is longer than the one before"
    again = lifecycle.redriven(progress, call, now)
    assert (again.status, again.losses, again.dead, again.claims) == ("queued", 0, False, progress.claims)
    assert again.runs == progress.runs + 1, "each run has a row of its own in the ledger"


def test_each_end_has_a_message_id_of_its_own_which_its_deliveries_share() -> None:
    """Receivers drop what has an id that they know, and so that a redriven call had succeeded after all."""
    call = envelope()
    failed = lifecycle.ended(running(call), call, RunOutcome(error=error("handler_error")), BEGUN)
    told = lifecycle.delivering(failed, BEGUN)
    again = lifecycle.claimed(lifecycle.redriven(told, call, BEGUN), "gw", BEGUN)
    ended = lifecycle.ended(again, call, RunOutcome(answer=answer()), BEGUN)
    ids = [lifecycle.message_id(one, call) for one in (failed, told, ended, lifecycle.redelivered(ended, BEGUN))]
    assert ids == [call.id, call.id, f"{call.id}.redrive-1", f"{call.id}.redrive-1"]


@pytest.mark.parametrize("code", ["worker_lost", "store_error"])
def test_a_lost_run_is_made_again_however_long_it_took(code: str) -> None:
    """It expired at once if its run alone was longer than it could wait: by default those of an hour."""
    call = envelope(queue_s=60)
    late = BEGUN + 7_200_000
    lost = lifecycle.ended(running(call), call, RunOutcome(error=error(code)), late)
    assert lifecycle.next_step(lost, lost.due_unix_ms) == "claim"
    assert lifecycle.next_step(lost, lost.due_unix_ms + 60_000) == "expire"


def test_a_full_queue_counts_for_nothing_until_the_time_is_over() -> None:
    call = envelope(queue_s=60)
    progress, now = lifecycle.accepted(call), BEGUN
    for _ in range(200):
        now = max(now, progress.due_unix_ms)
        if lifecycle.next_step(progress, now) == "expire":
            break
        progress = lifecycle.claimed(progress, "gw", now)
        progress = lifecycle.ended(progress, call, RunOutcome(error=error("queue_full", retry_after_s=2)), now)
        assert (progress.status, progress.losses) == ("queued", 0)
        assert progress.due_unix_ms >= now + 2_000
    ended = lifecycle.expired(progress, call, now)
    assert ended.status == "expired"
    assert now >= BEGUN + 60_000


@pytest.mark.parametrize("code", ["unavailable", "deadline_exceeded"])
def test_a_run_that_no_worker_took_is_no_loss(code: str) -> None:
    """While the only node was away calls became dead letters; a start longer than `timeout_s` failed them."""
    call = envelope(queue_s=3_600)
    progress, now, waits = lifecycle.accepted(call), BEGUN, list[int]()
    while lifecycle.next_step(progress, now) != "expire":
        progress = lifecycle.claimed(progress, "gw", now)
        unsent = RunOutcome(answer=answer(503), error=error(code), sent=False)
        progress = lifecycle.ended(progress, call, unsent, now)
        assert (progress.status, progress.losses, progress.dead) == ("queued", 0, False)
        waits.append(progress.due_unix_ms - now)
        now = progress.due_unix_ms
    assert waits == sorted(waits)
    assert now >= BEGUN + 3_600_000
    assert waits[-1] == (lifecycle.BACKOFF_MAX_MS if code == "unavailable" else lifecycle.BACKOFF_MS)
    expired = lifecycle.expired(progress, call, now)
    assert (expired.status, expired.error, expired.dead) == ("expired", error(code), False)


@pytest.mark.parametrize(("code", "losses"), [("unavailable", 1), ("deadline_exceeded", 0)])
def test_a_run_at_a_worker_ends_as_it_did(code: str, losses: int) -> None:
    call = envelope()
    ended = lifecycle.ended(running(call), call, RunOutcome(answer=answer(503), error=error(code)), BEGUN)
    assert (ended.status, ended.losses) == ("queued" if losses else "failed", losses)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (RunOutcome(answer=answer(200)), "succeeded"),
        (RunOutcome(answer=answer(302)), "succeeded"),
        (RunOutcome(answer=answer(404)), "failed"),
        (RunOutcome(answer=answer(500), error=error("handler_error")), "failed"),
        (RunOutcome(), "cancelled"),
    ],
)
def test_what_the_handler_answers_ends_it(outcome: RunOutcome, status: str) -> None:
    call = envelope()
    ended = lifecycle.ended(running(call), call, outcome, BEGUN + 5)
    assert (ended.status, ended.dead) == (status, False)
    assert lifecycle.kept_until_unix_ms(ended, call) == BEGUN + 5 + 600_000


@pytest.mark.parametrize("code", ["worker_lost", "too_large", "deadline_exceeded"])
def test_a_cancelled_run_without_an_answer_is_cancelled_however_it_broke_off(code: str) -> None:
    call = envelope()
    progress = lifecycle.cancelling(running(call), call, BEGUN + 1)
    cut = lifecycle.ended(progress, call, RunOutcome(error=error(code)), BEGUN + 5)
    assert (cut.status, cut.error, cut.losses) == ("cancelled", None, 0)
    refused = RunOutcome(answer=answer(503), error=error(code), sent=False)
    assert lifecycle.ended(progress, call, refused, BEGUN + 5).status == "cancelled"
    answered = lifecycle.ended(progress, call, RunOutcome(answer=answer(200)), BEGUN + 5)
    assert answered.status == "succeeded", "it had ended when it was to be cancelled"


def test_a_gateway_is_taken_for_dead_when_its_lease_is_over_and_no_sooner() -> None:
    progress = running(envelope())
    assert lifecycle.next_step(progress, BEGUN + LEASE_MS - 1) is None
    assert lifecycle.next_step(progress, BEGUN + LEASE_MS) == "claim"
    taken = lifecycle.claimed(progress, "other", BEGUN + LEASE_MS)
    assert (taken.claims, taken.runs, taken.gateway) == (2, 1, "other")
    cancelled = lifecycle.cancelling(progress, envelope(), BEGUN + 1)
    assert cancelled.status == "running"
    assert lifecycle.next_step(cancelled, BEGUN + LEASE_MS) == "cancel"


def test_webhooks_are_tried_ever_later_and_given_up_at_last() -> None:
    call = envelope(webhook="https://example.com")
    progress = lifecycle.ended(running(call), call, RunOutcome(answer=answer()), BEGUN)
    now, waits = BEGUN, list[int]()
    while lifecycle.timer_unix_ms(progress) is not None:
        now = max(now, lifecycle.timer_unix_ms(progress) or 0)
        assert lifecycle.next_step(progress, now) == "deliver"
        assert lifecycle.kept_until_unix_ms(progress, call) > now, "whatever its time to live"
        progress = lifecycle.delivering(progress, now)
        assert lifecycle.next_step(progress, now) is None, "one at a time"
        progress = lifecycle.delivered(progress, now, http_status=500, error="HTTP 500")
        waits.append((lifecycle.timer_unix_ms(progress) or now) - now)
    assert progress.delivery is not None
    assert (progress.delivery.state, progress.delivery.tries) == ("failed", lifecycle.DELIVERIES_MAX)
    assert waits[:-1] == sorted(waits[:-1])
    again = lifecycle.redelivered(progress, now)
    done = lifecycle.delivered(lifecycle.delivering(again, now), now, http_status=204, error="")
    assert done.delivery is not None
    assert (done.delivery.state, done.delivery.tries, done.status) == ("delivered", 1, "succeeded")
    assert lifecycle.kept_until_unix_ms(done, call) == BEGUN + 600_000


def test_runs_have_ids_of_their_own() -> None:
    assert run_id(InvocationId("inv-1"), 1) == "inv-1"
    assert run_id(InvocationId("inv-1"), 3) == "inv-1.3"
