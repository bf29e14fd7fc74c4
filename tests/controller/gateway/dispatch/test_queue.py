"""The queue: order, limit and deadlines; the mean service time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.gateway.dispatch.queue import CallQueue, ServiceTime


@dataclass(eq=False)
class Entry:
    name: str
    deadline_ns: int = 100


def test_first_come_first_served_and_the_handed_back_before_all() -> None:
    queue: CallQueue[Entry] = CallQueue()
    a, b, c = Entry("a"), Entry("b"), Entry("c")
    assert queue.offer(a)
    assert queue.offer(b)
    queue.put_back(c)
    assert [queue.take(0), queue.take(0), queue.take(0), queue.take(0)] == [c, a, b, None]


def test_a_full_queue_sheds_but_takes_back_its_own() -> None:
    queue: CallQueue[Entry] = CallQueue(limit=1)
    assert queue.offer(Entry("a"))
    assert not queue.offer(Entry("b"))
    queue.put_back(Entry("c"))
    assert len(queue) == 2


def test_those_past_their_deadline_are_passed_over() -> None:
    queue: CallQueue[Entry] = CallQueue()
    late, well = Entry("late", 10), Entry("well", 11)
    queue.offer(late)
    queue.offer(well)
    assert queue.take(10) is well


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50))
def test_the_mean_lies_within_what_was_seen(seen: list[float]) -> None:
    service = ServiceTime()
    for took_s in seen:
        service.observe(took_s)
    assert min(seen) - 1e-9 <= service.mean_s <= max(seen) + 1e-9
