"""Resume markers: the client gets each event once, in whatever pieces the stream comes and wherever it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.gateway.dispatch.stream_resume import HELD_BYTES, KEPT_BYTES, ResumeMarkers
from fleetstart.runtime.contract.worker_headers import MARK

TEXT = st.text(st.sampled_from("ab: fs-mark\\n{}"), max_size=12).map(str.encode)
EVENT = TEXT.map(lambda text: b"data: " + text + b"\n\n")
UNITS = st.lists(st.tuples(st.lists(EVENT, max_size=3).map(b"".join), TEXT), max_size=8)
"""Events, and the mark behind them."""


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(stream) + 1) for cut in cuts})
    return [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]


def written(units: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(events + MARK + mark + b"\n\n" for events, mark in units)


@given(units=UNITS, end=EVENT, cuts=st.lists(st.integers(0, 10_000), max_size=10))
def test_a_stream_that_ends_as_it_should_is_passed_on_without_its_marks(
    units: list[tuple[bytes, bytes]], end: bytes, cuts: list[int]
) -> None:
    marks = ResumeMarkers()
    got = b"".join(marks.feed(piece) for piece in pieces_of(written(units) + end, cuts)) + marks.flush()
    assert got == b"".join(events for events, _ in units) + end


@given(units=UNITS, lost_at=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 10_000), max_size=10))
def test_of_a_stream_that_breaks_anywhere_the_client_has_what_the_marks_say(
    units: list[tuple[bytes, bytes]], lost_at: int, cuts: list[int]
) -> None:
    stream = written(units)
    marks = ResumeMarkers()
    left = lost_at % (len(stream) + 1)
    got = b"".join(marks.feed(piece) for piece in pieces_of(stream[:left], cuts))
    carried = marks.encode()
    count = max(count for count in range(len(units) + 1) if len(written(units[:count])) <= left)
    assert marks.whole
    assert carried == b"\n".join(mark for _, mark in units[:count])
    assert got == b"".join(events for events, _ in units[:count])
    # The next worker goes on behind that mark, and there is no seam.
    got += b"".join(marks.feed(piece) for piece in pieces_of(written(units[count:]), cuts)) + marks.flush()
    assert got == b"".join(events for events, _ in units)
    assert marks.encode() == b"\n".join(mark for _, mark in units)


def test_what_was_passed_on_without_a_mark_cannot_be_continued() -> None:
    marks = ResumeMarkers()
    assert marks.feed(b"data: 1\n\n" + MARK + b"1\n\ndata: 2\n\n") == b"data: 1\n\n"
    assert marks.whole
    long = b"data: " + b"x" * HELD_BYTES
    assert marks.feed(long) == b"data: 2\n\n" + long
    assert not marks.whole
    assert marks.encode() == b""
    assert marks.feed(b"\n\n" + MARK + b"2\n\n") == b"\n\n"


def test_marks_are_kept_up_to_a_bound() -> None:
    marks = ResumeMarkers()
    mark = b"x" * (HELD_BYTES // 2)
    for count in range(KEPT_BYTES // len(mark)):
        assert marks.whole, count
        assert marks.feed(b"data: 1\n\n" + MARK + mark + b"\n\n") == b"data: 1\n\n"
    marks.feed(MARK + mark + b"\n\n")
    assert not marks.whole
    assert marks.encode() == b""
