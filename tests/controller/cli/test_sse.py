from __future__ import annotations

import pytest

from fleetstart.controller.cli.sse import ServerSentEvent, chunk_text, parse_events


def test_events_end_at_empty_lines() -> None:
    lines = ["data: a", "data:b", "", ": comment", "event: fs", "id: 3", "data: {}", "", "", "data: last"]
    assert list(parse_events(lines)) == [
        ServerSentEvent("message", "a\nb"),
        ServerSentEvent("fs", "{}"),
        ServerSentEvent("message", "last"),
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('{"choices": [{"delta": {"content": "Hi"}}]}', "Hi"),
        ('{"choices": [{"delta": {"role": "assistant"}}]}', ""),
        ('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', ""),
        ('{"choices": [{"delta": {"content": null}}]}', ""),
        ('{"choices": [{"text": " there"}]}', " there"),
        ('"a piece "', "a piece "),
        ('{"choices": []}', None),
        ('{"choices": 3}', None),
        ('{"n": 1}', None),
        ("[1]", None),
        ("[DONE]", None),
        ("plain", None),
    ],
)
def test_the_text_of_a_chunk(data: str, text: str | None) -> None:
    assert chunk_text(data) == text
