"""Growth of segments: throttled in the background, and at full speed once all chunks are wanted."""

from __future__ import annotations

import asyncio

from fleetstart.prefetcher.segments.store import SegmentStore
from tests.prefetcher.stages import ONE, Gated, Model, filled, growing, reading, right, run, state, there, until


def test_what_grows_comes_after_the_stage_and_at_a_pace(model: Model, gated: Gated) -> None:
    gated.gate.clear()

    async def scenario(segments: SegmentStore) -> None:
        segment = await segments.acquire(model.checkpoint, ONE, (2, 4))
        growth = asyncio.create_task(segments.grow(segment))
        gated.gate.set()
        await segment.filled.wait()
        span = segment.fetch_span_ns
        await growth
        assert state(segment) == "ready"
        assert segment.fetch_span_ns == span, "the stage's alone"
        assert right(segment, model, model.everything)
        await segments.grow(segment)

    run(gated, scenario)

    stage = model.chunks(2, 4)
    assert set(gated.given[: len(stage)]) == stage
    assert sorted(gated.given) == sorted(model.everything)
    assert gated.paced == model.everything - stage


def test_one_connection_is_used_behind_the_workers_back(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        growth = await growing(segments, segment, gated)
        await until(lambda: reading() == 1, "the end of the threads that filled the stage")
        gated.gate.set()
        await growth

    run(gated, scenario)


def test_a_store_that_is_far_away_is_read_over_more_connections(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        pace = segments.throttle
        pace.set_measured(1e6)
        now_s = 100.0
        while pace.connections() < 3:  # as reads do that wait longer for their bytes than these take
            now_s += 0.1 + pace.delay_s(10_000, now_s)
        pace.set_measured(0.0)  # and here nothing is held back
        gated.gate.clear()
        growth = asyncio.create_task(segments.grow(segment))
        await until(lambda: gated.waiting == 3, "three threads")
        gated.gate.set()
        await growth
        assert right(segment, model, model.everything)

    run(gated, scenario)


def test_what_a_worker_waits_for_comes_at_full_speed_though_nobody_had_asked_for_it(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        wanted = sorted(model.chunks(6, 7))
        gated.gate.clear()
        segments.prioritize(segment, wanted[0], wanted[-1])
        assert state(segment) == "filling"
        gated.gate.set()
        await segment.filled.wait()
        assert there(segment.report()) == model.chunks(0, 1) | set(wanted)
        segments.prioritize(segment, -5, 10_000)
        await segment.filled.wait()
        assert state(segment) == "ready"

    run(gated, scenario)
    assert not gated.paced


def test_when_everything_is_wanted_the_rest_comes_at_full_speed_also_what_was_growing(
    model: Model, gated: Gated
) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        growth = await growing(segments, segment, gated)
        segments.prioritize(segment, 0, len(model.everything))
        assert state(segment) == "filling"
        await until(lambda: gated.waiting == 4, "all threads")
        gated.gate.set()
        await segment.filled.wait()
        await growth
        assert state(segment) == "ready"
        assert right(segment, model, model.everything)

    run(gated, scenario)
    assert not gated.paced
    assert len(gated.given) == len(set(gated.given))


def test_growth_ends_with_the_last_who_waits_for_it_and_goes_on_with_the_next(model: Model, gated: Gated) -> None:
    async def scenario(segments: SegmentStore) -> None:
        segment = await filled(segments, model, ONE, (0, 1))
        gated.gate.clear()
        growths = [asyncio.create_task(segments.grow(segment)) for _ in range(2)]
        await until(lambda: gated.waiting == 1, "a read")
        growths[0].cancel()
        await asyncio.gather(growths[0], return_exceptions=True)
        assert not growths[1].done()
        growths[1].cancel()
        await asyncio.gather(growths[1], return_exceptions=True)
        await until(lambda: not reading(), "the threads' end")
        gated.gate.set()
        assert state(segment) == "partial"
        assert there(segment.report()) == model.chunks(0, 1)
        await segments.grow(segment)
        assert state(segment) == "ready"

    run(gated, scenario)
