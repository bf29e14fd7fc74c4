"""Frames of a shell: what is sent is read, and nothing else is."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.node.shell import EndOfInput, Exit, Size, Start, read_client, read_exit

cells = st.integers(1, 4096)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
sizes = st.builds(Size, cells, cells)
starts = st.builds(
    Start,
    argv=st.lists(texts, max_size=5),
    window=st.none() | sizes,
    term=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,20}", fullmatch=True),
)


@given(starts | sizes | st.just(EndOfInput()))
def test_what_a_client_says_is_read_again(message: Start | Size | EndOfInput) -> None:
    assert read_client(msgspec.json.encode(message).decode()) == message


@pytest.mark.slow
@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner)).map(str))
def test_anything_else_is_refused_in_one_way(text: str) -> None:
    for read in (read_client, read_exit):
        with contextlib.suppress(msgspec.DecodeError):
            read(text)


@pytest.mark.parametrize(
    "text",
    ['{"type":"start","term":"a\\nb"}', '{"type":"start","term":"a\\n"}', '{"type":"start","term":""}',
     '{"type":"start","more":1}', '{"type":"size","rows":4097,"columns":1}', '{"type":"size","rows":1}',
     '{"type":"exit","status":0}', "{}", "null", "\udcff"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_client(text)


@pytest.mark.parametrize("status", [-1, 256])
def test_an_exit_status_is_a_byte(status: int) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_exit(msgspec.json.encode(Exit(status)).decode())
