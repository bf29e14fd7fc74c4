"""Events of a kept stream: cut as the standard says, numbered, and read on from any of them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import RedisError

from fleetstart.controller.async_invocations.store import event_log
from fleetstart.controller.async_invocations.store.event_log import (
    EVENTS_MAX,
    START,
    EventId,
    EventLog,
    EventsGone,
    EventSplitter,
    check_reachable,
    parse_event_id,
    without_id,
)
from fleetstart.controller.state.redis_client import connect
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.ids import InvocationId

LINES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20).map(lambda x: "data: " + x)


@given(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=10), st.lists(st.integers(0, 400), max_size=10))
def test_events_are_the_same_however_the_bytes_are_cut(events: list[list[str]], cuts: list[int]) -> None:
    stream = b"".join("\n".join(lines).encode() + b"\n\n" for lines in events)
    splitter, found, begin = EventSplitter(), list[bytes](), 0
    for cut in sorted(cuts):
        found += splitter.feed(stream[begin:cut])
        begin = max(begin, cut)
    found += splitter.feed(stream[begin:]) + splitter.end()
    assert found == ["\n".join(lines).encode() for lines in events]


def test_an_event_without_end_is_searched_once() -> None:
    """Each piece was searched from the event's begin: 14 s for 16 MiB."""
    splitter, searched = EventSplitter(), 0
    piece = b"data: " + b"x" * 65_530

    class Counted:
        def search(self, data: bytearray, begin: int) -> None:
            nonlocal searched
            searched += len(data) - begin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "_END", Counted())
        for _ in range(256):
            assert splitter.feed(piece) == []
    assert searched < 2 * 256 * len(piece)
    assert splitter.end() == [piece * 256]


def test_ids_of_the_handler_are_replaced_by_ours() -> None:
    splitter = EventSplitter()
    found = splitter.feed(b"id: 7\nevent: token\ndata: a\n\nid\n\ndata: one\r\ndata: two\r\n\r\ndata: ha")
    assert [without_id(event) for event in found] == [b"event: token\ndata: a", b"", b"data: one\ndata: two"]
    assert splitter.end() == [b"data: ha"]


@pytest.mark.parametrize("text", ["", "7", "1-", "-1", "1-2-3", "a-b", "1" * 20 + "-1", "1-2\n1-3"])
def test_an_id_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_event_id(text)


@pytest.mark.parametrize(
    ("last", "first", "gone"),
    [
        (START, None, False),
        (START, EventId(1, 1), False),
        (START, EventId(1, 2), True),
        (EventId(1, 4), EventId(1, 5), False),
        (EventId(1, 3), EventId(1, 5), True),
        (EventId(1, 9), EventId(1, 5), False),
        (EventId(1, 9), EventId(2, 1), False),
        (EventId(1, 9), EventId(2, 2), True),
    ],
)
def test_a_gap_is_told(last: EventId, first: EventId | None, gone: bool) -> None:
    if gone:
        with pytest.raises(EventsGone):
            check_reachable(last, first)
    else:
        check_reachable(last, first)


def test_the_buffer_keeps_the_last_ones_and_refuses_an_old_claim(redis_url: str) -> None:
    async def run() -> None:
        client = connect(redis_url)
        log = EventLog(client, InvocationId("inv-1"))
        await log.append(1, 1, [b"data: %d" % number for number in range(EVENTS_MAX + 10)])
        assert await log.first() == EventId(1, 11)
        assert await log.last() == EventId(1, EVENTS_MAX + 10)
        await log.append(1, EVENTS_MAX + 10, [b"data: written twice"])
        await log.append(2, 1, [b"data: again"])
        await log.append(1, EVENTS_MAX + 11, [b"data: of a gateway that was given up"])
        assert await log.last() == EventId(2, 1)
        page = await log.after(EventId(1, EVENTS_MAX + 9))
        assert [event.data for event in page] == [b"data: %d" % (EVENTS_MAX + 9), b"data: again"]
        assert page[1].encoded() == b"id: 2-1\ndata: again\n\n"
        await client.aclose()

    asyncio.run(run())


def test_events_that_redis_had_no_memory_for_are_written_later(redis_url: str) -> None:
    """Refused events were taken for events that are there already, and missing for good."""

    async def run() -> None:
        client = connect(redis_url)
        log = EventLog(client, InvocationId("inv-1"))
        await log.append(1, 1, [b"data: one"])
        await client.config_set("maxmemory", 1)
        try:
            with pytest.raises(RedisError):
                await log.append(1, 2, [b"data: two", b"data: three"])
        finally:
            await client.config_set("maxmemory", 0)
        await log.append(1, 2, [b"data: two", b"data: three"])
        assert [event.data for event in await log.after(START)] == [b"data: one", b"data: two", b"data: three"]
        await client.aclose()

    asyncio.run(run())
