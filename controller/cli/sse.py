"""Parser of server-sent events, and of the text inside OpenAI's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    name: str
    data: str


def parse_events(lines: Iterable[str]) -> Iterator[ServerSentEvent]:
    """Parses lines into events. An empty line ends an event; comments and unknown fields are skipped (WHATWG HTML)."""
    name, data = "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerSentEvent(name, "\n".join(data))
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    if data:
        yield ServerSentEvent(name, "\n".join(data))


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
