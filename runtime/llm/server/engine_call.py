"""Engine calls: the requests of one API call, new or resumed, with the writer of its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...openai_api.responses import TokenUsage
from ..engine.constraint import Constraint
from ..engine.generation import Request, TokenDelta
from ..engine.inference_engine import InferenceEngine
from ..engine.sampler import SEEDS
from ..model.loaded_model import LoadedModel
from .answer_writers import AnswerWriter
from .requests import SamplingFields, StreamableCall
from .stream_resume import ResumeMarkWriter, apply_settings, choose_settings, read_resume_marks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One call for the engine: a request for each choice, and the response's settings."""

    requests: list[Request]
    answer: AnswerWriter
    usage: TokenUsage
    choices: int = 1
    """Number of requests of each prompt, one after the other."""
    stream: bool = False
    marker: ResumeMarkWriter | None = None
    """Set if another worker can resume the stream."""

    def cached_tokens(self, index: int, delta: TokenDelta) -> int:
        """What a choice's delta adds to the cached tokens: a prompt's count with its first choice, and where its first
        token was computed."""
        resume = self.requests[index].resume
        begun = resume is not None and bool(resume.tokens)
        return 0 if begun or index % self.choices else delta.cached_tokens

    def with_marks(self) -> EngineCall:
        """The call of a stream that another worker can resume."""
        first = choose_settings(self.answer.id, self.answer.created_s, self.requests)
        return replace(self, requests=apply_settings(self.requests, first), marker=ResumeMarkWriter(first))

    def resumed(self, carried: bytes, engine: InferenceEngine, vocab_size: int) -> EngineCall:
        """The call after the tokens of another worker. Takes some tens of microseconds a token.

        Their events were sent: the writer forms them again, for its state. Events of several choices alternate as their
        tokens did, which no writer depends on. Errors: InvalidInput for marks that are none of this call.
        """
        before = read_resume_marks(carried, choices=len(self.requests), vocab_size=vocab_size)
        self.answer.resume(before.chosen.id, before.chosen.created_s)
        self.usage.completion_tokens = sum(map(len, before.tokens))
        self.usage.cached_tokens = before.cached_tokens
        requests = []
        for index, request in enumerate(apply_settings(self.requests, before.chosen)):
            state = engine.resume(request, before.tokens[index])
            logprobs = before.logprobs[index]
            for place, delta in enumerate(state.deltas):
                self.answer.feed(index, replace(delta, logprobs=tuple(logprobs[place : place + 1])))
            requests.append(replace(request, resume=state))
        return replace(self, requests=requests, marker=ResumeMarkWriter(None))


def engine_call(
    call: StreamableCall,
    answer: AnswerWriter,
    prompts: Sequence[list[int]],
    model: LoadedModel,
    deadline_ns: int | None,
    constraint: Constraint | None = None,
    shown_tokens: Mapping[int, str] | None = None,
    *,
    adapter: str = "",
) -> EngineCall:
    """The engine call of an API call. Errors: InvalidParameter for a field out of range."""
    requests = []
    for tokens in prompts:
        request = request_of(call, tokens, model, deadline_ns, adapter)
        request = replace(request, constraint=constraint, shown_tokens=shown_tokens or {})
        requests += [_choice(request, number) for number in range(call.n or 1)]
    usage = TokenUsage(prompt_tokens=sum(map(len, prompts)))
    return EngineCall(requests=requests, answer=answer, usage=usage, choices=call.n or 1, stream=bool(call.stream))


def request_of(
    call: SamplingFields, tokens: list[int], model: LoadedModel, deadline_ns: int | None, adapter: str = ""
) -> Request:
    """The request of one prompt. Errors: as of `engine_call`."""
    limit = call.limit()
    room = model.engine.context_tokens - len(tokens)
    return Request(
        tokens=tokens,
        # Without a limit the response may fill the context; `open` rejects a limit that does not fit.
        max_new_tokens=max(room, 1) if limit is None else limit,
        sampling=call.params(model.sampling, model.vocab_size),
        stops=call.stops(),
        ignore_eos=call.ignore_eos,
        logprobs=call.wanted_logprobs(),
        deadline_ns=deadline_ns,
        adapter=adapter,
    )


def _choice(request: Request, number: int) -> Request:
    """The request of the nth choice of a prompt, with its own seed if the call has one."""
    if request.sampling.seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(request.sampling.seed + number) % SEEDS))
