from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.sse import ServerSentEvent, parse_events

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
WRITTEN = st.lists(st.tuples(TEXT.filter(bool), st.lists(TEXT, min_size=1, max_size=3)), max_size=5)


def test_events_end_at_empty_lines() -> None:
    text = b"data: a\ndata:b\n\n: comment\r\nevent: fs\r\nid: 3\r\ndata: {}\r\n\r\n\n\ndata: last"
    assert list(parse_events([text])) == [
        ServerSentEvent("message", "a\nb"),
        ServerSentEvent("fs", "{}", "3"),
        ServerSentEvent("message", "last"),
    ]


@given(WRITTEN, st.integers(1, 9))
def test_what_is_written_as_events_is_read_as_them_in_blocks_of_any_size(
    written: list[tuple[str, list[str]]], size: int
) -> None:
    lines: list[str] = []
    for name, data in written:
        lines += [f"event: {name}", *(f"data: {piece}" for piece in data), ""]
    text = "".join(f"{line}\n" for line in lines).encode()
    blocks = [text[at : at + size] for at in range(0, len(text), size)]
    assert list(parse_events(blocks)) == [ServerSentEvent(name, "\n".join(data)) for name, data in written]
