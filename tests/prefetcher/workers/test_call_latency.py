"""Call latencies that a node reports."""

from __future__ import annotations

from fleetstart.prefetcher.workers.call_latency import COUNT_MAX, VERSIONS_KEPT, CallLatencies
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.speed import Speed

ONE, OTHER = WorkerId("w-1"), WorkerId("w-2")


def speed(calls: int, call_s: float = 1.0) -> Speed:
    return Speed(calls=calls, call_s=call_s, prefill_s=call_s)


def test_calls_of_all_workers_are_counted_once() -> None:
    speeds = CallLatencies()
    speeds.note("f@1", ONE, speed(2))
    speeds.note("f@1", ONE, speed(2))
    speeds.note("f@1", OTHER, speed(3, 0.5))
    assert speeds.report() == {"f@1": speed(5, 0.5)}
    speeds.forget(ONE)
    speeds.note("f@1", ONE, speed(1))
    assert speeds.report()["f@1"].calls == 6


def test_tokens_of_prompts_add_up_over_workers_and_never_fall() -> None:
    speeds = CallLatencies()
    for worker, calls, tokens, cached in ((ONE, 1, 40, 0), (OTHER, 1, 30, 16), (ONE, 2, 90, 32), (ONE, 3, 5, 2**70)):
        one = Speed(calls=calls, call_s=1.0, prefill_s=1.0, prompt_tokens=tokens, cached_tokens=cached)
        speeds.note("f@1", worker, one)
    report = speeds.report()["f@1"]
    assert (report.prompt_tokens, report.cached_tokens) == (120, COUNT_MAX)


def test_versions_that_nobody_calls_make_room() -> None:
    speeds = CallLatencies()
    for number in range(VERSIONS_KEPT):
        speeds.note(f"f@{number}", WorkerId(f"w-{number}"), speed(1))
    speeds.note("f@0", WorkerId("w-0"), speed(2))
    speeds.note("g@1", WorkerId("w-new"), speed(1))
    assert len(speeds.report()) == VERSIONS_KEPT
    assert {"f@0", "g@1"} <= speeds.report().keys()
    assert "f@1" not in speeds.report()


def test_a_latency_is_possible_only_in_the_time_that_there_was() -> None:
    assert speed(1, 1.0).is_possible(1.5)
    for call_s in (2.0, -1.0, float("nan"), float("inf")):
        assert not speed(1, call_s).is_possible(1.5), call_s
