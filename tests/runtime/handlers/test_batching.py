"""When a batch is closed, and that callers of one do not hurt each other."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.worker_headers import TOKEN_HEADER
from fleetstart.runtime.handlers.batching import seconds_until_due
from fleetstart.runtime.sdk.decorators import Batching, batched
from tests.runtime.workers import DEADLINE, TOKEN, Functions, Worker, until

RULE = Batching(max_size=4, max_wait_s=0.1)

HANDLERS = """
    import asyncio, functools, threading, time
    from fleetstart.runtime import File, InvalidInput, batched, function, context

    release = threading.Event()

    @function
    @batched(max_size=4, max_wait_ms=10_000)
    def sizes(texts: list[str]) -> list[dict]:
        return [{"text": text, "batch": len(texts)} for text in texts]

    @function
    class Lengths:
        def load(self):
            self.batches = []
        @batched(max_size=3, max_wait_ms=1)
        async def __call__(self, texts: list[str], times: list[int]) -> list[int]:
            await asyncio.sleep(0)
            return [len(text) * n for text, n in zip(texts, times)]

    @batched(max_size=8, max_wait_ms=50)
    def some_fail(numbers: list[int]) -> list[int]:
        return [InvalidInput("odd numbers are not taken") if n % 2 else n for n in numbers]

    @batched(max_size=2, max_wait_ms=0)
    def held(numbers: list[int]):
        print("batch", numbers, flush=True)
        if 0 in numbers:
            time.sleep(1)
        return numbers

    @batched(max_size=2, max_wait_ms=0)
    async def held_async(numbers: list[int]):
        print("batch", numbers, flush=True)
        if 0 in numbers:
            await asyncio.sleep(1)
        return numbers

    @batched(max_size=2, max_wait_ms=10_000)
    def uploads(files: list[File]) -> list[str]:
        print("batch", len(files), flush=True)
        time.sleep(1)
        return [file.content().decode() for file in files]

    def timed(called):
        @functools.wraps(called)
        def wrapper(*arguments, **named):
            return called(*arguments, **named)
        return wrapper

    @timed
    @batched(max_size=2)
    async def decorated(numbers: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [number + 1 for number in numbers]

    @batched(max_size=2)
    def miscounts(numbers: list[int]) -> list[int]:
        return numbers[1:]

    @batched(max_size=2)
    def wrong_type(numbers: list[int]) -> list[str]:
        return ["a" if n else n for n in numbers]

    @batched(max_size=2)
    def in_no_call(numbers: list[int]) -> list[str]:
        return [context.id for n in numbers]

    @batched(max_size=2)
    def streams(numbers: list[int]):
        yield numbers

    @batched(max_size=2)
    def defaulted(numbers: list[int] = []): ...

    @batched(max_size=2)
    def no_list(number: int): ...

    @batched(max_size=2)
    def gives_no_list(numbers: list[int]) -> int: ...
"""


@given(
    waiting=st.integers(0, 10),
    age_s=st.floats(0, 1),
    free_slots=st.integers(0, 5),
    computing=st.booleans(),
)
def test_nobody_waits_longer_than_the_rule_says(waiting: int, age_s: float, free_slots: int, computing: bool) -> None:
    wait_s = seconds_until_due(
        RULE, waiting=waiting, oldest_s=5.0, now_s=5.0 + age_s, free_slots=free_slots, computing=computing
    )
    if computing or not waiting:
        assert wait_s is None
    else:
        assert wait_s is not None
        assert 0 <= wait_s <= RULE.max_wait_s
        if waiting >= RULE.max_size or not free_slots:
            assert wait_s == 0
        assert age_s + wait_s <= max(age_s, RULE.max_wait_s) + 1e-9


@pytest.mark.parametrize("arguments", [{"max_size": 0}, {"max_size": 1001}, {"max_size": 2, "max_wait_ms": -1}])
def test_sizes_that_are_none_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="batched"):
        batched(**arguments)


def test_only_functions_are_batched() -> None:
    with pytest.raises(TypeError, match="above __call__"):
        batched(max_size=2)(type("Class", (), {}))


def together(worker: Worker, values: Sequence[object]) -> list[tuple[int, object]]:
    with ThreadPoolExecutor(len(values)) as pool:
        answers = list(pool.map(worker.post, values))
    return [(answer.status_code, answer.json()) for answer in answers]


def test_calls_that_come_together_are_computed_together(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "sizes", concurrency=8)
    answers = together(worker, [{"texts": text} for text in "abcdefgh"])
    assert sorted((answer["text"], answer["batch"]) for _, answer in answers) == [(text, 4) for text in "abcdefgh"]  # type: ignore[index]


def test_a_batch_does_not_wait_for_calls_that_cannot_come(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "sizes", concurrency=2)
    answers = together(worker, [{"texts": "a"}, {"texts": "b"}])
    assert [answer["batch"] for _, answer in answers] == [2, 2]  # type: ignore[index]


def test_a_class_with_several_lists(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "Lengths", concurrency=5)
    answers = together(worker, [{"texts": "a" * n, "times": 2} for n in range(4)] + [{"texts": 3, "times": 1}])
    assert answers[:4] == [(200, 2 * n) for n in range(4)]
    assert answers[4][0] == 400, "what does not fit comes to no batch"


def test_a_batched_asynchronous_function_may_have_a_decorator(functions: Functions) -> None:
    assert functions.ready(HANDLERS, "decorated", concurrency=2).post({"numbers": 1}).json() == 2


def test_an_item_may_fail_alone(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "some_fail", concurrency=8)
    statuses = [status for status, _ in together(worker, [{"numbers": n} for n in range(6)])]
    assert statuses == [200, 400, 200, 400, 200, 400]


@pytest.mark.parametrize("entry", ["held", "held_async"])
def test_a_caller_that_leaves_hurts_nobody(functions: Functions, entry: str) -> None:
    worker = functions.ready(HANDLERS, entry, concurrency=6)
    kept: list[int] = []
    first = threading.Thread(target=lambda: kept.append(worker.post({"numbers": 0}).status_code))
    first.start()
    until(lambda: "batch [0]" in worker.log(), "first batch")
    # These wait for the next batch: one of them leaves before that, by its deadline.
    late = worker.post({"numbers": 5}, headers={DEADLINE.replace("_", "-"): "50"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert worker.post({"numbers": 7}).json() == 7
    first.join()
    assert kept == [200]
    assert "5" not in worker.log(), "who left is not computed"


def test_the_file_of_a_caller_that_leaves_is_read_with_the_others(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "uploads", concurrency=4)
    kept: list[httpx.Response] = []
    staying = threading.Thread(target=lambda: kept.append(worker.post(body=b"kept")))
    leaving = http.client.HTTPConnection(httpx.URL(worker.url).netloc.decode())
    with contextlib.closing(leaving):
        leaving.request("POST", "/", b"left", {TOKEN_HEADER: TOKEN})
        staying.start()
        until(lambda: "batch 2" in worker.log(), "batch of both")
    staying.join()
    assert (kept[0].status_code, kept[0].json()) == (200, "kept")


def test_a_batch_whose_only_caller_has_left_is_stopped_or_keeps_its_slot(functions: Functions) -> None:
    for entry in ("held", "held_async"):
        worker = functions.ready(HANDLERS, entry, concurrency=2)
        begun_s = time.monotonic()
        assert worker.post({"numbers": 0}, headers={"fs-deadline-ms": "100"}).status_code == 504
        if entry == "held":
            assert time.monotonic() - begun_s > 0.9, "its thread holds the slot, so that a hung one is noticed"
        assert worker.post({"numbers": 1}).json() == 1


def test_what_a_batch_may_not_give(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "miscounts", concurrency=4)
    status, answer = together(worker, [{"numbers": 1}])[0]
    assert status == 500
    assert "given 1 items and returned 0 results" in answer["error"]["message"]  # type: ignore[index]
    worker = functions.ready(HANDLERS, "wrong_type", concurrency=2)
    answers = together(worker, [{"numbers": 1}, {"numbers": 0}])
    assert answers[0] == (200, "a")
    assert answers[1][1]["error"]["code"] == "invalid_output"  # type: ignore[index]
    worker = functions.ready(HANDLERS, "in_no_call", concurrency=2)
    assert "no current call" in worker.post({"numbers": 1}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("streams", "cannot stream"),
        ("defaulted", "has a default"),
        ("no_list", "must be a list"),
        ("gives_no_list", "returns a list"),
    ],
)
def test_a_handler_that_cannot_be_batched_is_told_at_its_start(functions: Functions, entry: str, message: str) -> None:
    error = functions.assigned(HANDLERS, entry, concurrency=2).start_error()
    assert message in error.message
