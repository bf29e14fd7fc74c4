"""The way to the keys and values of running requests when a pipeline becomes one worker is the sooner one, and no token
changes with either."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.llm.distributed import consolidation
from fleetstart.runtime.llm.distributed.kv_copy import PIECE_TOKENS, ComputedSequence, KvCopyPlan, KvSpan
from fleetstart.runtime.llm.distributed.mode_switch import (
    BATCH_TOKENS,
    LinearCost,
    SwitchChoice,
    batches,
    choose,
    missing_tokens,
    pieces_s,
)
from tests.runtime.llm.distributed.test_pipeline_runner import WEIGHTS, alone, cuts_of, request
from tests.runtime.llm.models import tokens_of
from tests.runtime.llm.pipelines import after, pipeline

seconds = st.floats(0, 10)
missing = st.dictionaries(st.integers(0, 20), st.integers(1, 2000), max_size=8)


@settings(max_examples=50)
@given(missing=missing, copy=st.tuples(seconds, seconds), compute=st.tuples(seconds, seconds))
def test_the_choice_is_never_later_than_either_way_alone(
    missing: dict[int, int], copy: tuple[float, float], compute: tuple[float, float]
) -> None:
    choice = choose(missing, lambda n: copy[0] + copy[1] * n / 100, lambda n: compute[0] + compute[1] * n / 100)
    assert choice.chosen_s <= min(choice.copy_s, choice.recompute_s)
    assert choice.copied <= missing.keys()


def test_tokens_over_their_rate_are_set_against_bytes_over_theirs_and_latency() -> None:
    def of(tokens: int, *, tokens_per_s: float, kv_bytes: int, bytes_per_s: float, latency_s: float) -> SwitchChoice:
        return choose(
            {1: tokens}, lambda count: latency_s + count * kv_bytes / bytes_per_s, lambda count: count / tokens_per_s
        )

    near = of(640, tokens_per_s=400, kv_bytes=46_080, bytes_per_s=1e9, latency_s=0.0002)
    assert near.copied == {1}
    assert near.copy_s == pytest.approx(640 * 46_080 / 1e9 + 10 * 0.0002)
    assert near.recompute_s == pytest.approx(640 / 400)
    slow = of(640, tokens_per_s=400, kv_bytes=46_080, bytes_per_s=7.5e6, latency_s=0.0002)
    assert slow.copied == frozenset()
    far = of(64, tokens_per_s=5000, kv_bytes=46_080, bytes_per_s=1e9, latency_s=0.4)
    assert far.copied == frozenset(), "through the object store each piece waits"


def test_short_requests_may_be_computed_while_long_ones_are_copied() -> None:
    choice = choose({1: 8, 2: 1000}, lambda count: 0.1 + count * 0.0001, lambda count: count * 0.002)
    assert choice.copied == {2}
    assert choice.chosen_s == pytest.approx(8 * 0.002 + 16 * 0.1 + 1000 * 0.0001)


@settings(max_examples=50)
@given(fixed=st.floats(0, 1), each=st.floats(1e-6, 1), sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_a_line_is_found_and_beyond_what_was_measured_none_is_too_low(
    fixed: float, each: float, sizes: list[int]
) -> None:
    cost = LinearCost()
    assert cost.predict_s(1) is None
    for size in sizes:
        cost.observe(size, fixed + each * size)
    within = cost.predict_s(max(sizes))
    assert within is not None
    if max(sizes) >= 4 * min(sizes):
        assert within == pytest.approx(fixed + each * max(sizes), rel=1e-3, abs=1e-6)
    beyond = cost.predict_s(1000)
    assert beyond is not None
    assert beyond >= (fixed + each * 1000) * 0.999 - 1e-6
    tripled = cost.scaled(3.0).predict_s(1000)
    assert tripled == pytest.approx(3 * beyond, rel=1e-6, abs=1e-9)


@settings(max_examples=50)
@given(
    costs=st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0, 1e3)), min_size=1, max_size=20), size=st.floats(1, 1e7)
)
def test_no_measurement_predicts_less_than_nothing(costs: list[tuple[float, float]], size: float) -> None:
    cost = LinearCost()
    for one in costs:
        cost.observe(*one)
    predicted = cost.predict_s(size)
    assert predicted is not None
    assert predicted >= 0.0


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 700), max_size=8))
def test_batches_have_every_token_once_and_each_request_in_order(lengths: list[int]) -> None:
    sequences = [
        ComputedSequence(id, tuple(range(100 * id, 100 * id + 100)), length) for id, length in enumerate(lengths)
    ]
    spans = KvCopyPlan(16).missing(sequences)
    assert missing_tokens(spans) == dict(enumerate(lengths))
    done = dict.fromkeys(range(len(lengths)), 0)
    for batch in batches(spans):
        assert 0 < sum(span.end - span.begin for span in batch) <= BATCH_TOKENS
        assert len({span.id for span in batch}) == len(batch)
        for span in batch:
            assert span.begin == done[span.id], "what it attends to is there"
            done[span.id] = span.end
    assert done == dict(enumerate(lengths))


def test_pieces_of_a_request_are_joined_in_a_batch() -> None:
    spans = [KvSpan(1, (), at, at + PIECE_TOKENS) for at in range(0, 3 * PIECE_TOKENS, PIECE_TOKENS)]
    assert batches(spans) == [[KvSpan(1, (), 0, 3 * PIECE_TOKENS)]]
    assert pieces_s(0, 64, lambda count: 1.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copied", "computed", "both"])
@settings(max_examples=3, deadline=None)
@given(stages=st.sets(st.integers(1, 4), min_size=1), when=st.integers(4, 100))
def test_no_token_changes_whichever_way_they_come(way: str, stages: set[int], when: int) -> None:
    def chosen(missing: dict[int, int], *predictions: object) -> SwitchChoice:
        some = {"copied": set(missing), "computed": set(), "both": {id for id in missing if id % 2}}[way]
        return SwitchChoice(frozenset(some), 1.0, 2.0, 1.0)

    requests = [request(10 + 40 * seed, 100, seed) for seed in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consolidation, "choose", chosen)
        with pipeline(WEIGHTS, cuts_of(sorted(stages))) as running:
            found = after(running, requests, when, running.consolidate)
            assert running.whole.wait(60)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)
    [switch] = running.switches
    assert switch.possible
    assert way != "copied" or not switch.recomputed_tokens
    assert way != "computed" or switch.copied_tokens <= PIECE_TOKENS, "the first piece tells what others would cost"
