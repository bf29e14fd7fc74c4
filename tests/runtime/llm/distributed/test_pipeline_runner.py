"""Pipelines of stages give the tokens of the whole model, also while they are consolidated or break."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.llm.distributed.pipeline_runner import FrontDecoder
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from tests.runtime.llm.models import engine, native, run, tiny, tokens_of
from tests.runtime.llm.pipelines import after, generate, pipeline
from tests.servers import wait_until

LAYERS = 5
GREEDY = SamplingParams(temperature=0)
WEIGHTS = tiny(num_hidden_layers=LAYERS)


def request(length: int = 12, new: int = 30, seed: int = 1, **fields: Any) -> Request:
    tokens = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    values: dict[str, Any] = {"sampling": GREEDY, "ignore_eos": True} | fields
    return Request(tokens=tokens, max_new_tokens=new, **values)


def alone(requests: list[Request]) -> list[list[int]]:
    """What the whole model gives, each request by itself."""
    return [tokens_of(run(engine(WEIGHTS, native(WEIGHTS)), [one])[0]) for one in requests]


def cuts_of(bounds: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *bounds, LAYERS]))


def decoders() -> WeakSet[NativeDecoder]:
    """Decoders that are alive."""
    gc.collect()
    return WeakSet(one for one in gc.get_objects() if isinstance(one, NativeDecoder))


cuts = st.lists(st.integers(1, LAYERS - 1), min_size=1, max_size=3, unique=True).map(sorted).map(cuts_of)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(cuts=cuts, lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=10))
def test_every_cut_gives_the_tokens_of_the_whole(cuts: list[tuple[int, int]], lengths: list[tuple[int, int]]) -> None:
    requests = [request(length, new, seed) for seed, (length, new) in enumerate(lengths)]
    with pipeline(WEIGHTS, cuts) as stages:
        found = asyncio.run(generate(stages, requests))
        load = stages.first.app.service.load
        assert load.free_blocks == load.block_count
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


def test_embeddings_along_a_pipeline_are_those_of_the_whole_model() -> None:
    texts = [request(length, 0, length, embeds=True) for length in (1, 30, 280)]
    with pipeline(WEIGHTS, cuts_of([1, 3])) as stages:
        found = asyncio.run(generate(stages, [texts[0], request(), texts[1], request(50), texts[2]]))
    wanted = [run(engine(WEIGHTS, native(WEIGHTS)), [one])[0] for one in texts]
    assert [found[at][-1].embedding for at in (0, 2, 4)] == [deltas[-1].embedding for deltas in wanted]
    assert [tokens_of(found[at]) for at in (1, 3)] == alone([request(), request(50)])


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(cuts=cuts, count=st.integers(1, 8), when=st.integers(0, 150))
def test_consolidation_changes_no_token(cuts: list[tuple[int, int]], count: int, when: int) -> None:
    requests = [request(10 + 40 * seed, 30, seed) for seed in range(count)]
    with pipeline(WEIGHTS, cuts) as stages:
        found = after(stages, requests, min(when, count * 25), stages.consolidate)
        assert stages.whole.wait(20)
        again = asyncio.run(generate(stages, requests[:1]))
        wait_until(lambda: set(stages.ended) == set(range(1, len(cuts))), 5, what="farewells")
        assert set(stages.ended.values()) == {""}
    assert [tokens_of(deltas) for deltas in found] == alone(requests)
    assert tokens_of(again[0]) == tokens_of(found[0])


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_stage_costs_time_and_no_token(lost: int) -> None:
    requests = [request(10 + 30 * seed, 30, seed) for seed in range(4)]
    with pipeline(WEIGHTS, cuts_of([1, 3])) as stages:
        found = after(stages, requests, 40, lambda: stages.kill(lost))
        assert stages.hurried.is_set()
        assert stages.whole.wait(20)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


def test_a_stage_that_is_lost_while_the_first_takes_over_costs_no_token() -> None:
    requests = [request(10 + 30 * seed, 40, seed) for seed in range(4)]

    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        def grow_and_lose() -> None:
            stages.consolidate()
            stages.kill(1)

        found = after(stages, requests, 40, grow_and_lose)
        assert stages.whole.wait(20)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


def test_a_stage_that_is_lost_before_it_is_ready_leaves_a_whole_worker() -> None:
    with pipeline(WEIGHTS, cuts_of([2]), ready=False) as stages:
        stages.kill(1)
        stages.first.wait_until_ready()
        assert stages.hurried.is_set()
        found = asyncio.run(generate(stages, [request()]))
    assert [tokens_of(deltas) for deltas in found] == alone([request()])


def test_later_stages_end_with_the_first() -> None:
    with pipeline(WEIGHTS, cuts_of([1, 3])) as stages:
        stages.first.links.close()
        wait_until(lambda: set(stages.ended) == {1, 2}, 5, what="ends")
        assert all("first stage is lost" in why for why in stages.ended.values())


def test_every_stage_may_grow_into_a_whole_worker() -> None:
    requests = [request(10 + 30 * seed, 30, seed) for seed in range(4)]
    before = decoders()
    with pipeline(WEIGHTS, cuts_of([1, 3])) as stages:
        of_stages = decoders() - before
        assert len(of_stages) == 3

        def consolidate() -> None:
            stages.consolidate_later(1)
            stages.consolidate_later(2)
            stages.consolidate()

        found = after(stages, requests, 30, consolidate)
        wait_until(lambda: stages.grown == {0, 1, 2}, 20, what="whole workers")
        assert not stages.ended, "who has grown stays"
        for later in stages.later:
            assert later.whole_app is not None
            again = asyncio.run(generate(stages, requests, later.whole_app.service))
            assert [tokens_of(deltas) for deltas in again] == alone(requests)
        wait_until(
            lambda: gc.collect() >= 0 and not of_stages, 20, what="layers and KV blocks of the stages to be freed"
        )
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


def test_a_stage_that_grows_outlives_its_pipeline() -> None:
    with pipeline(WEIGHTS, cuts_of([2])) as stages:
        stages.later[0].consolidate()
        stages.first.links.close()
        wait_until(lambda: stages.later[0]._worker.ended, 5, what="the end of the pipeline")
        stages.weights[1].rest.set()
        wait_until(lambda: stages.grown == {1}, 20, what="a whole worker")
        assert not stages.ended


def test_a_stage_that_lost_another_before_it_was_at_work_says_so_first() -> None:
    """Else the first would wait for steps that never come back: its own links all stand."""
    with pipeline(WEIGHTS, cuts_of([1, 3]), ready=False) as stages:
        stages.later[0].links._lose(2, "its cable")
        stages.later[0].wait_until_ready()
        stages.first.wait_until_ready()
        assert stages.hurried.is_set()
        found = asyncio.run(generate(stages, [request()]))
    assert [tokens_of(deltas) for deltas in found] == alone([request()])


class FailsOnce:
    """Decoder of a first stage whose head fails in its sixth step."""

    def __init__(self, front: FrontDecoder) -> None:
        self._front = front
        self._steps = 0
        self.forward, self.normed, self.read_kv = front.forward, front.normed, front.read_kv

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._steps += 1
        if self._steps == 6:
            raise RuntimeError("out of memory")
        return self._front.logits(hidden)


def test_a_failed_step_leaves_no_results_to_the_steps_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    """Other steps were in flight; what the stages give for them arrives later."""
    with pipeline(WEIGHTS, cuts_of([1, 3])) as stages:
        runner = stages.first._pipeline
        runner._front = FailsOnce(runner.front)
        with caplog.at_level(logging.CRITICAL), pytest.raises(HandlerFailed, match="out of memory"):
            asyncio.run(generate(stages, [request(seed=seed) for seed in range(4)]))
        requests = [request(20, 12, seed) for seed in range(5, 9)]
        assert [tokens_of(deltas) for deltas in asyncio.run(generate(stages, requests))] == alone(requests)
