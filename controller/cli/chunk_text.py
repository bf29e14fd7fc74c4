"""Text inside a stream's events: JSON strings and OpenAI's chunks."""

from __future__ import annotations

from typing import Any

import msgspec


def chunk_text(data: str) -> str | None:
    """Text of one event's data: a JSON string, or an OpenAI chunk of chat or completion; None for anything else."""
    try:
        chunk: Any = msgspec.json.decode(data)
        if isinstance(chunk, str):
            return chunk
        choice = chunk["choices"][0]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        return None
    match choice:
        case {"delta": {"content": str(text)}} | {"text": str(text)}:
            return text
        case {"delta": dict()}:
            return ""
    return None
