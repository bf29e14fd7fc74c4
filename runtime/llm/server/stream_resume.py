"""What a stream needs to go on at another worker, as marks between its events, and how it is read there.

Tokens are the state (ServerlessLLM section 5.2): keys and values, text, stops and draws all follow from them, from the
prompt, which comes with the call itself, and from what the first worker chose: id, time, seeds, limits. The gateway
keeps the marks and brings them back behind the body of the call (`headers.MARK`, `CONTINUE_HEADER`); nobody else can.
They are checked nonetheless: a worker computes nothing that it would refuse from a client.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...contract.errors import InvalidInput
from ...contract.worker_headers import CONTINUE_HEADER, MARK
from ..engine.generation import Request
from .requests import SEED_BITS

CARRIED_MAX_BYTES = 4 << 20
"""Twice what a gateway keeps."""
CREATED_MAX_S = 1 << 40
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first worker chose for the call, and for each of its choices."""

    id: str
    created_s: int
    seeds: list[int | None]
    limits: list[int]
    """Most new tokens: where the call does not say, they follow from a worker's memory."""


class _ResumeMark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tokens: list[tuple[int, list[int]]]
    """(choice, its tokens since the last mark)."""
    chosen: StreamSettings | None = None
    """In the first one."""


_DECODER = msgspec.json.Decoder(_ResumeMark)


def chosen(id: str, created_s: int, requests: Sequence[Request]) -> StreamSettings:
    """For a stream that begins here. Draws that nobody gave a seed get one, so that they can be made again."""
    seeds = [
        secrets.randbits(SEED_BITS) if one.sampling.seed is None and not one.sampling.greedy else one.sampling.seed
        for one in requests
    ]
    return StreamSettings(id, created_s, seeds, [one.max_new_tokens for one in requests])


def as_chosen(requests: Sequence[Request], by: StreamSettings) -> list[Request]:
    return [
        replace(one, max_new_tokens=limit, sampling=replace(one.sampling, seed=seed))
        for one, seed, limit in zip(requests, by.seeds, by.limits, strict=True)
    ]


class ResumeMarkWriter:
    """Writes the marks of one stream."""

    def __init__(self, first: StreamSettings | None) -> None:
        """`first` is None for a stream that goes on here: it has been said already."""
        self._first = first
        self._tokens: dict[int, list[int]] = {}

    def saw(self, choice: int, tokens: Sequence[int]) -> None:
        self._tokens.setdefault(choice, []).extend(tokens)

    def mark(self) -> bytes:
        """To be written right behind the event that it stands for."""
        said = _ResumeMark(list(self._tokens.items()), self._first)
        self._tokens, self._first = {}, None
        return MARK + msgspec.json.encode(said) + b"\n\n"


class ResumedStream(msgspec.Struct, frozen=True):
    """A stream that began elsewhere, as its marks tell."""

    chosen: StreamSettings
    tokens: list[list[int]]
    """By choice, those that were put out."""


def read_carried(carried: bytes, *, choices: int, vocab_size: int) -> ResumedStream:
    """Errors: InvalidInput for what no stream of a call with so many choices can have said."""
    if len(carried) > CARRIED_MAX_BYTES:
        raise InvalidInput(f"marks of {len(carried)} bytes; at most {CARRIED_MAX_BYTES} are read")
    try:
        marks = [_DECODER.decode(line) for line in carried.split(b"\n")]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"marks that are none: {error}") from error
    first = marks[0].chosen
    if first is None or any(mark.chosen is not None for mark in marks[1:]):
        raise InvalidInput("marks of which not the first, or not only the first, says what was chosen")
    _check(first, choices)
    tokens: list[list[int]] = [[] for _ in range(choices)]
    for mark in marks:
        for choice, some in mark.tokens:
            if not 0 <= choice < choices:
                raise InvalidInput(f"marks of choice {choice}; the call has {choices}")
            tokens[choice] += some
    for choice, (put_out, limit) in enumerate(zip(tokens, first.limits, strict=True)):
        if len(put_out) > limit:
            raise InvalidInput(f"marks with {len(put_out)} tokens of choice {choice}, which has {limit} at most")
        if any(not 0 <= token < vocab_size for token in put_out):
            raise InvalidInput(f"marks with a token that is not of 0 to {vocab_size - 1}")
    return ResumedStream(first, tokens)


def _check(said: StreamSettings, choices: int) -> None:
    if not _ID.fullmatch(said.id) or not 0 <= said.created_s < CREATED_MAX_S:
        raise InvalidInput("marks with an id or a time that no answer has")
    if len(said.seeds) != choices or len(said.limits) != choices:
        raise InvalidInput(f"marks of {len(said.seeds)} seeds and {len(said.limits)} limits; the call has {choices}")
    if any(seed is not None and seed.bit_length() > SEED_BITS for seed in said.seeds):
        raise InvalidInput(f"marks with a seed of more than {SEED_BITS} bits")
    if min(said.limits, default=1) < 1:
        raise InvalidInput("marks with a limit below 1")


def split_body(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> tuple[bytes, bytes | None]:
    """The call's own body, and what is carried behind it: nothing for a call that begins, None without a gateway.

    Errors: InvalidInput if the body has not what the header says.
    """
    said: Any = next((value for name, value in headers if name == CONTINUE_HEADER.encode()), None)
    if said is None:
        return body, None
    if not said.isdigit() or len(said) > 12 or int(said) > len(body):
        raise InvalidInput(f"{CONTINUE_HEADER} must be a number of bytes, at most the body's {len(body)}")
    size = int(said)
    return body[: len(body) - size], body[len(body) - size :]
