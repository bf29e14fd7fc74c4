"""Running requests that go on at another worker: the same tokens, whoever stops, leaves or dies."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.llm.distributed import stages as stages_module
from fleetstart.runtime.llm.distributed.consolidation import Consolidation
from fleetstart.runtime.llm.distributed.request_migration import WORTH_TOKENS, choose_migrations
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from tests.runtime.llm.distributed.test_pipeline_runner import LAYERS, WEIGHTS, alone, cuts_of, request
from tests.runtime.llm.engine.test_constraint import compiled
from tests.runtime.llm.models import tokens_of
from tests.runtime.llm.pipelines import Stages, after, generate, pipeline
from tests.servers import wait_until


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no gateway whose calls could come first, and a tiny model's requests are soon done."""
    monkeypatch.setattr(stages_module, "FIRST_CALLS_S", 0.0)


def migrated(stages: Stages, index: int) -> int:
    """Requests of the first stage that a later one computes."""
    app = stages.later[index - 1].whole_app
    return app.service.load.migrated_in if app is not None else 0


def settled(stages: Stages) -> None:
    """Every block of every whole worker is free again."""
    apps = [stages.first.app, *(later.whole_app for later in stages.later if later.whole_app is not None)]

    def free() -> bool:
        loads = [app.service.load for app in apps]
        return all(load.free_blocks == load.block_count for load in loads)

    wait_until(free, 10, what="free blocks")


@pytest.mark.slow
@pytest.mark.parametrize("first_grows", [False, True])
def test_requests_that_move_keep_their_tokens(first_grows: bool) -> None:
    sampled = SamplingParams(temperature=0.9, seed=7, presence_penalty=0.5, logit_bias=((70, 3.0), (71, -100.0)))
    requests = [request(10 + 20 * seed, 150, seed) for seed in range(6)]
    requests += [request(20, 150, 6 + seed, sampling=sampled) for seed in range(2)]
    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        def consolidate() -> None:
            stages.consolidate_later(1)
            if first_grows:
                stages.consolidate()

        def watch() -> None:
            consolidate()
            wait_until(lambda: migrated(stages, 1) == 4, 20, what="four to have moved")

        found = after(stages, requests, 20, watch)
        settled(stages)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)
    assert all(deltas[-1].finish == "length" for deltas in found)


def test_a_worker_that_dies_with_a_request_costs_no_token() -> None:
    requests = [request(10 + 20 * seed, 200, seed) for seed in range(4)]
    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        def lend_and_kill() -> None:
            stages.consolidate()
            stages.consolidate_later(1)
            wait_until(lambda: migrated(stages, 1) == 2, 20, what="two to have moved")
            stages.kill(1)

        found = after(stages, requests, 20, lend_and_kill)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


