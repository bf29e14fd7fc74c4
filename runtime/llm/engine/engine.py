"""LLM engine: requests in, text out, one step at a time.

Synchronous, in its own thread (`engine_service` joins it to the server). A step gets a plan from the scheduler, logits
from the runner, tokens from the sampler, and text from each request's `Generation`. Along a pipeline several steps are
in flight, each with its own sequences. A GPU has the next step before the host knows the tokens of this one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ...contract.errors import FleetError, HandlerFailed
from ..text.tokenizer import Vocabulary
from .generation import (
    Completed,
    Generation,
    MigratedRequest,
    Request,
    ResumeState,
    SampledToken,
    TokenDelta,
    resume_state,
    resumed_sampler,
    start_generation,
)
from .inference_engine import EngineLoad, never
from .logprobs import token_logprob
from .runner import ReleasedRunner, Runner, RunnerLost, StepInFlight, batch_of, rows_of, tokens_for
from .sampler import SamplingParams, begin_draw
from .scheduler import Scheduler
from .sequences import PlannedChunk, Sequence

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step, with a scheduler of its own and a runner that computes: an `InferenceEngine`.

    Not thread-safe, except `check` and `resume`, which read constants, and `load`.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Vocabulary,
        eos_ids: frozenset[int],
        make_runner: Callable[[], Runner] | None = None,
    ) -> None:
        """`make_runner` makes the runner again after a `release`; without it, nothing is ever released."""
        self._runner = runner
        self._make_runner = make_runner
        self._in_flight: deque[StepInFlight] = deque()
        self._refused_ahead: type[Exception] | None = None
        """Kind of the last error of a step that was to follow another one: a full device refuses each of them, and each
        traceback in the log would be the same."""
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._active: dict[int, Generation] = {}
        self._migrated_in: dict[int, MigratedRequest] = {}
        self._ids = itertools.count()

    def check(self, request: Request) -> None:
        """Checks a request. Errors: InvalidInput if it can never fit."""
        self.scheduler.check(len(request.tokens), request.max_new_tokens)

    def resume(self, request: Request, tokens: list[int]) -> ResumeState:
        """State to resume a request after tokens of another worker. Errors: as of `resume_state`."""
        return resume_state(request, tokens, self._tokenizer, self._eos_ids)

    def add(self, request: Request, id: int | None = None) -> int:
        """Adds a request; returns its id. Errors: InvalidInput, as `check`."""
        id = next(self._ids) if id is None else id
        answer = start_generation(request, id, self._tokenizer, self._eos_ids)
        self.scheduler.add(answer.sequence)
        self._active[id] = answer
        return id

    def cancel(self, id: int) -> None:
        """Cancels a request and frees its blocks; ignores a finished or unknown id."""
        active = self._active.pop(id, None)
        if active is None:
            return
        if active.on_remote_cancel is not None:
            active.on_remote_cancel()
        else:
            self.scheduler.remove(active.sequence)

    # ── migration: requests that another worker computes, and those of another worker ──────────────

    def migration_candidates(self) -> list[tuple[int, int]]:
        """Requests that are computed here and have output: (id, most remaining tokens).

        A target gets the sampling parameters and sends back tokens, so requests with a grammar and those for log
        probabilities stay.
        """
        return [
            (sequence.id, sequence.max_new_tokens - sequence.output_count)
            for sequence in self.scheduler.running
            if sequence.output_count and (active := self._active.get(sequence.id)) and active.request.movable
        ]

    def migration_snapshot(self, id: int) -> tuple[list[int], int, int, SamplingParams] | None:
        """A request's tokens, prompt length, token limit and sampling; None if it ended or is computed elsewhere."""
        active = self._active.get(id)
        if active is None or active.on_remote_cancel is not None:
            return None
        sequence = active.sequence
        return list(sequence.tokens), sequence.prompt_count, sequence.max_new_tokens, active.request.sampling

    def start_remote(self, id: int, drop: Callable[[], object]) -> list[int] | None:
        """Stops computing a request here; returns its tokens, None if it has ended. `accept_remote` brings new ones.

        No step may be in flight. `drop` is called if the request is cancelled.
        """
        active = self._active.get(id)
        if active is None or active.on_remote_cancel is not None:
            return None
        self.scheduler.remove(active.sequence)
        active.on_remote_cancel = drop
        return list(active.sequence.tokens)

    def accept_remote(self, id: int, token: int) -> list[TokenDelta]:
        """Adds the next token of a request that another worker computes."""
        active = self._active.get(id)
        if active is None or active.on_remote_cancel is None:
            return []
        delta = active.accept(token)
        if delta.last:
            self.cancel(id)
        return [delta]

    def resume_locally(self, id: int) -> None:
        """Continues a request here that another worker computed."""
        active = self._active.get(id)
        if active is None or active.on_remote_cancel is None:
            return
        active.on_remote_cancel = None
        active.sampler = resumed_sampler(active.sequence, active.request.sampling, active.request.constraint)
        self.scheduler.put_back(active.sequence)

    def add_migrated(
        self,
        sequence: Sequence,
        sampling: SamplingParams,
        caught_up: Callable[[], object],
        on_token: Callable[[int], object],
        on_lost: Callable[[], object],
    ) -> None:
        """Computes the known tokens of another worker's request, then calls `caught_up` and waits.

        `continue_migrated` brings the tokens since then. `on_lost` is called if the request is dropped here before its
        end, and its owner did not ask for that. Errors: InvalidInput if the request does not fit.
        """
        sequence.held = True
        self.scheduler.add(sequence)
        self._migrated_in[sequence.id] = MigratedRequest(
            sequence, resumed_sampler(sequence, sampling), caught_up, on_token, on_lost
        )

    def continue_migrated(self, id: int, tokens: list[int]) -> bool:
        """Continues another worker's request with all its tokens, of which the last is not computed yet; False if there
        is none of that id."""
        migrated = self._migrated_in.get(id)
        if migrated is None:
            return False
        sequence = migrated.sequence
        sequence.tokens[:] = tokens
        sequence.held = False
        migrated.sampler = resumed_sampler(sequence, migrated.sampler.params)
        return True

    def remove_migrated(self, id: int) -> None:
        """Removes another worker's request, at its end or because its owner wishes so."""
        migrated = self._migrated_in.pop(id, None)
        if migrated is not None:
            self.scheduler.remove(migrated.sequence)

    def _lose_migrated(self, ids: Iterable[int]) -> None:
        """Drops those of the requests that are another worker's, which continues them itself."""
        for id in ids:
            if (migrated := self._migrated_in.get(id)) is not None:
                self.remove_migrated(id)
                migrated.on_lost()

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.scheduler.context_tokens

    @property
    def load(self) -> EngineLoad:
        """Present load; from any thread, where it may be one step old."""
        pool = self.scheduler.pool
        return EngineLoad(
            active=len(self._active),
            migrated_in=len(self._migrated_in),
            prompt_tokens=self.scheduler.prompt_tokens,
            cached_tokens=self.scheduler.reused_tokens,
            free_blocks=pool.free_count,
            block_count=pool.block_count,
        )

    @property
    def idle(self) -> bool:
        return not (self._active or self._migrated_in or self._in_flight)

    @property
    def stages(self) -> int:
        """Number of stages that compute a step: 1 without a pipeline."""
        return self._runner.depth

    @property
    def stalled(self) -> bool:
        """Checks whether no step can run now: the runner is stalled, or all requests are computed elsewhere."""
        return not self._in_flight and (self._runner.stalled or not self.scheduler.pending)

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        """Submits steps until the runner is busy, and completes the oldest; returns its deltas.

        Where a device computes asynchronously, the next step is submitted before the tokens of this one are known to
        the host, or else before they become text; but not while a command is `awaited`.
        """
        with self._completing() as completed:
            completed.deltas += self._expire(now_ns)
            self._submit_steps()
            follow = self._runner.asynchronous and not awaited()
            self._complete_oldest(completed, follow=follow)
            if self._runner.asynchronous and not self.scheduler.waiting and not awaited():
                self._submit_steps()
        return completed.deltas

    def settle(self) -> list[TokenDelta]:
        """Completes all steps in flight and submits none; returns their deltas."""
        with self._completing() as completed:
            while self._in_flight:
                self._complete_oldest(completed)
        return completed.deltas

    @contextlib.contextmanager
    def _completing(self) -> Iterator[Completed]:
        """Context in which steps are completed; at its end `Completed` has all their deltas. If a step fails, so do all
        sequences that run; if the runner is lost, they are recomputed. Waiting ones go on."""
        completed, failures = Completed(), list[TokenDelta]()
        try:
            yield completed
        except RunnerLost as error:
            self._restart(error)
        except Exception as error:
            # Results of the steps in flight are unknown.
            logger.exception("step failed", extra={"steps": len(self._in_flight)})
            self._in_flight.clear()
            self._runner.drop()
            reason = error if isinstance(error, FleetError) else HandlerFailed(f"the model failed: {error!r}")
            running = [sequence.id for sequence in self.scheduler.running]
            failures = [TokenDelta(id=id, error=reason) for id in running if id in self._active]
            self._lose_migrated(running)
        ended = completed.make_deltas()
        completed.deltas += [failure for failure in failures if failure.id not in ended]
        for id in ended.union(failure.id for failure in failures):
            self.cancel(id)

    def _restart(self, error: RunnerLost) -> None:
        logger.warning("the pipeline is broken, requests are recomputed", extra={"error": str(error)})
        self._in_flight.clear()
        self.scheduler.restart()

    def take_over(self, runner: Runner) -> None:
        """Replaces the runner by one with the keys and values of all running sequences; no step may be in flight."""
        assert not self._in_flight
        self._runner = runner
        # Kept blocks are those of the runner before; one decoder computes in order, so its blocks can be shared.
        self.scheduler.pool.forget()
        self.scheduler.share_prefixes = runner.depth == 1

    def release(self) -> list[TokenDelta]:
        """Frees weights and KV memory, as of `InferenceEngine`; running requests are recomputed after `regain`.

        Errors: RuntimeError for a pipeline, whose weights other workers have.
        """
        if isinstance(self._runner, ReleasedRunner):
            return []
        if self._make_runner is None:
            raise RuntimeError("this engine's weights cannot be released")
        deltas = self.settle()
        self.scheduler.restart()
        self._runner = ReleasedRunner()
        gc.collect()  # a model and its cache know one another
        return deltas

    def regain(self) -> None:
        """Takes weights and KV memory again. Errors: those of loading."""
        if isinstance(self._runner, ReleasedRunner):
            assert self._make_runner is not None
            self._runner = self._make_runner()

    def close(self) -> None:
        """Does nothing: the engine has started nothing."""

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        """Ends every request with the error, when the worker ends."""
        deltas = [TokenDelta(id=id, error=error) for id in self._active]
        for delta in deltas:
            self.cancel(delta.id)
        self._lose_migrated(list(self._migrated_in))
        return deltas

    def _expire(self, now_ns: int) -> list[TokenDelta]:
        late = [active for active in self._active.values() if active.is_late(now_ns)]
        for active in late:
            self.cancel(active.sequence.id)
        return [active.expired() for active in late]

    def _submit_steps(self) -> None:
        if self._runner.stalled:
            return
        while len(self._in_flight) < self._runner.depth:
            chunks = self.scheduler.plan(self._runner.depth)
            if not chunks:
                return
            self._in_flight.append(StepInFlight.of(chunks))
            self._runner.submit(batch_of(chunks))

    def _complete_oldest(self, completed: Completed, *, follow: bool = False) -> None:
        """Completes the oldest step in flight: advances its sequences and samples their next tokens. With `follow`, the
        next step is submitted first if only the device has to know these tokens."""
        if not self._in_flight:
            return
        output = self._runner.collect()
        step = self._in_flight.popleft()
        for chunk in step.chunks:
            if self._runs(chunk):
                self.scheduler.advance(chunk)
                if (migrated := self._migrated_in.get(chunk.sequence.id)) is not None:
                    migrated.note_advance()
        completed.deltas += self._embed(step.embedding, output.embeddings)
        rows = [row for row, chunk in enumerate(step.sampling) if self._runs(chunk)]
        if not rows:
            return
        logits, sampled = rows_of(output.logits, rows), [step.sampling[row] for row in rows]
        ids = [chunk.sequence.id for chunk in sampled]
        states = [(self._active.get(id) or self._migrated_in[id]).sampler for id in ids]
        draw = begin_draw(logits, states, on_device=logits.is_cuda or follow)
        if follow and draw.tokens is not None:
            self._submit_following([chunk for chunk in step.chunks if self._runs(chunk)], sampled, draw.tokens)
        for row, (id, token) in enumerate(zip(ids, draw.finish(), strict=True)):
            active = self._active.get(id)
            if active is None:
                if self._migrated_in[id].sampler.broken:
                    self._lose_migrated([id])
                elif self._migrated_in[id].append(token):
                    self.remove_migrated(id)
            elif active.sampler.failure:
                completed.deltas.append(active.failed())
                self.cancel(id)
            else:
                wanted = active.request.logprobs
                logprob = None if wanted is None else token_logprob(logits[row], token, wanted)
                completed.sampled.append(SampledToken(active, token, logprob, active.sequence.take_reused()))
                if active.append(token):
                    self.cancel(id)

    def _submit_following(self, chunks: list[PlannedChunk], sampled: list[PlannedChunk], tokens: Tensor) -> None:
        """Submits the step after one of these chunks, whose tokens, one a sampled chunk, are on the device; not if the
        logits of these are read again."""
        active = [self._active.get(chunk.sequence.id) for chunk in sampled]
        if any(one is None or one.request.logprobs is not None for one in active):
            return
        if planned := self.scheduler.plan_following(chunks):
            try:
                following = StepInFlight.of(planned)
                self._runner.submit(batch_of(planned, tokens_for(planned, sampled, tokens)))
            except Exception as error:  # the tokens of this step are not lost; the next one is planned again after it
                if type(error) is not self._refused_ahead:
                    self._refused_ahead = type(error)
                    logger.warning("a step could not be submitted ahead of its tokens, nor may others", exc_info=True)
                self.scheduler.take_back(planned)
            else:
                self._in_flight.append(following)

    def _embed(self, chunks: list[PlannedChunk], states: Tensor | None) -> list[TokenDelta]:
        """Ends the requests for embeddings whose last token is computed."""
        if states is None:
            return []
        ended = [(chunk.sequence.id, row) for row, chunk in enumerate(chunks) if self._runs(chunk)]
        for id, _ in ended:
            self.cancel(id)
        return [TokenDelta(id=id, embedding=tuple(states[row].tolist()), finish="stop") for id, row in ended]

    def _runs(self, chunk: PlannedChunk) -> bool:
        """Checks whether the chunk's sequence still runs."""
        return chunk.sequence.id in self._active or chunk.sequence.id in self._migrated_in
