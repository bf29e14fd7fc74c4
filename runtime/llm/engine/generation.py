"""Generation requests and their state: tokens become text, until a stop string, the end token or the limit.

A request may resume after tokens that another worker generated and whose text was sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...contract.errors import DeadlineExceeded, FleetError, HandlerFailed, InvalidInput
from ..text.stop_strings import StopMatcher
from ..text.tokenizer import Detokenizer, Vocabulary
from .constraint import Constraint
from .logprobs import TokenLogprob
from .sampler import SamplerState, SamplingParams
from .sequences import Sequence as TokenSequence

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """State of a request that started on another worker. Used once."""

    tokens: list[int]
    deltas: list[TokenDelta]
    """Outputs of these tokens, one each, without log probabilities."""
    detokenizer: Detokenizer
    stops: StopMatcher
    """Detokenizer and matcher after these tokens: text that they returned was sent, held-back text was not."""
    finish: FinishReason | None
    """Set if the request has finished: then nothing is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request."""

    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: list[str] = field(default_factory=list)
    shown_tokens: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that belong to the text, with what they are shown as."""
    ignore_eos: bool = False
    constraint: Constraint | None = None
    """Grammar that the output follows."""
    logprobs: int | None = None
    """Number of alternatives reported beside each token's log probability; None: neither."""
    deadline_ns: int | None = None
    """Monotonic; past it the request ends with DeadlineExceeded."""
    resume: ResumeState | None = None
    adapter: str = ""
    """Name of the adapter that it is computed with; empty: the base alone."""
    embeds: bool = False
    """True if the hidden state of the last prompt token is wanted, instead of text; with `max_new_tokens=0`."""

    @property
    def movable(self) -> bool:
        """True if another worker may compute it, which gets the sampling parameters alone."""
        return self.logprobs is None and self.constraint is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Output of one step for one request. One with `finish` or `error` is the last."""

    id: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probability of each of the tokens except the end token, if asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there before the request; in the first delta with tokens."""
    embedding: tuple[float, ...] = ()
    """Last prompt token's hidden state after the final norm, if asked for."""
    finish: FinishReason | None = None
    error: FleetError | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(slots=True)
