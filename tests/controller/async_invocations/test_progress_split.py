"""Progress and answer that came in one stream: readers get the one, the other is kept as if it had come alone."""

from __future__ import annotations

from base64 import b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations.progress_split import ProgressSplitter, progress_in
from fleetstart.controller.state.invocation_records import MESSAGE_MAX, ReportedProgress
from fleetstart.runtime.contract.errors import ErrorBody, HandlerFailed
from fleetstart.runtime.contract.worker_headers import AnswerHead

PROGRESS = b'event: progress\ndata: {"fraction":0.5,"message":"half"}'
BILL = b'event: fleetstart\ndata: {"billed_ms":3}'


def head(status: int = 201) -> bytes:
    made = AnswerHead(status=status, headers=[("content-type", "image/png")])
    return b"event: answer\ndata: " + msgspec.json.encode(made)


def piece(data: bytes) -> bytes:
    return b"event: piece\ndata: " + b64encode(data)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.lists(st.integers(0, 8), max_size=4))
def test_an_answer_is_put_together_wherever_its_events_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    events = [PROGRESS, PROGRESS, head(), *map(piece, parts), BILL]
    apart, body, shown = ProgressSplitter(), b"", list[bytes]()
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(events)], strict=True):
        seen, more = apart.take(events[begin:end])
        body, shown = body + more, shown + seen
    assert (apart.head, body) == (AnswerHead(status=201, headers=[("content-type", "image/png")]), b"".join(parts))
    assert shown == [PROGRESS, PROGRESS, BILL]


def test_a_stream_is_kept_without_its_progress() -> None:
    apart = ProgressSplitter()
    item = b"id: 1\ndata: {}"
    assert apart.take([PROGRESS, item, head(), PROGRESS, BILL]) == (
        [PROGRESS, item, head(), PROGRESS, BILL],
        b"".join(event + b"\n\n" for event in (item, head(), BILL)),
    ), "an item of that name is the handler's own"
    assert apart.head is None


def test_a_failure_after_progress_is_the_answer() -> None:
    body = msgspec.json.encode(ErrorBody(error=HandlerFailed("after all").info(), request_id="inv-1"))
    apart = ProgressSplitter()
    failure = b"event: error\ndata: " + body
    assert apart.take([PROGRESS, failure]) == ([PROGRESS, failure], body)
    assert apart.head is not None
    assert apart.head.status == 500
    assert ("fs-error", HandlerFailed.code) in apart.head.headers


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"status":99,"headers":[]}', b'{"status":200,"headers":[["a","b\\r\\nc"]]}', b"\xff"]
)
def test_a_head_that_is_none_is_an_item(data: bytes) -> None:
    apart = ProgressSplitter()
    event = b"event: answer\ndata: " + data
    assert apart.take([event]) == ([event], event + b"\n\n")


def test_the_last_progress_is_told() -> None:
    later = b'event: progress\ndata: {"fraction":0.75,"message":"' + b"m" * 1000 + b'"}'
    odd = [b"event: progress\ndata: " + data for data in (b"{}", b'{"fraction":2}', b"\xff", b'{"fraction":"1"}')]
    assert progress_in([PROGRESS, later, b"data: x", *odd], 7) == ReportedProgress(
        fraction=0.75, message="m" * MESSAGE_MAX, unix_ms=7
    )
    assert progress_in([b"data: x", *odd], 7) is None
