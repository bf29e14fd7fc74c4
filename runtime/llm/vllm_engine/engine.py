"""Engine over vLLM's, in the worker's own thread: its scheduler, KV cache and kernels; our text, stops and sampling.

A request goes to vLLM as token ids and comes back as token ids; `Generation` makes deltas of them and says when the
request ends. So a request that began on another engine continues here with its tokens as prompt.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...contract.errors import FleetError, HandlerFailed, InvalidInput
from ..engine.context_limit import check_context
from ..engine.generation import (
    Generation,
    Request,
    ResumeState,
    SampledToken,
    TokenDelta,
    resume_state,
    start_generation,
)
from ..engine.inference_engine import EngineLoad, never
from ..engine.logprobs import TokenLogprob
from .sampling import KEY, RequestSampler, is_plain

if TYPE_CHECKING:
    from ..text.tokenizer import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel:
    """Facts of a model that the engine needs, beside vLLM's own engine."""

    tokenizer: Vocabulary
    eos_ids: frozenset[int]
    context_tokens: int


class VllmEngine:
    """An `InferenceEngine`. Not thread-safe, except `check`, `resume`, `context_tokens` and `load`."""

    def __init__(
        self,
        model: VllmModel,
        build: Callable[[], Any],
        close: Callable[[Any], None],
        samplers: dict[int, RequestSampler],
        adapters: Mapping[str, Any],
    ) -> None:
        """`build` makes vLLM's engine, `close` ends it. `samplers`: those that its processor reads; `adapters`: vLLM's
        request of each."""
        self._model = model
        self._build = build
        self._close = close
        self._samplers = samplers
        self._adapters = adapters
        self._active: dict[int, Generation] = {}
        self._ids = itertools.count()
        self._prompt_tokens = self._cached_tokens = 0
        """Counts of `EngineLoad`."""
        self._vllm: Any = build()

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens

    @property
    def load(self) -> EngineLoad:
        vllm = self._vllm
        if vllm is None:
            return self._load(free_blocks=0, block_count=0)
        pool = vllm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        # One block holds nothing and stands for none.
        return self._load(free_blocks=pool.get_num_free_blocks(), block_count=pool.num_gpu_blocks - 1)

    def _load(self, *, free_blocks: int, block_count: int) -> EngineLoad:
        return EngineLoad(
            active=len(self._active),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            free_blocks=free_blocks,
            block_count=block_count,
        )

    @property
    def idle(self) -> bool:
        return not self._active

    @property
    def stalled(self) -> bool:
        return self._vllm is None

    @property
    def stages(self) -> int:
        return 1

    def check(self, request: Request) -> None:
        if request.embeds:
            raise InvalidInput(
                "this function's engine generates and gives no embeddings",
                hint='serve them with engine="native", or with Transformers(task="embedding")',
            )
        check_context(len(request.tokens), request.max_new_tokens, self.context_tokens)

    def resume(self, request: Request, tokens: list[int]) -> ResumeState:
        return resume_state(request, tokens, self._model.tokenizer, self._model.eos_ids)

    def add(self, request: Request, id: int | None = None) -> int:
        id = next(self._ids) if id is None else id
        generation = start_generation(request, id, self._model.tokenizer, self._model.eos_ids)
        self._active[id] = generation
        if self._vllm is not None:
            self._submit(generation)
        return id

    def cancel(self, id: int) -> None:
        if self._active.pop(id, None) is not None:
            self._samplers.pop(id, None)
            if self._vllm is not None:
                self._vllm.abort_request([str(id)])

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        deltas = self._expire(now_ns)
        if self._vllm is None or not self._active:
            return deltas
        try:
            outputs = self._vllm.step()
        except Exception as error:
            # What vLLM has computed is unknown, and it may not compute again: all fail, and the next begins anew.
            logger.exception("step failed")
            deltas += self.fail_all(HandlerFailed(f"the model failed: {error!r}"))
            return deltas
        for output in outputs:
            deltas += self._accept(int(output.request_id), output)
        return deltas

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        deltas = [TokenDelta(id=id, error=error) for id in self._active]
        for delta in deltas:
            self.cancel(delta.id)
        return deltas

    def release(self) -> list[TokenDelta]:
        """Frees weights and KV memory by ending vLLM's engine; the process keeps its modules and threads."""
        if self._vllm is not None:
            vllm, self._vllm = self._vllm, None
            self._samplers.clear()
            self._close(vllm)
            del vllm
            gc.collect()  # its parts know one another, so that nothing else frees the weights
        return []

    def regain(self) -> None:
        if self._vllm is None:
            self._vllm = self._build()
            for generation in self._active.values():
                self._submit(generation)

    def close(self) -> None:
        self.release()

    def _submit(self, generation: Generation) -> None:
        """Hands a request to vLLM, with its output so far as the end of the prompt."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sequence, request = generation.sequence, generation.request
        outputs = sequence.tokens[sequence.prompt_count :]
        extra = None
        if not is_plain(request):
            self._samplers[sequence.id] = RequestSampler.of(request, outputs)
            extra = {KEY: sequence.id}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=sequence.max_new_tokens - len(outputs),
            ignore_eos=True,  # `Generation` ends a request, as on every engine
            detokenize=False,
            logprobs=request.logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        self._vllm.add_request(
            str(sequence.id),
            tokens_input(list(sequence.tokens)),
            params,
            lora_request=self._adapters[request.adapter] if request.adapter else None,
        )

    def _accept(self, id: int, output: Any) -> Iterable[TokenDelta]:
        """Deltas of a request's new tokens, until it ends."""
        new = output.outputs[0]
        for place, token in enumerate(new.token_ids):
            generation = self._active.get(id)
            if generation is None:
                return
            delta = self._delta(generation, token, _logprob(generation.request, new.logprobs, place, token), output)
            if delta.last:
                self.cancel(id)
            yield delta
        if output.finished and (generation := self._active.get(id)) is not None:
            self.cancel(id)
            count = generation.sequence.output_count
            reason = HandlerFailed(f"vLLM ended the answer after {count} new tokens: {new.finish_reason}")
            yield TokenDelta(id=id, error=reason)

    def _delta(self, generation: Generation, token: int, logprob: TokenLogprob | None, output: Any) -> TokenDelta:
        """The delta of a request's next token."""
        sampler = self._samplers.get(generation.sequence.id)
        if sampler is not None and sampler.state.failure:
            generation.sampler = sampler.state
            return generation.failed()
        cached_tokens = 0 if generation.sequence.output_count else self._count_prompt(generation, output)
        generation.append(token)
        return SampledToken(generation, token, logprob, cached_tokens).delta()

    def _count_prompt(self, generation: Generation, output: Any) -> int:
        """Counts the prompt of a request that has its first token; returns how much of it was there before."""
        count = generation.sequence.prompt_count
        cached_tokens = min(output.num_cached_tokens or 0, count)
        self._prompt_tokens += count
        self._cached_tokens += cached_tokens
        return cached_tokens

    def _expire(self, now_ns: int) -> list[TokenDelta]:
        late = [generation for generation in self._active.values() if generation.is_late(now_ns)]
        for generation in late:
            self.cancel(generation.sequence.id)
        return [generation.expired() for generation in late]


def _logprob(request: Request, found: Any, place: int, token: int) -> TokenLogprob | None:
    if request.logprobs is None:
        return None
    values = {int(one): float(value.logprob) for one, value in found[place].items()}
    best = sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))[: request.logprobs]
    return TokenLogprob(token, values[token], tuple(best))
