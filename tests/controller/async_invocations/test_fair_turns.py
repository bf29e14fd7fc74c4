"""Fair turns of functions with async calls: no function waits for the end of others' backlogs."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations.fair_turns import (
    DELIVERIES_MAX,
    DELIVERIES_OF_ONE,
    FIRST_CALLS,
    LATER_EACH_S,
    LATER_LEAST_S,
    LATER_MOST_S,
    TOGETHER_MAX,
    delivery_turn,
    later_s,
    next_function,
)
from fleetstart.controller.async_invocations.runner import PER_FUNCTION_MAX, InvocationRunner
from fleetstart.controller.async_invocations.store import lifecycle
from fleetstart.controller.async_invocations.store.invocations import InvocationStore, StoredInvocation
from fleetstart.controller.async_invocations.store.payloads import PayloadStore
from fleetstart.controller.async_invocations.store.redis_clock import RedisClock
from fleetstart.controller.async_invocations.submit import AsyncSubmitter
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.process.tasks import end_tasks
from tests.controller.async_invocations.test_stepped_clocks import allowed, envelope, now_ms
from tests.servers import until


class Turns:
    """Functions whose backlogs never end."""

    def __init__(self, *names: str, limit: int = PER_FUNCTION_MAX) -> None:
        self.waiting = [FunctionName(name) for name in names]
        self.running: Counter[FunctionName] = Counter()
        self._limit = limit
        self._begun = 0
        self._last_begun: dict[FunctionName, int] = {}

    def begin(self) -> str | None:
        limits = dict.fromkeys(self.waiting, self._limit)
        name = next_function(self.waiting, self.running, limits, self._last_begun)
        if name is not None:
            self.running[name] += 1
            self._begun += 1
            self._last_begun[name] = self._begun
        return name

    def begin_all(self) -> list[str]:
        return list(iter(self.begin, None))


def test_functions_begin_a_call_each_in_turn() -> None:
    turns = Turns("a", "b", "c", limit=2)
    assert turns.begin_all() == ["a", "b", "c", "a", "b", "c"]
    turns.running[FunctionName("b")] -= 1
    assert turns.begin_all() == ["b"]


def test_a_function_alone_has_as_many_as_it_may() -> None:
    assert len(Turns("a").begin_all()) == PER_FUNCTION_MAX


def test_the_first_call_of_a_function_waits_for_no_backlog() -> None:
    """Two functions with backlogs had all executions, and each refilled its own when a call ended."""
    turns = Turns("a", "b")
    assert len(turns.begin_all()) == TOGETHER_MAX - FIRST_CALLS
    turns.waiting += [FunctionName(f"new-{number:02}") for number in range(FIRST_CALLS)]
    assert turns.begin_all() == turns.waiting[2:]
    assert sum(turns.running.values()) == TOGETHER_MAX


def test_of_more_functions_than_executions_each_has_its_turn() -> None:
    names = [f"f{number:03}" for number in range(3 * TOGETHER_MAX)]
    turns = Turns(*names)
    begun = turns.begin_all()
    while len(begun) < len(names):
        turns.running[FunctionName(begun[-1])] -= 1  # the call that began last ends first
        begun += turns.begin_all()
    assert begun == names


def test_a_runner_full_of_two_backlogs_begins_a_third_functions_call(redis_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        begun: Counter[str] = Counter()

        async def gateway(scope: Any, receive: Any, send: Any) -> None:
            begun[scope["path"]] += 1
            await asyncio.Event().wait()

        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(FolderStore(tmp_path))
            submitter = AsyncSubmitter(invocations, payloads, allowed, RedisClock(client))
            version = SimpleNamespace(spec=SimpleNamespace(scale=SimpleNamespace(max=8), concurrency=4))
            view: Any = SimpleNamespace(live=lambda name: version, async_calls={})
            nothing: Any = None
            runner = InvocationRunner("gw", client, view, invocations, payloads, nothing, gateway, trace=nothing)

            async def accept(number: int, name: str) -> None:
                call = envelope(number, now_ms())
                call = msgspec.structs.replace(call, function=FunctionName(name), target=f"/fn/{name}")
                await submitter.accept(call, b"")

            for number in range(TOGETHER_MAX):
                await accept(2 * number, "a")
                await accept(2 * number + 1, "b")
            parts = [asyncio.create_task(invocations.run()), asyncio.create_task(runner.run())]
            await until(lambda: begun.total() == TOGETHER_MAX - FIRST_CALLS)
            assert begun["/fn/a"] == begun["/fn/b"]
            await accept(2 * TOGETHER_MAX, "c")
            await until(lambda: begun["/fn/c"])
            assert view.async_calls == {"a": TOGETHER_MAX, "b": TOGETHER_MAX, "c": 1}
            await end_tasks(parts)

    asyncio.run(run())


def test_a_delivery_behind_those_of_its_function_makes_way_for_others() -> None:
    a, b = FunctionName("a"), FunctionName("b")
    assert delivery_turn(a, {a: DELIVERIES_OF_ONE - 1}) == "begin"
    assert delivery_turn(a, {a: DELIVERIES_OF_ONE}) == "later", "whether its receiver is slow or not"
    assert delivery_turn(b, {a: DELIVERIES_OF_ONE}) == "begin"
    everyone = {FunctionName(str(number)): 1 for number in range(DELIVERIES_MAX)}
    assert delivery_turn(b, everyone) == "wait"


@given(st.floats(0.0, 10.0), st.integers(1, 3_000))
def test_deliveries_that_are_put_off_are_due_before_there_are_places_for_them(takes_s: float, backlog: int) -> None:
    """Those under way began at even distances, as they do while a backlog is worked off."""
    begun_s = [-takes_s * number / DELIVERIES_OF_ONE for number in range(1, DELIVERIES_OF_ONE + 1)]
    due_s = 0.0
    for _ in range(backlog):
        due_s = later_s(begun_s, due_s, 0.0)
    assert due_s <= LATER_MOST_S
    assert due_s <= LATER_LEAST_S + backlog * max(LATER_EACH_S, takes_s / DELIVERIES_OF_ONE) + 1e-6


def test_webhooks_of_a_function_are_not_behind_those_of_one_whose_receiver_never_answers(
    redis_url: str, tmp_path: Path
) -> None:
    begun: Counter[str] = Counter()
    invocations: Any = None

    class Deliveries:
        """Deliveries; those of "a" have no end."""

        async def deliver(self, entry: StoredInvocation) -> None:
            begun[entry.envelope.function] += 1
            claimed = await invocations.write(entry, lifecycle.delivering(entry.progress, now_ms()))
            if entry.envelope.function == "a":
                await asyncio.Event().wait()
            assert claimed is not None
            done = lifecycle.delivered(claimed.progress, now_ms(), http_status=204, error="")
            assert await invocations.write(claimed, done)

    async def end_with_webhook(number: int, name: str) -> None:
        call = msgspec.structs.replace(envelope(number, now_ms()), function=FunctionName(name), webhook="https://x/")
        assert await invocations.create(call, lifecycle.accepted(call))
        entry = await invocations.require(call.id)
        cancelled = lifecycle.cancelling(entry.progress, call, now_ms())
        assert await invocations.write(entry, cancelled, publish="cancelled")

    async def run() -> None:
        nonlocal invocations
        async with redis.from_url(redis_url) as client:
            invocations, payloads = InvocationStore(client), PayloadStore(FolderStore(tmp_path))
            nothing: Any = None
            webhooks: Any = Deliveries()
            view: Any = SimpleNamespace(async_calls={})
            runner = InvocationRunner("gw", client, view, invocations, payloads, webhooks, nothing, trace=nothing)
            for number in range(5 * DELIVERIES_OF_ONE):
                await end_with_webhook(number, "a")
            parts = [asyncio.create_task(invocations.run()), asyncio.create_task(runner.run())]
            await until(lambda: begun["a"] == DELIVERIES_OF_ONE)
            await end_with_webhook(5 * DELIVERIES_OF_ONE, "b")
            await until(lambda: begun["b"])
            assert begun["a"] == DELIVERIES_OF_ONE
            await end_tasks(parts)

    asyncio.run(run())
