"""What an engine tells of how long its requests take."""

from __future__ import annotations

import pytest

from fleetstart.runtime.contract.errors import DeadlineExceeded
from fleetstart.runtime.llm.engine.generation import TokenDelta
from fleetstart.runtime.llm.engine.latency_stats import LatencyStats

MS = 1_000_000


def token(id: int, *, last: bool = False) -> TokenDelta:
    return TokenDelta(id=id, tokens=(7,), finish="stop" if last else None)


def test_the_first_token_and_those_after_it_are_told_apart() -> None:
    speeds = LatencyStats()
    speeds.add(1, 100 * MS, stages=1)
    speeds.record([], 200 * MS, stages=1)
    speeds.record([token(1)], 300 * MS, stages=1)
    speeds.record([token(1)], 340 * MS, stages=1)
    assert speeds.mean is None, "it has not ended"
    speeds.record([token(1, last=True)], 360 * MS, stages=1)
    assert speeds.mean is not None
    assert (speeds.mean.calls, speeds.mean.stages) == (1, 1)
    assert speeds.mean.prefill_s == pytest.approx(0.2)
    assert speeds.mean.decode_s == pytest.approx(0.03)
    assert speeds.mean.call_s == pytest.approx(0.26)


def test_an_answer_of_one_token_tells_nothing_of_the_others() -> None:
    speeds = LatencyStats()
    for id in range(2):
        speeds.add(id, 0, stages=1)
        speeds.record([token(id, last=True)], 50 * MS, stages=1)
    assert speeds.mean is not None
    assert (speeds.mean.calls, speeds.mean.decode_s) == (2, None)


def test_what_was_cut_or_failed_is_not_counted() -> None:
    speeds = LatencyStats()
    for id in range(3):
        speeds.add(id, 0, stages=1)
    speeds.discard(0)
    speeds.record([token(0), token(1)], 10 * MS, stages=1)
    speeds.record(
        [TokenDelta(id=1, error=DeadlineExceeded("late")), TokenDelta(id=2, finish="stop")], 20 * MS, stages=1
    )
    assert speeds.mean is None


def test_a_pipeline_and_the_worker_that_it_became_are_not_mixed() -> None:
    speeds = LatencyStats()
    for id, (stages, end_ms) in enumerate([(4, 400), (1, 100)]):
        speeds.add(id, 0, stages=stages)
        speeds.record([token(id, last=True)], end_ms * MS, stages=stages)
    speeds.add(9, 0, stages=4)
    speeds.record([token(9, last=True)], 999 * MS, stages=1)
    assert speeds.mean is not None
    assert (speeds.mean.calls, speeds.mean.stages, speeds.mean.prefill_s) == (2, 1, 0.1)


def test_a_prompt_that_was_cached_does_not_shorten_the_time_that_a_start_is_predicted_to_take() -> None:
    speeds = LatencyStats()
    for id, (cached, first_ms) in enumerate(((0, 200), (32, 10), (0, 400))):
        speeds.add(id, 0, stages=1, prompt_tokens=48)
        delta = TokenDelta(id=id, tokens=(7,), cached_tokens=cached, finish="stop")
        speeds.record([delta], first_ms * MS, stages=1)
    assert speeds.mean is not None
    assert (speeds.mean.prompt_tokens, speeds.mean.cached_tokens) == (144, 32)
    assert speeds.mean.prefill_s >= 0.2
