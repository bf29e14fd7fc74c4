from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from fleetstart.client.errors import FleetError, InputFailed, NotFound
from fleetstart.client.mapping import AHEAD, map_calls, map_calls_async


def test_results_come_in_order_with_so_many_calls_at_a_time() -> None:
    all_run = threading.Barrier(4, timeout=10)

    def call(index: int, input: int) -> int:
        if index < 4:
            all_run.wait()  # four at a time are needed to pass it
        return input * 2

    found = map_calls(call, range(100), concurrency=4, return_exceptions=False)
    assert list(found) == [input * 2 for input in range(100)]


def test_inputs_are_taken_as_they_are_needed() -> None:
    taken = []

    def inputs() -> Iterator[int]:
        number = 0
        while True:
            taken.append(number)
            yield number
            number += 1

    found = map_calls(lambda _, input: input, inputs(), concurrency=2, return_exceptions=False)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 3 + AHEAD * 2
    found.close()  # type: ignore[attr-defined]  # a generator


def failing(index: int, input: int) -> int:
    if input == 3:
        raise NotFound("nothing there")
    return input


def test_the_input_that_failed_is_named() -> None:
    with pytest.raises(InputFailed, match=r"input 3, 3: nothing there") as raised:
        list(map_calls(failing, range(9), concurrency=2, return_exceptions=False))
    assert isinstance(raised.value.__cause__, NotFound)


def test_errors_may_be_returned_in_place() -> None:
    found = list(map_calls(failing, range(5), concurrency=2, return_exceptions=True))
    assert [item if isinstance(item, int) else item.index for item in found] == [0, 1, 2, 3, 4]
    assert isinstance(found[3], FleetError)


def test_the_same_for_asyncio_and_what_is_left_is_cancelled() -> None:
    async def main() -> None:
        running = 0
        most = 0

        async def call(index: int, input: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0 if index < 5 else 60)
            finally:
                running -= 1
            return failing(index, input)

        async def inputs() -> AsyncIterator[int]:
            for number in range(50):
                yield number

        found = []

        async def collect() -> None:
            async for item in map_calls_async(call, inputs(), concurrency=3, return_exceptions=False):
                found.append(item)

        with pytest.raises(InputFailed) as raised:
            await collect()
        assert (found, raised.value.index, most, running) == ([0, 1, 2], 3, 3, 0)
        five = map_calls_async(call, range(5), concurrency=3, return_exceptions=True)
        assert [item async for item in five if isinstance(item, int)] == [0, 1, 2, 4]

    asyncio.run(main())


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_concurrency_of_none_is_refused(concurrency: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        next(map_calls(failing, range(1), concurrency=concurrency, return_exceptions=False))
