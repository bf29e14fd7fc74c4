"""What two answers of one request differ by: not by the invocation's id, nor by the bill."""

from __future__ import annotations

from fleetstart.controller.cli.commands.replay import comparable, difference

ERROR = b'{"error": {"code": "handler_error", "message": "ValueError: no"}, "request_id": "ID"}'
STREAM = b'data: 1\n\nevent: fleetstart\ndata: {"request_id": "ID", "billed_ms": BILL}\n\n'


def test_an_error_of_the_same_kind_is_the_same_answer() -> None:
    answers = [comparable(ERROR.replace(b"ID", id.encode()), id) for id in ("inv-1", "inv-2")]
    assert answers[0] == answers[1]
    assert difference(*answers) == []
    other = comparable(ERROR.replace(b"no", b"yes"), "ID")
    assert any("ValueError: yes" in line for line in difference(answers[0], other))


def test_the_bill_of_a_stream_is_no_difference() -> None:
    answers = [
        comparable(STREAM.replace(b"ID", id.encode()).replace(b"BILL", bill), id)
        for id, bill in (("inv-1", b"3"), ("inv-2", b"7"))
    ]
    assert answers[0] == answers[1]
    assert comparable(STREAM.replace(b"data: 1", b"data: 2"), "ID") != answers[0]
