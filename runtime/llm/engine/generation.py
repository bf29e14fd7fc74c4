"""What a request asks, and what becomes of its tokens: text that may be shown, until a stop, the end or the limit.

A request may have a past: tokens that another worker put out, and whose text was shown. It goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...contract.errors import FleetError, InvalidInput
from ..text.tokenizer import Detokenizer, Vocabulary
from .sampler import SamplerState, SamplingParams
from .scheduler import Sequence as Tokens
from .stop_strings import StopMatcher

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """Of a request that began elsewhere. Used once."""

    tokens: list[int]
    detokenizer: Detokenizer
    stops: StopMatcher
    """Both as they were left: what they have given was shown, what they hold back was not."""
    finish: FinishReason | None
    """If it is over: then there is nothing to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    deadline_ns: int | None = None
    """Monotonic; past it the request ends with DeadlineExceeded."""
    past: ResumeState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What one step brought one request. After one with `finish` or `error` nothing more comes."""

    id: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: FleetError | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(slots=True)
class Generation:
    """One request under way."""

    request: Request
    sequence: Tokens
    sampler: SamplerState
    detokenizer: Detokenizer
    stops: StopMatcher
    eos_ids: frozenset[int]
    on_remote_cancel: Callable[[], object] | None = None
    """Its tokens come from another worker, which is told so if it is to stop."""

    def accept(self, token: int) -> TokenDelta:
        """The next token; the delta that it makes."""
        sequence = self.sequence
        sequence.tokens.append(token)
        if token in self.eos_ids and not self.request.ignore_eos:
            return self._finish(self.stops.feed(self.detokenizer.flush()), token, "stop")
        text = self.stops.feed(self.detokenizer.feed(token))
        if self.stops.stopped:
            return self._finish(text, token, "stop")
        if sequence.output_count >= sequence.max_new_tokens:
            text += self.stops.feed(self.detokenizer.flush())
            return self._finish(text, token, "stop" if self.stops.stopped else "length")
        return TokenDelta(id=sequence.id, text=text, tokens=(token,))

    def _finish(self, text: str, token: int, reason: FinishReason) -> TokenDelta:
        return TokenDelta(id=self.sequence.id, text=text + self.stops.flush(), tokens=(token,), finish=reason)


@dataclass(slots=True)
class MigratedRequest:
    """Another worker's sequence, computed here: its tokens are told as they come, and are the other's to judge."""

    sequence: Tokens
    sampler: SamplerState
    caught_up: Callable[[], object]
    on_token: Callable[[int], object]


def resumed_sampler(sequence: Tokens, sampling: SamplingParams) -> SamplerState:
    """Of a sequence that has tokens already."""
    return SamplerState.resumed(sampling, sequence.tokens[sequence.prompt_count :])


def start_generation(request: Request, id: int, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> Generation:
    """One that begins, or goes on after its request's past."""
    past = request.past
    sequence = Tokens(
        id=id,
        tokens=[*request.tokens, *(past.tokens if past is not None else ())],
        prompt_count=len(request.tokens),
        max_new_tokens=request.max_new_tokens,
    )
    return Generation(
        request=request,
        sequence=sequence,
        sampler=resumed_sampler(sequence, request.sampling),
        detokenizer=past.detokenizer if past is not None else Detokenizer(vocabulary),
        stops=past.stops if past is not None else StopMatcher(request.stops),
        eos_ids=eos_ids,
    )


def resume_state(
    request: Request, tokens: Sequence[int], vocabulary: Vocabulary, eos_ids: frozenset[int]
) -> ResumeState:
    """After the request has put these out. Takes as long as to show them did: some tens of microseconds each.

    Errors: InvalidInput if it would have ended before the last of them.
    """
    answer = start_generation(request, 0, vocabulary, eos_ids)
    finish: FinishReason | None = None
    for number, token in enumerate(tokens):
        if finish is not None:
            raise InvalidInput(f"{len(tokens)} tokens of an answer that ends after {number}")
        finish = answer.accept(token).finish
    return ResumeState(tokens=list(tokens), detokenizer=answer.detokenizer, stops=answer.stops, finish=finish)
