"""Numbers of a stream's events: the same however it comes in pieces; what a client has is left out."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations.idempotency import numbered_events
from fleetstart.controller.async_invocations.idempotency.numbered_events import (
    AfterEvent,
    NumberedEvents,
    events_after,
    parse_last_id,
)

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENTS = b"id: 7\ndata: a\n\n: comment\n\nevent: x\r\ndata: b\r\n\r\ndata: c\ndata: d\n\ndata: open end"
NUMBERED = (
    b"id: 1\ndata: a\n\n: comment\n\nid: 2\nevent: x\ndata: b\n\nid: 3\ndata: c\ndata: d\n\nid: 4\ndata: open end\n\n"
)


def sent(pieces: list[bytes], *, count: int = 0, last: int = 0, head: dict[str, Any] = HEAD) -> bytes:
    out = bytearray()

    async def collect(message: Any) -> None:
        out.extend(message.get("body", b""))

    async def scenario() -> None:
        events = NumberedEvents(AfterEvent(collect, last), count=count)
        await events(head)
        for piece in pieces:
            await events({"type": "http.response.body", "body": piece, "more_body": True})
        await events({"type": "http.response.body", "body": b"", "more_body": False})

    asyncio.run(scenario())
    return bytes(out)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=6).map(sorted))
def test_numbers_do_not_depend_on_how_the_bytes_come(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(EVENTS)]
    pieces = [EVENTS[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert sent(pieces) == NUMBERED


@given(st.integers(0, 6))
def test_what_a_client_has_and_what_it_gets_are_the_whole(last: int) -> None:
    rest = sent([EVENTS], last=last)
    assert rest == events_after(NUMBERED, last)
    assert NUMBERED.endswith(rest)
    assert rest.count(b"id: ") == max(0, 4 - last)


def test_a_second_workers_events_are_counted_on() -> None:
    assert sent([b"data: a\n\n"], count=5) == b"id: 6\ndata: a\n\n"


def test_other_answers_and_events_without_an_end_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent([EVENTS], last=2, head={**HEAD, "headers": [(b"content-type", b"text/plain")]}) == EVENTS
    monkeypatch.setattr(numbered_events, "HELD_MAX_BYTES", 100)
    long = b"data: " + b"x" * 200
    assert sent([b"data: a\n\n", long, b"yz\n\ndata: b\n\n"]) == b"id: 1\ndata: a\n\n" + long + b"yz\n\ndata: b\n\n"


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), (" 17 ", 17), ("-1", None), ("x", None), ("9" * 20, None), ("1-2", None), ("", None)]
)
def test_last_event_ids(text: str, number: int | None) -> None:
    assert parse_last_id(text) == number
