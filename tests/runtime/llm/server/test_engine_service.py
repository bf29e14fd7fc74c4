"""The engine's thread and its streams: who leaves frees the blocks, who closes tells everyone."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import DeadlineExceeded, HandlerFailed, InvalidInput, Unavailable
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.server.engine_service import DeltaStream, EngineService
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.models import Checkpoint, engine, native, run, tokens_of
from tests.servers import until, wait_until

WAIT_S = 20.0


def request(new: int = 400, deadline_ns: int | None = None) -> Request:
    greedy = SamplingParams(temperature=0)
    return Request(tokens=[5, 6, 7], max_new_tokens=new, sampling=greedy, ignore_eos=True, deadline_ns=deadline_ns)


@contextmanager
def serving(weights: Checkpoint) -> Iterator[tuple[EngineService, Engine]]:
    subject = engine(weights, native(weights))
    service = EngineService(subject)
    try:
        yield service, subject
    finally:
        service.close()
    assert not any(thread.name == "llm-engine" for thread in threading.enumerate())


async def until_idle(subject: Engine) -> None:
    await until(lambda: subject.idle, WAIT_S)
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count


async def collect(stream: DeltaStream) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {}
    async with stream, asyncio.timeout(WAIT_S):
        async for index, delta in stream:
            got.setdefault(index, []).extend(delta.tokens)
    return got


def test_streams_bring_what_the_engine_gives(tiny_model: Checkpoint) -> None:
    wanted = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(12)])[0])

    async def main(service: EngineService) -> None:
        one, two = await asyncio.gather(collect(service.open([request(12)])), collect(service.open([request(12)] * 3)))
        assert one == {0: wanted}
        assert two == {0: wanted, 1: wanted, 2: wanted}
        assert service.active_count == 0

    with serving(tiny_model) as (service, _):
        asyncio.run(main(service))


def test_a_request_waits_while_the_weights_are_released(tiny_model: Checkpoint) -> None:
    wanted = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(12)])[0])

    async def main(service: EngineService) -> None:
        await asyncio.to_thread(service.release)
        waiting = asyncio.create_task(collect(service.open([request(12)])))
        await asyncio.to_thread(service.release)
        assert not waiting.done()
        await asyncio.to_thread(service.regain)
        assert await waiting == {0: wanted}

    subject = load_engine(tiny_model, LLMSettings(kv_memory_bytes=1 << 20, max_context_tokens=64), threads=1).engine
    service = EngineService(subject)
    try:
        asyncio.run(main(service))
    finally:
        service.close()
    with pytest.raises(Unavailable, match="closed"):
        service.release()


def test_leaving_a_stream_frees_its_blocks(tiny_model: Checkpoint) -> None:
    async def main(service: EngineService, subject: Engine) -> None:
        async with asyncio.timeout(WAIT_S), service.open([request(), request()]) as stream:
            await anext(stream)
        await until_idle(subject)
        assert service.active_count == 0

    with serving(tiny_model) as (service, subject):
        asyncio.run(main(service, subject))


def test_a_cancelled_reader_frees_its_blocks(tiny_model: Checkpoint) -> None:
    async def main(service: EngineService, subject: Engine) -> None:
        reader = asyncio.create_task(collect(service.open([request()])))
        await until(lambda: not subject.idle, WAIT_S)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until_idle(subject)

    with serving(tiny_model) as (service, subject):
        asyncio.run(main(service, subject))


def test_closing_tells_everyone_and_ends_the_thread(tiny_model: Checkpoint) -> None:
    async def main(service: EngineService) -> None:
        readers = [asyncio.create_task(collect(service.open([request()]))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(service.close)
        for reader in readers:
            with pytest.raises(Unavailable):
                await reader
        with pytest.raises(Unavailable):
            service.open([request()])

    with serving(tiny_model) as (service, _):
        asyncio.run(main(service))


def test_errors_reach_the_reader(tiny_model: Checkpoint) -> None:
    async def main(service: EngineService) -> None:
        with pytest.raises(InvalidInput, match="context"):
            service.open([request(), request(100_000)])
        with pytest.raises(DeadlineExceeded):
            await collect(service.open([request(deadline_ns=time.monotonic_ns())]))
        assert len((await collect(service.open([request(3)])))[0]) == 3
        assert service.active_count == 0

    with serving(tiny_model) as (service, _):
        asyncio.run(main(service))


def test_a_thread_that_fails_tells_those_who_wait(tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Event()

    def fail() -> None:
        assert asked.wait(WAIT_S)
        raise ValueError("no such device")

    async def main(service: EngineService) -> None:
        stream = service.open([request()])
        asked.set()
        with pytest.raises(HandlerFailed, match="no such device"):
            await collect(stream)
        with pytest.raises(Unavailable):
            service.open([request()])

    service = EngineService(engine(tiny_model, native(tiny_model)), prepare=fail)
    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main(service))
    service.close()


class RefusesLate:
    """An engine that refuses requests which it has checked; one that has not is a bug."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Request, id: int) -> int:
        if request.max_new_tokens == 7:
            raise InvalidInput("no room")
        if request.max_new_tokens == 8:
            raise ValueError("a bug")
        return self._engine.add(request, id)


def test_a_request_that_cannot_be_added_fails_alone(tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    async def main(service: EngineService) -> None:
        running = asyncio.create_task(collect(service.open([request()])))
        for new, error, says in ((7, InvalidInput, "no room"), (8, HandlerFailed, "a bug")):
            with pytest.raises(error, match=says):
                await collect(service.open([request(new)]))
        assert len((await running)[0]) == 400
        assert len((await collect(service.open([request(3)])))[0]) == 3
        assert service.active_count == 0

    subject: Any = RefusesLate(engine(tiny_model, native(tiny_model)))
    service = EngineService(subject)
    try:
        with caplog.at_level(logging.CRITICAL):
            asyncio.run(main(service))
    finally:
        service.close()


def test_a_loop_that_is_gone_does_not_keep_the_engine_busy(tiny_model: Checkpoint) -> None:
    async def leave(service: EngineService) -> None:
        service.open([request()])  # never read, and the loop is closed under it

    with serving(tiny_model) as (service, subject):
        asyncio.run(leave(service))
        wait_until(lambda: subject.idle and subject.scheduler.idle, WAIT_S, what="an idle engine")
