"""Frames between peers: what one end encodes the other decodes; anything else is refused."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.node.peer_frames import (
    ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    MAX_WAIT_MS,
    REQUEST_BYTES,
    AnswerHeader,
    ReadRequest,
    Received,
    Status,
    decode_answer,
    decode_request,
)

words = st.integers(0, 2**64 - 1)
requests = st.builds(
    ReadRequest,
    request=words,
    offset=words,
    size_bytes=st.integers(1, MAX_REQUEST_BYTES),
    wait_ms=st.integers(0, MAX_WAIT_MS),
    outstanding=st.integers(0, 2**32 - 1),
)
receipts = st.builds(Received, outstanding=st.integers(0, 2**32 - 1), leaves=st.booleans())
answers = st.one_of(
    st.builds(AnswerHeader, request=words, status=st.just("ok"), size_bytes=st.integers(1, 2**64 - 1)),
    st.builds(AnswerHeader, request=words, status=st.sampled_from(get_args(Status)[1:])),
)


@given(requests | receipts, answers)
def test_frames_come_back_as_they_were_encoded(asked: ReadRequest | Received, answer: AnswerHeader) -> None:
    assert decode_request(asked.encode()) == asked
    assert decode_answer(answer.encode()) == answer


@given(st.binary(max_size=60), requests | receipts, answers, st.integers(0, 39), st.integers(1, 255))
def test_other_bytes_are_a_frame_or_a_value_error(
    noise: bytes, asked: ReadRequest | Received, answer: AnswerHeader, at: int, flip: int
) -> None:
    for decode, frame in ((decode_request, asked.encode()), (decode_answer, answer.encode())):
        place = at % len(frame)
        for bytes_ in (noise, frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :]):
            with contextlib.suppress(ValueError):
                decode(bytes_)


@pytest.mark.parametrize("size", [0, 1, ANSWER_BYTES - 1, ANSWER_BYTES + 1, REQUEST_BYTES - 1, REQUEST_BYTES + 1])
def test_frames_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="bytes, not"):
        decode_request(bytes(size))
    with pytest.raises(ValueError, match="bytes, not"):
        decode_answer(bytes(size))