class Generation:
    """State of one running request."""

    request: Request
    sequence: TokenSequence
    sampler: SamplerState
    detokenizer: Detokenizer
    stops: StopMatcher
    eos_ids: frozenset[int]
    on_remote_cancel: Callable[[], object] | None = None
    """Set while another worker computes the tokens: called on cancellation."""

    def is_late(self, now_ns: int) -> bool:
        return self.request.deadline_ns is not None and now_ns >= self.request.deadline_ns

    def expired(self) -> TokenDelta:
        """The last delta of a request whose deadline has passed."""
        reason = f"the deadline passed after {self.sequence.output_count} new tokens"
        return TokenDelta(id=self.sequence.id, error=DeadlineExceeded(reason, hint="ask for fewer max_tokens"))

    def failed(self) -> TokenDelta:
        """The last delta of a request whose next token cannot be chosen: its logits are no numbers, or its grammar is
        too complex from here on."""
        count = self.sequence.output_count
        if self.sampler.broken:
            reason = f"the model failed after {count} tokens: its logits are NaN or infinite"
            hint = "its weights may have such values: compute them again, or deploy with dtype='fp32'"
            return TokenDelta(id=self.sequence.id, error=HandlerFailed(reason, hint=hint))
        reason = f"the answer cannot follow its grammar after {count} tokens: {self.sampler.failure}"
        return TokenDelta(id=self.sequence.id, error=InvalidInput(reason, hint="ask for a simpler schema"))

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> TokenDelta:
        """Adds the next token; returns its delta."""
        self.append(token)
        return self.delta(token, logprob)

    def append(self, token: int) -> bool:
        """Adds the next token; True if it is the last one. A stop string may end the request before (`delta`)."""
        sequence = self.sequence
        sequence.tokens.append(token)
        return self._is_end(token) or sequence.output_count >= sequence.max_new_tokens

    def delta(self, token: int, logprob: TokenLogprob | None = None) -> TokenDelta:
        """The delta of the token that was added last. Called once for each."""
        logprobs = () if logprob is None else (logprob,)
        sequence = self.sequence
        if self._is_end(token):
            return self._finish(self.stops.feed(self.detokenizer.flush()), token, "stop")
        text = self.stops.feed(self.detokenizer.feed(token))
        if self.stops.stopped:
            return self._finish(text, token, "stop", logprobs)
        if sequence.output_count >= sequence.max_new_tokens:
            text += self.stops.feed(self.detokenizer.flush())
            return self._finish(text, token, "stop" if self.stops.stopped else "length", logprobs)
        return TokenDelta(id=sequence.id, text=text, tokens=(token,), logprobs=logprobs)

    def _is_end(self, token: int) -> bool:
        return token in self.eos_ids and not self.request.ignore_eos

    def _finish(
        self, text: str, token: int, reason: FinishReason, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> TokenDelta:
        text += self.stops.flush()
        return TokenDelta(id=self.sequence.id, text=text, tokens=(token,), logprobs=logprobs, finish=reason)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was added to its request, and whose delta is not made yet. `cached_tokens`: as of `TokenDelta`."""

    generation: Generation
    token: int
    logprob: TokenLogprob | None
    cached_tokens: int

    def delta(self) -> TokenDelta:
        """Its delta; one with an error if it cannot be made, so that no other request of the step is hurt."""
        try:
            delta = self.generation.delta(self.token, self.logprob)
        except Exception as error:
            logger.exception("a token has no text", extra={"token": self.token})
            reason = HandlerFailed(f"the text of token {self.token} cannot be made: {error!r}")
            return TokenDelta(id=self.generation.sequence.id, error=reason)
        return replace(delta, cached_tokens=self.cached_tokens) if self.cached_tokens else delta


@dataclass(slots=True)
class Completed:
    """Results of completed steps: deltas, and tokens whose deltas are not made yet."""

    deltas: list[TokenDelta] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)

    def make_deltas(self) -> set[int]:
        """Makes the deltas of the tokens; returns the ids of requests that end with them."""
        made = [one.delta() for one in self.sampled]
        self.sampled.clear()
        self.deltas += made
        return {delta.id for delta in made if delta.last}


@dataclass(slots=True)
class MigratedRequest:
    """Sequence of another worker that is computed here. `on_token` sends each token to its owner, `on_lost` tells that
    there will be no more."""

    sequence: TokenSequence
    sampler: SamplerState
    caught_up: Callable[[], object]
    on_token: Callable[[int], object]
    on_lost: Callable[[], object]
    reported: bool = False

    def note_advance(self) -> None:
        """Reports once that all tokens known here are computed; not again after a preemption, which has them computed
        anew."""
        sequence = self.sequence
        if sequence.held and not self.reported and sequence.computed == len(sequence.tokens):
            self.reported = True
            self.caught_up()

    def append(self, token: int) -> bool:
        """Adds the next token and sends it to its owner; True if it is the last one."""
        self.sequence.tokens.append(token)
        self.on_token(token)
        return self.sequence.output_count >= self.sequence.max_new_tokens


def resumed_sampler(
    sequence: TokenSequence, sampling: SamplingParams, constraint: Constraint | None = None
) -> SamplerState:
    """Sampler state of a sequence that has output tokens."""
    return SamplerState.resumed(sampling, sequence.tokens[sequence.prompt_count :], constraint)


def start_generation(request: Request, id: int, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> Generation:
    """State of a new request, or of one that resumes."""
    resume = request.resume
    sequence = TokenSequence(
        id=id,
        tokens=[*request.tokens, *(resume.tokens if resume is not None else ())],
        prompt_count=len(request.tokens),
        max_new_tokens=request.max_new_tokens,
        embeds=request.embeds,
    )
    return Generation(
        request=request,
        sequence=sequence,
        sampler=resumed_sampler(sequence, request.sampling, request.constraint),
        detokenizer=resume.detokenizer if resume is not None else Detokenizer(vocabulary, request.shown_tokens),
        stops=resume.stops if resume is not None else StopMatcher(request.stops),
        eos_ids=eos_ids,
    )


def resume_state(
    request: Request, tokens: Sequence[int], vocabulary: Vocabulary, eos_ids: frozenset[int]
) -> ResumeState:
    """State of a request after these output tokens. Takes some tens of microseconds a token.

    Errors: InvalidInput if the request would have ended before the last of them, or if its grammar forbids them.
    """
    if request.constraint is not None:
        request.constraint.matcher(tokens)
    answer = start_generation(request, 0, vocabulary, eos_ids)
    deltas: list[TokenDelta] = []
    for number, token in enumerate(tokens):
        if deltas and deltas[-1].finish is not None:
            raise InvalidInput(f"{len(tokens)} tokens of an answer that ends after {number}")
        deltas.append(answer.accept(token))
    return ResumeState(
        tokens=list(tokens),
        deltas=deltas,
        detokenizer=answer.detokenizer,
        stops=answer.stops,
        finish=deltas[-1].finish if deltas else None,
    )
