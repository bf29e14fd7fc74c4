"""The engine: requests in, text out, one step at a time.

Synchronous and alone in its thread (`service.py` joins it to the server). A step asks the scheduler what
to compute, the runner for logits, the sampler for tokens, and each request's `Generation` for text that may be shown.
Along a pipeline several steps are under way at once, each with sequences of its own.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...contract.errors import DeadlineExceeded, FleetError, HandlerFailed
from ..text.tokenizer import Vocabulary
from .batch import Batch
from .generation import (
    Generation,
    MigratedRequest,
    Request,
    ResumeState,
    TokenDelta,
    resume_state,
    resumed_sampler,
    start_generation,
)
from .runner import Runner, RunnerLost
from .sampler import SamplingParams, sample
from .scheduler import PlannedChunk, Scheduler, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step under way, and those of its chunks whose last row is sampled."""

    chunks: list[PlannedChunk]
    sampling: list[PlannedChunk]


class Engine:
    """Not thread-safe, except `check` and `past`, which read what never changes."""

    def __init__(self, runner: Runner, scheduler: Scheduler, tokenizer: Vocabulary, eos_ids: frozenset[int]) -> None:
        self._runner = runner
        self._flights: deque[_StepInFlight] = deque()
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._active: dict[int, Generation] = {}
        self._borrowed: dict[int, MigratedRequest] = {}
        self._ids = itertools.count()

    def check(self, request: Request) -> None:
        """Errors: InvalidInput for what this engine can never finish."""
        self.scheduler.check(len(request.tokens), request.max_new_tokens)

    def past(self, request: Request, tokens: list[int]) -> ResumeState:
        """What the request needs to go on after tokens that it put out elsewhere. Errors: as of `resume_state`."""
        return resume_state(request, tokens, self._tokenizer, self._eos_ids)

    def add(self, request: Request, id: int | None = None) -> int:
        """Errors: InvalidInput, as `check`."""
        id = next(self._ids) if id is None else id
        answer = start_generation(request, id, self._tokenizer, self._eos_ids)
        self.scheduler.add(answer.sequence)
        self._active[id] = answer
        return id

    def cancel(self, id: int) -> None:
        """Frees its blocks at once; a finished or unknown id is no error, since it may finish meanwhile."""
        active = self._active.pop(id, None)
        if active is None:
            return
        if active.lent is not None:
            active.lent()
        else:
            self.scheduler.remove(active.sequence)

    # ── sequences that another worker computes, and those of another worker ────────────────────────

    def running(self) -> list[tuple[int, int]]:
        """Requests that are computed here and have begun to answer: (id, most tokens to come)."""
        return [
            (sequence.id, sequence.max_new_tokens - sequence.output_count)
            for sequence in self.scheduler.running
            if sequence.id in self._active and sequence.output_count
        ]

    def tokens_of(self, id: int) -> tuple[list[int], int, int, SamplingParams] | None:
        """Tokens so far, how many of them are prompt, most new ones, how they are drawn; None if it has ended."""
        active = self._active.get(id)
        if active is None or active.lent is not None:
            return None
        sequence = active.sequence
        return list(sequence.tokens), sequence.prompt_count, sequence.max_new_tokens, active.request.sampling

    def lend(self, id: int, drop: Callable[[], object]) -> list[int] | None:
        """Its tokens so far: from now on they come with `accept`. Nothing may be under way. None if it has ended."""
        active = self._active.get(id)
        if active is None or active.lent is not None:
            return None
        self.scheduler.remove(active.sequence)
        active.lent = drop
        return list(active.sequence.tokens)

    def accept(self, id: int, token: int) -> list[TokenDelta]:
        """The next token of one that is lent."""
        active = self._active.get(id)
        return [] if active is None or active.lent is None else [self._accept(active, token)]

    def take_back(self, id: int) -> None:
        """One that was lent goes on here, from the tokens that it has."""
        active = self._active.get(id)
        if active is None or active.lent is None:
            return
        active.lent = None
        active.sampler = resumed_sampler(active.sequence, active.request.sampling)
        self.scheduler.put_first(active.sequence)

    def borrow(
        self,
        sequence: Sequence,
        sampling: SamplingParams,
        caught_up: Callable[[], object],
        tell: Callable[[int], object],
    ) -> None:
        """Computes the tokens that are known, and says so; `begin` brings those that came meanwhile.

        Errors: InvalidInput for what does not fit here.
        """
        sequence.held = True
        self.scheduler.add(sequence)
        self._borrowed[sequence.id] = MigratedRequest(sequence, resumed_sampler(sequence, sampling), caught_up, tell)

    def begin(self, id: int, tokens: list[int]) -> None:
        """All tokens so far, of which the last is not computed yet: from now on it is continued here."""
        borrowed = self._borrowed.get(id)
        if borrowed is None:
            return
        sequence = borrowed.sequence
        sequence.tokens[:] = tokens
        sequence.held = False
        borrowed.sampler = resumed_sampler(sequence, borrowed.sampler.params)

    def give_back(self, id: int) -> None:
        """Its owner needs it no longer here."""
        borrowed = self._borrowed.pop(id, None)
        if borrowed is not None:
            self.scheduler.remove(borrowed.sequence)

    @property
    def idle(self) -> bool:
        return not self._active and not self._borrowed and not self._flights

    @property
    def stages(self) -> int:
        """That compute a step: 1 if all of it is computed here."""
        return self._runner.depth

    @property
    def stalled(self) -> bool:
        """Whether nothing can be computed for now: the runner takes nothing, or all that runs is computed elsewhere."""
        return not self._flights and (self._runner.stalled or not self.scheduler.pending)

    def step(self, now_ns: int = 0) -> list[TokenDelta]:
        """Sets steps going until the runner is busy, and ends the oldest; the deltas that it brought."""
        deltas = self._expire(now_ns)
        try:
            self._launch()
            return deltas + self._land()
        except RunnerLost as error:
            self._restart(error)
            return deltas
        except Exception as error:
            # Nothing of the steps under way is known to be right. Their sequences end; those that wait go on.
            logger.exception("step failed", extra={"steps": len(self._flights)})
            self._flights.clear()
            reason = error if isinstance(error, FleetError) else HandlerFailed(f"the model failed: {error!r}")
            failed = list(self.scheduler.running)
            for sequence in failed:
                self.cancel(sequence.id)
                self.give_back(sequence.id)
            return deltas + [TokenDelta(id=sequence.id, error=reason) for sequence in failed]

    def settle(self) -> list[TokenDelta]:
        """Ends all steps under way and begins none; what they brought."""
        deltas: list[TokenDelta] = []
        try:
            while self._flights:
                deltas += self._land()
        except RunnerLost as error:
            self._restart(error)
        return deltas

    def _restart(self, error: RunnerLost) -> None:
        logger.warning("the pipeline is broken, requests begin anew", extra={"error": str(error)})
        self._flights.clear()
        self.scheduler.restart()

    def take_over(self, runner: Runner) -> None:
        """From now on steps go there. Nothing may be under way; it has the keys and values of all that runs."""
        assert not self._flights
        self._runner = runner

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        """Ends every request with the error: the worker is going away."""
        deltas = [TokenDelta(id=id, error=error) for id in self._active]
        for delta in deltas:
            self.cancel(delta.id)
        return deltas

    def _expire(self, now_ns: int) -> list[TokenDelta]:
        late = [
            id
            for id, active in self._active.items()
            if active.request.deadline_ns is not None and now_ns >= active.request.deadline_ns
        ]
        deltas = []
        for id in late:
            count = self._active[id].sequence.output_count
            self.cancel(id)
            error = DeadlineExceeded(f"the deadline passed after {count} new tokens", hint="ask for fewer max_tokens")
            deltas.append(TokenDelta(id=id, error=error))
        return deltas

    def _launch(self) -> None:
        if self._runner.stalled:
            return
        while len(self._flights) < self._runner.depth:
            chunks = self.scheduler.plan(self._runner.depth)
            if not chunks:
                return
            batch, sampling = _batch(chunks)
            self._flights.append(_StepInFlight(chunks, sampling))
            self._runner.submit(batch)

    def _land(self) -> list[TokenDelta]:
        """The oldest step under way: its tokens are computed, and those that end a sequence sampled."""
        if not self._flights:
            return []
        logits = self._runner.collect()
        flight = self._flights.popleft()
        for chunk in flight.chunks:
            if self._runs(chunk):
                self.scheduler.advance(chunk)
                self._note_caught_up(chunk.sequence)
        rows = [row for row, chunk in enumerate(flight.sampling) if self._runs(chunk)]
        if not rows:
            return []
        if len(rows) < len(flight.sampling):
            logits = logits[rows]
        sampled = [flight.sampling[row].sequence.id for row in rows]
        tokens = sample(logits, [(self._active.get(id) or self._borrowed[id]).sampler for id in sampled])
        deltas = []
        for id, token in zip(sampled, tokens, strict=True):
            if id in self._active:
                deltas.append(self._accept(self._active[id], token))
            else:
                self._pass_on(self._borrowed[id], token)
        return deltas

    def _note_caught_up(self, sequence: Sequence) -> None:
        borrowed = self._borrowed.get(sequence.id)
        if borrowed is not None and sequence.held and sequence.computed == len(sequence.tokens):
            borrowed.caught_up()

    def _pass_on(self, borrowed: MigratedRequest, token: int) -> None:
        sequence = borrowed.sequence
        sequence.tokens.append(token)
        borrowed.tell(token)
        if sequence.output_count >= sequence.max_new_tokens:
            self.give_back(sequence.id)

    def _runs(self, chunk: PlannedChunk) -> bool:
        """Not if it was cancelled meanwhile."""
        return chunk.sequence.id in self._active or chunk.sequence.id in self._borrowed

    def _accept(self, answer: Generation, token: int) -> TokenDelta:
        delta = answer.accept(token)
        if delta.last:
            self.cancel(delta.id)
        return delta


def _batch(chunks: list[PlannedChunk]) -> tuple[Batch, list[PlannedChunk]]:
    """The chunks laid end to end, and those of them whose last row is sampled."""
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.begin : chunk.end]
        positions += range(chunk.begin, chunk.end)
        starts.append(len(tokens))
        if chunk.samples:
            logits_rows.append(len(tokens) - 1)
    tables = [chunk.sequence.table for chunk in chunks]
    batch = Batch(tokens=tokens, positions=positions, starts=starts, tables=tables, logits_rows=logits_rows)
    return batch, [chunk for chunk in chunks if chunk.samples]
