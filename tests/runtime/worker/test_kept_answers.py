"""Kept answers: calls that outlive a reader, and are read again from the first byte on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER, STREAM_HEADER, TOKEN_HEADER
from fleetstart.runtime.worker import kept_answers
from fleetstart.runtime.worker.kept_answers import KeptAnswers
from fleetstart.runtime.worker_io.asgi import Message, Receive, ResponseAborted, Scope, Send, read_body
from tests.servers import until

EVENTS = [(b"content-type", b"text/event-stream")]


class Reader:
    """A gateway's connection: what it got, and when it leaves."""

    def __init__(self, app: KeptAnswers, wanted: str, *, request: str = "c1", token: str = "t") -> None:
        pairs = ((TOKEN_HEADER, token), (REQUEST_HEADER, request), (STREAM_HEADER, wanted))
        headers = [(name.encode(), value.encode()) for name, value in pairs]
        self.got: list[Message] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self._left = asyncio.Event()
        self._sent = False
        self.task = asyncio.create_task(app({"type": "http", "headers": headers}, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"in", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.hold.wait()
        self.got.append(message)

    async def leave(self) -> None:
        self._left.set()
        await self.task

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])


class Counter:
    """Counts to `steps`, a step at a time; says how it ended."""

    def __init__(self, *, steps: int = 4, size: int = 1, aborts: bool = False) -> None:
        self.steps, self.size, self.aborts = steps, size, aborts
        self.go = asyncio.Semaphore(0)
        self.written = 0
        self.outcome = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert await read_body(receive) == b"in"
        leaving = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for number in range(self.steps):
            step = asyncio.ensure_future(self.go.acquire())
            await asyncio.wait((leaving, step), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.outcome = "gone"
                step.cancel()
                return
            await send({"type": "http.response.body", "body": b"%d" % number * self.size, "more_body": True})
            self.written += 1
        leaving.cancel()
        if self.aborts:
            raise ResponseAborted
        await send({"type": "http.response.body", "body": b""})
        self.outcome = "done"

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self.go.release()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(bounded())


def test_a_stream_goes_on_without_its_reader_and_another_reads_it_from_the_start() -> None:
    async def scenario() -> None:
        app = Counter()
        answers = KeptAnswers(app, token="t")
        first = Reader(answers, "keep")
        app.let(2)
        await until(lambda: first.body == b"01")
        await first.leave()
        app.let(1)
        await until(lambda: app.written == 3)
        second = Reader(answers, "attach")
        await until(lambda: second.body == b"012")
        third = Reader(answers, "attach")
        app.let(1)
        await asyncio.gather(second.task, third.task)
        assert second.got[0] == {"type": "http.response.start", "status": 200, "headers": EVENTS}
        assert (second.body, third.body, second.got[-1]["more_body"]) == (b"0123", b"0123", False)
        after = Reader(answers, "attach")
        await after.task
        assert (after.body, app.outcome) == (b"0123", "done"), "it is kept for a while"

    run(scenario)


def test_a_stream_that_nobody_reads_is_ended_and_forgotten() -> None:
    async def scenario() -> None:
        app = Counter()
        answers = KeptAnswers(app, token="t", unread_s=0.01)
        first = Reader(answers, "keep")
        app.let(1)
        await until(lambda: first.body == b"0")
        await first.leave()
        await until(lambda: app.outcome == "gone")

        async def gone() -> bool:
            reader = Reader(answers, "attach")
            await reader.task
            return reader.status == 502

        while not await gone():
            await asyncio.sleep(0.002)

    run(scenario)


def test_a_handler_is_held_back_and_a_long_stream_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "AHEAD_BYTES", 100)
    monkeypatch.setattr(kept_answers, "KEPT_BYTES", 1000)

    async def scenario() -> None:
        app = Counter(steps=50, size=40)
        answers = KeptAnswers(app, token="t")
        first = Reader(answers, "keep")
        await until(lambda: len(first.got) == 1)
        first.hold.clear()
        app.let(50)
        for _ in range(20):
            await asyncio.sleep(0)
        assert app.written <= 5, "two unread pieces, one in the reader's hand, one that waits"
        first.hold.set()
        await first.task
        assert len(first.body) == sum(40 * len(str(number)) for number in range(50))
        late = Reader(answers, "attach")
        await late.task
        assert (late.status, b"too long" in late.body) == (502, True)

    run(scenario)


def test_what_was_kept_of_ended_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "ALL_KEPT_BYTES", 100)

    async def scenario() -> None:
        answers = KeptAnswers(Counter(steps=1, size=60), token="t")
        app: Any = answers._app
        for request in ("a", "b"):
            reader = Reader(answers, "keep", request=request)
            app.let(1)
            await reader.task
        last = Reader(answers, "keep", request="c")
        app.let(1)
        await last.task
        statuses = []
        for request in ("a", "b"):
            reader = Reader(answers, "attach", request=request)
            await reader.task
            statuses.append(reader.status)
        assert statuses == [502, 502] or statuses == [502, 200]

    run(scenario)


def test_an_answer_that_is_cut_is_cut_for_each_reader() -> None:
    async def scenario() -> None:
        app = Counter(aborts=True)
        answers = KeptAnswers(app, token="t")
        first = Reader(answers, "keep")
        app.let(4)
        with pytest.raises(ResponseAborted):
            await first.task
        second = Reader(answers, "attach")
        with pytest.raises(ResponseAborted):
            await second.task
        assert second.body == b"0123"

    run(scenario)


def test_a_call_that_never_came_is_told_from_one_whose_answer_is_not_kept_any_more() -> None:
    async def scenario() -> None:
        answers = KeptAnswers(Counter(steps=0), token="t", unread_s=-1.0)
        await Reader(answers, "keep").task
        for request, told in (("c1", b"gone"), ("c2", b"unknown")):
            reader = Reader(answers, "attach", request=request)
            await reader.task
            assert dict(reader.got[0]["headers"])[STREAM_HEADER.encode()] == told

    run(scenario)


def test_a_wrong_token_is_left_to_the_gate() -> None:
    async def scenario() -> None:
        asked = []

        async def gate(scope: Scope, receive: Receive, send: Send) -> None:
            asked.append(scope)

        await Reader(KeptAnswers(gate, token="t"), "attach", token="other").task
        assert len(asked) == 1

    run(scenario)