def test_a_stage_lost_between_two_steps_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is under way that could tell of it, and the last keys and values are not copied."""
    requests = [request(10 + 20 * seed, 100, seed) for seed in range(4)]
    take_over = Consolidation._take_over
    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        def late(self: Consolidation, engine: Engine, whole: Any) -> None:
            stages.kill(1)
            wait_until(lambda: self._parts.pipeline.broken, 20, what="a broken pipeline")
            take_over(self, engine, whole)

        monkeypatch.setattr(Consolidation, "_take_over", late)
        found = after(stages, requests, 20, stages.consolidate)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)


@pytest.mark.slow
def test_requests_with_a_grammar_keep_their_tokens_while_others_may_move() -> None:
    constraint = compiled({"type": "array", "items": {"type": "integer"}, "minItems": 90})
    sampled = SamplingParams(temperature=0.9, seed=3)
    requests = [replace(request(10, 150, seed, sampling=sampled), constraint=constraint) for seed in range(2)]
    requests += [replace(request(10, 150, 5, sampling=sampled), logprobs=1)]
    requests += [request(10 + 20 * seed, 150, seed) for seed in range(5)]
    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        def consolidate() -> None:
            stages.consolidate_later(1)
            stages.consolidate()

        found = after(stages, requests, 8, consolidate)
        settled(stages)
    assert [tokens_of(deltas) for deltas in found] == alone(requests)
    assert [len(delta.logprobs) for delta in found[2]] == [1] * 150


@pytest.mark.slow
def test_requests_with_a_grammar_stay_and_hold_up_no_consolidation() -> None:
    """They cannot move. Both workers are whole while they still run, and their answers end within the grammar."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 120, "maxItems": 120}
    sampled = SamplingParams(temperature=0.9, seed=3)
    bound = [replace(request(10, 450, seed, sampling=sampled), constraint=compiled(schema)) for seed in range(3)]
    wanted = alone(bound)
    with pipeline(WEIGHTS, cuts_of([2])) as stages:
        still_running: list[int] = []

        def consolidate() -> None:
            stages.consolidate_later(1)
            stages.consolidate()
            wait_until(lambda: stages.whole.is_set() and 1 in stages.grown, 20, what="two whole workers")
            still_running.append(stages.first.app.service.load.active)

        found = after(stages, bound, 8, consolidate)
        assert migrated(stages, 1) == 0
        other = asyncio.run(generate(stages, [request(20, 20, 9)], stages.later[0].whole_app.service))  # type: ignore[union-attr]
        settled(stages)
    assert still_running == [3]
    assert [tokens_of(deltas) for deltas in found] == wanted
    assert [tokens_of(deltas) for deltas in other] == alone([request(20, 20, 9)])
    for deltas in found:
        text = "".join(delta.text for delta in deltas)
        assert deltas[-1].finish == "length" or len(json.loads(text)) == 120


def test_a_client_that_leaves_frees_the_other_workers_blocks() -> None:
    requests = [request(10, 400, seed) for seed in range(4)]
    with pipeline(WEIGHTS, cuts_of([2])) as stages:

        async def leave() -> None:
            async with stages.first.app.service.open(requests) as stream:
                async for _ in stream:
                    stages.consolidate_later(1)
                    await asyncio.to_thread(wait_until, lambda: migrated(stages, 1) == 2, 20, what="two to have moved")
                    return

        asyncio.run(leave())
        settled(stages)
        assert not migrated(stages, 1)


def test_a_stop_and_an_end_are_the_owners_to_see() -> None:
    text = "".join(delta.text for delta in generate_alone(request(20, 120, 3)))
    stop = text[60:64]
    plain = request(20, 120, 3, stops=[stop])
    with pipeline(WEIGHTS, cuts_of([LAYERS - 1])) as stages:
        others = [request(10, 150, seed) for seed in range(3)]

        def start_remote() -> None:
            stages.consolidate_later(1)
            wait_until(lambda: migrated(stages, 1) == 2, 20, what="two to have moved")

        found = after(stages, [plain, *others], 8, start_remote)
        settled(stages)
    assert "".join(delta.text for delta in found[0]) == text[: text.index(stop)]
    assert found[0][-1].finish == "stop"


def generate_alone(one: Any) -> Any:
    from tests.runtime.llm.models import engine, native, run

    return run(engine(WEIGHTS, native(WEIGHTS)), [one])[0]


@given(
    running=st.lists(st.integers(1, 100), max_size=20),
    lent=st.dictionaries(st.integers(1, 3), st.integers(0, 10), min_size=1),
)
def test_who_goes(running: list[int], lent: dict[int, int]) -> None:
    to = min(lent)
    requests = list(enumerate(running))
    chosen = choose_migrations(requests, lent, to)
    assert len(set(chosen)) == len(chosen)
    assert all(running[id] >= WORTH_TOKENS for id in chosen)
    fair = (len(running) + sum(lent.values())) // (len(lent) + 1)
    assert len(running) - len(chosen) >= min(len(running), fair)
    assert not chosen or lent[to] + len(chosen) <= fair
