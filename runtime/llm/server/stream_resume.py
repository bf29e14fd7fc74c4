"""Stream resume: marks between a stream's events from which another worker continues it.

Tokens are the state (ServerlessLLM section 5.2): keys and values, text, stops and draws follow from them, from the
prompt, and from the first worker's settings: id, time, seeds, limits. The gateway stores the marks and appends them to
the body of the retried call (`worker_headers.MARK`, `CONTINUE_HEADER`); clients cannot send them. They are validated
nonetheless: a worker computes nothing that it would reject from a client.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...contract.decoding import UNDECODABLE
from ...contract.errors import InvalidInput
from ...contract.worker_headers import CONTINUE_HEADER, MARK
from ..engine.generation import Request
from ..engine.logprobs import TokenLogprob
from .requests import SEED_BITS

CARRIED_MAX_BYTES = 4 << 20
"""Largest size of all marks of a call: twice the gateway's limit."""
CREATED_MAX_S = 1 << 40
CACHED_MAX = 1 << 32
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that the first worker chose for a call, and for each of its choices."""

    id: str
    created_s: int
    seeds: list[int | None]
    limits: list[int]
    """Most new tokens of each choice; without a limit in the call they depend on a worker's memory."""


_Logprob = tuple[int, float, list[tuple[int, float]]]


class _ResumeMark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tokens: list[tuple[int, list[int]]]
    """Pairs of a choice and its tokens since the last mark."""
    chosen: StreamSettings | None = None
    """Set in the first mark only."""
    logprobs: list[tuple[int, list[_Logprob]]] = []
    """Pairs of a choice and the log probabilities of its tokens, if later events repeat them."""
    cached_tokens: int = 0
    """Prompt tokens that were cached where their choices' first tokens, which are in this mark, were computed."""


_DECODER = msgspec.json.Decoder(_ResumeMark)


def choose_settings(id: str, created_s: int, requests: Sequence[Request]) -> StreamSettings:
    """Settings of a new stream. Sampled choices without a seed get one, so that they can be repeated."""
    seeds = [
        secrets.randbits(SEED_BITS) if one.sampling.seed is None and not one.sampling.greedy else one.sampling.seed
        for one in requests
    ]
    return StreamSettings(id, created_s, seeds, [one.max_new_tokens for one in requests])


def apply_settings(requests: Sequence[Request], by: StreamSettings) -> list[Request]:
    """Requests with the settings of their stream."""
    return [
        replace(one, max_new_tokens=limit, sampling=replace(one.sampling, seed=seed))
        for one, seed, limit in zip(requests, by.seeds, by.limits, strict=True)
    ]


class ResumeMarkWriter:
    """Writes the marks of one stream."""

    def __init__(self, first: StreamSettings | None) -> None:
        """`first` is None for a resumed stream, whose settings were written by the first worker."""
        self._first = first
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[_Logprob]] = {}
        self._cached_tokens = 0

    def add(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), cached_tokens: int = 0
    ) -> None:
        """Adds output tokens of a choice, with their log probabilities if a resume needs them."""
        self._cached_tokens += cached_tokens
        self._tokens.setdefault(choice, []).extend(tokens)
        if logprobs:
            listed = [(one.token, one.logprob, list(one.top)) for one in logprobs]
            self._logprobs.setdefault(choice, []).extend(listed)

    def mark(self) -> bytes:
        """Returns the mark of the tokens since the last one, to be sent right after their event."""
        said = _ResumeMark(list(self._tokens.items()), self._first, list(self._logprobs.items()), self._cached_tokens)
        self._tokens, self._first, self._logprobs, self._cached_tokens = {}, None, {}, 0
        return MARK + msgspec.json.encode(said) + b"\n\n"


class ResumedStream(msgspec.Struct, frozen=True):
    """A stream that another worker started, as decoded from its marks."""

    chosen: StreamSettings
    tokens: list[list[int]]
    """Output tokens by choice."""
    logprobs: list[list[TokenLogprob]]
    """Their log probabilities by choice; empty if no event repeats them."""
    cached_tokens: int = 0
    """Prompt tokens of these choices that were cached."""


def read_resume_marks(carried: bytes, *, choices: int, vocab_size: int) -> ResumedStream:
    """Decodes marks. Errors: InvalidInput for marks that no stream with that many choices can have."""
    if len(carried) > CARRIED_MAX_BYTES:
        raise InvalidInput(f"marks of {len(carried)} bytes; at most {CARRIED_MAX_BYTES} are allowed")
    try:
        marks = [_DECODER.decode(line) for line in carried.split(b"\n")]
    except UNDECODABLE as error:
        raise InvalidInput(f"invalid marks: {error}") from error
    first = marks[0].chosen
    if first is None or any(mark.chosen is not None for mark in marks[1:]):
        raise InvalidInput("marks whose settings are not in the first mark, or not only there")
    _check(first, choices)
    tokens: list[list[int]] = [[] for _ in range(choices)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    for mark in marks:
        for choice, *_ in (*mark.tokens, *mark.logprobs):
            if not 0 <= choice < choices:
                raise InvalidInput(f"marks of choice {choice}; the call has {choices}")
        for choice, some in mark.tokens:
            tokens[choice] += some
        for choice, listed in mark.logprobs:
            logprobs[choice] += [TokenLogprob(token, value, tuple(top)) for token, value, top in listed]
    for choice, (put_out, limit) in enumerate(zip(tokens, first.limits, strict=True)):
        if len(put_out) > limit:
            raise InvalidInput(f"marks with {len(put_out)} tokens of choice {choice}, which has {limit} at most")
        if any(not 0 <= token < vocab_size for token in put_out):
            raise InvalidInput(f"marks with a token that is not of 0 to {vocab_size - 1}")
        for token, one in zip(put_out, logprobs[choice], strict=False):
            if one.token != token or any(not 0 <= other < vocab_size for other, _ in one.top):
                raise InvalidInput(f"marks with log probabilities of other tokens than those of choice {choice}")
    if any(not 0 <= mark.cached_tokens <= CACHED_MAX for mark in marks):
        raise InvalidInput(f"marks with cached tokens that are not of 0 to {CACHED_MAX}")
    return ResumedStream(first, tokens, logprobs, sum(mark.cached_tokens for mark in marks))


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
    """Splits a body into the call's own and the marks after it: empty for a new call, None without a gateway.

    Errors: InvalidInput if the header does not fit the body.
    """
    said: Any = next((value for name, value in headers if name == CONTINUE_HEADER.encode()), None)
    if said is None:
        return body, None
    if not said.isdigit() or len(said) > 12 or int(said) > len(body):
        raise InvalidInput(f"{CONTINUE_HEADER} must be a number of bytes, at most the body's {len(body)}")
    size = int(said)
    return body[: len(body) - size], body[len(body) - size :]
