"""What a request asks, and what becomes of its tokens: text that may be shown, until a stop, the end or the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.llm.sampler import SamplerState, SamplingParams
from fleetstart.runtime.llm.scheduler import Sequence
from fleetstart.runtime.llm.stops import StopMatcher
from fleetstart.runtime.llm.tokenizer import Detokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    deadline_ns: int | None = None
    """Monotonic; past it the request ends with DeadlineExceeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
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
class Answer:
    """One request under way."""

    request: Request
    sequence: Sequence
    sampler: SamplerState
    detokenizer: Detokenizer
    stops: StopMatcher
    eos_ids: frozenset[int]
    lent: Callable[[], object] | None = None
    """Its tokens come from another worker, which is told so if it is to stop."""

    def accept(self, token: int) -> Delta:
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
        return Delta(id=sequence.id, text=text, tokens=(token,))

    def _finish(self, text: str, token: int, reason: FinishReason) -> Delta:
        return Delta(id=self.sequence.id, text=text + self.stops.flush(), tokens=(token,), finish=reason)


@dataclass(slots=True)
class Borrowed:
    """Another worker's sequence, computed here: its tokens are told as they come, and are the other's to judge."""

    sequence: Sequence
    sampler: SamplerState
    caught_up: Callable[[], object]
    tell: Callable[[int], object]


def resumed(sequence: Sequence, sampling: SamplingParams) -> SamplerState:
    """Of a sequence that has tokens already."""
    return SamplerState.resumed(sampling, sequence.tokens[sequence.prompt_count :])
