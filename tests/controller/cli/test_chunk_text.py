from __future__ import annotations

import pytest

from fleetstart.controller.cli.chunk_text import chunk_text


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
