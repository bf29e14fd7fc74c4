"""Scheduler: decides which sequences the next step decodes, prefills, admits and preempts.

Continuous batching with chunked prefill: every decoding sequence gets one row, the rest of the token budget goes to
prompts, oldest first, in chunks. When blocks run out the youngest sequence is preempted: its blocks are freed and its
tokens, prompt and output alike, are recomputed later. The oldest is never preempted, and alone it always fits (`check`
rejects what never could), so each step makes progress.

Along a pipeline several steps are in flight. A sequence waits for its last token; a long prompt does not wait: its next
chunk follows the one before, and every stage computes them in that order. On a GPU a step may follow another one whose
tokens only the GPU knows yet (`plan_following`).

With `share_prefixes`, full blocks are kept in the pool, and a sequence that begins with the same tokens starts behind
them. Its last token is always computed, for the next one follows from it.

Pure: no clock, no tensors. The engine computes the plan and reports with `advance`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .block_pool import BlockKey, BlockPool, block_key
from .context_limit import check_context


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its tokens, prompt first, and its block table."""

    id: int
    tokens: list[int]
    prompt_count: int
    max_new_tokens: int
    computed: int = 0
    """Tokens whose keys and values are in the blocks."""
    submitted: int = 0
    """`computed` after all steps in flight."""
    table: list[int] = field(default_factory=list)
    admission: int = 0
    """How often its blocks were taken from it: what it has in a block is of the present admission alone."""
    held: bool = False
    """True if it is computed but not sampled, because more of its tokens come from another worker."""
    embeds: bool = False
    """True if the hidden state of its last token is wanted, and no next token."""

    keys: list[BlockKey] = field(default_factory=list)
    """Keys of its first full blocks, as far as they were asked for."""
    reused: int | None = None
    """Tokens that were in kept blocks when it was first admitted; None before."""

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_count

    def take_reused(self) -> int:
        """Prompt tokens that were in kept blocks, the first time that it is asked for; then 0."""
        reused, self.reused = min(self.reused or 0, self.prompt_count), 0
        return reused

    @property
    def in_flight(self) -> bool:
        return self.submitted != self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """Tokens `[begin, end)` of one sequence; the last of them is sampled if it ends the sequence."""

    sequence: Sequence
    begin: int
    end: int
    follows: bool = False
    """True if its one token is what the step before samples, which only the device knows yet."""

    @property
    def samples(self) -> bool:
        return self.follows or (self.end == len(self.sequence.tokens) and not self.sequence.held)


class Scheduler:
    """Queue and running sequences of one engine."""

    def __init__(
        self, pool: BlockPool, *, max_batch: int, token_budget: int, context_tokens: int, share_prefixes: bool = False
    ) -> None:
        if token_budget < max_batch:
            raise ValueError(f"a budget of {token_budget} tokens cannot hold {max_batch} decodes")
        self.pool = pool
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.context_tokens = min(context_tokens, pool.block_count * pool.block_tokens)
        self.share_prefixes = share_prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.preemptions = 0
        self.prompt_tokens = 0
        """Tokens of all sequences that were admitted, a preempted one's counted once."""
        self.reused_tokens = 0
        """Those of them that were in kept blocks."""

    def check(self, prompt_count: int, max_new_tokens: int) -> None:
        """Checks a request's size. Errors: as of `check_context`."""
        check_context(prompt_count, max_new_tokens, self.context_tokens)

    def add(self, sequence: Sequence) -> None:
        self.check(sequence.prompt_count, sequence.max_new_tokens)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a finished or cancelled sequence and frees its blocks."""
        self._free(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def pending(self) -> bool:
        """Checks whether a sequence has tokens to compute."""
        return bool(self.waiting) or any(len(one.tokens) > one.submitted for one in self.running)

    def plan(self, share: int = 1) -> list[PlannedChunk]:
        """Plans the next step: decodes first, then prompts in progress, then new ones; spread over `share` steps.

        Empty only if idle, or if steps in flight must end first.
        """
        chunks: dict[int, PlannedChunk] = {}
        budget, preempted = self.token_budget, self.preemptions
        most = -(-min(len(self.running) + len(self.waiting), self.max_batch) // share)
        # Two passes in order of arrival. A decode is one row that a user waits for, so it goes first.
        for decoding in (True, False):
            for sequence in list(self.running):
                if budget == 0 or len(chunks) >= most:
                    break
                if self.preemptions > preempted and sequence not in self.running:
                    continue  # just preempted for an older one
                pending = len(sequence.tokens) - sequence.submitted
                if pending <= 0 or (pending == 1) is not decoding:
                    continue
                count = min(pending, budget)
                before = len(chunks)
                if self._allocate(sequence, count, chunks):
                    chunks[sequence.id] = _chunk(sequence, count)
                    budget -= count
                if len(chunks) <= before:  # others were preempted, and give their tokens back
                    budget = self.token_budget - sum(chunk.end - chunk.begin for chunk in chunks.values())
        planned = [*chunks.values(), *self._admitted(budget, most - len(chunks))]
        return _submitted(planned)

    def _admitted(self, budget: int, most: int) -> list[PlannedChunk]:
        """Chunks of waiting sequences that are admitted now, the oldest first."""
        chunks: list[PlannedChunk] = []
        while self.waiting and budget > 0 and len(chunks) < most:
            sequence = self.waiting[0]
            if (kept := self._room_for(sequence)) is None:
                break
            self.waiting.popleft()
            self._admit(sequence, kept)
            count = min(len(sequence.tokens) - sequence.submitted, budget)
            chunks.append(_chunk(sequence, count))
            budget -= count
        return chunks

    def plan_following(self, chunks: list[PlannedChunk]) -> list[PlannedChunk]:
        """Plans the step after a step in flight, whose tokens are not known yet: one more token of each sequence that
        it samples and that does not end by its number of tokens, and prompts, as of `plan`.

        Empty if it needs blocks that others have, or may end what waiting sequences need; if more than tokens to sample
        is asked of running ones; and after a step of decodes alone, if there are prompts: what it says comes first.
        """
        if any(one.held or one.embeds for one in self.running):
            return []
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        going_on = [one for one in sampled if one.output_count + 1 < one.max_new_tokens]
        room = bool(self.waiting) and self._room_for(self.waiting[0]) is not None
        if self.waiting and not room and len(going_on) < len(sampled):
            return []
        prompts = [one for one in self.running if len(one.tokens) > one.submitted]
        after_prompts = any(chunk.end - chunk.begin > 1 for chunk in chunks)
        if not after_prompts and (prompts or room or (self.waiting and len(going_on) < len(sampled))):
            return []
        planned = [
            PlannedChunk(sequence=one, begin=one.submitted, end=one.submitted + 1, follows=True) for one in going_on
        ]
        budget = self.token_budget - len(planned)
        for sequence in prompts:
            if count := min(len(sequence.tokens) - sequence.submitted, budget):
                planned.append(_chunk(sequence, count))
                budget -= count
        if not all(self.pool.grow(chunk.sequence.table, chunk.end) for chunk in planned):
            return []
        return _submitted([*planned, *self._admitted(budget, self.max_batch)])

    def take_back(self, chunks: list[PlannedChunk]) -> None:
        """Takes back the last plan, which was not submitted. Blocks that it needed stay with their sequences."""
        for chunk in chunks:
            chunk.sequence.submitted = chunk.begin

    def advance(self, chunk: PlannedChunk) -> None:
        """Marks a chunk as computed."""
        sequence = chunk.sequence
        first, full = sequence.computed // self.pool.block_tokens, chunk.end // self.pool.block_tokens
        if self.share_prefixes and full > first:
            keys = self._keys(sequence, full)
            for index in range(first, full):
                self.pool.keep(sequence.table[index], keys[index])
        sequence.computed = chunk.end

    def put_first(self, sequence: Sequence) -> None:
        """Puts a removed sequence at the head of the queue, to be recomputed."""
        self._preempt(sequence)

    def restart(self) -> None:
        """Requeues all running sequences in order, after the loss of all computed keys and values."""
        while self.running:
            self._preempt(self.running.pop())
        self.pool.forget()

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """Kept blocks that a waiting sequence begins with, if it can be admitted now; None if not.

        The whole prompt must fit, though only a chunk runs: half a prompt that is then preempted by decodes would be
        computed for nothing.
        """
        if len(self.running) >= self.max_batch:
            return None
        kept = self._kept_prefix(sequence)
        taken = self.pool.blocks_for(len(sequence.tokens)) - len(kept) + self.pool.unowned_count(kept)
        return kept if taken <= self.pool.free_count - self._reserve() else None

    def _kept_prefix(self, sequence: Sequence) -> list[int]:
        """Kept blocks that a waiting sequence can begin with."""
        if not self.share_prefixes:
            return []
        return self.pool.find(self._keys(sequence, (len(sequence.tokens) - 1) // self.pool.block_tokens))

    def _keys(self, sequence: Sequence, count: int) -> list[BlockKey]:
        """Keys of a sequence's first full blocks. Its tokens only grow, so those that are made stay."""
        width = self.pool.block_tokens
        for index in range(len(sequence.keys), count):
            before = sequence.keys[-1] if sequence.keys else b""
            sequence.keys.append(block_key(before, sequence.tokens[index * width : (index + 1) * width]))
        return sequence.keys[:count]

    def _admit(self, sequence: Sequence, kept: list[int]) -> None:
        self.pool.share(sequence.table, kept)
        sequence.computed = sequence.submitted = len(kept) * self.pool.block_tokens
        if sequence.reused is None:
            sequence.reused = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.reused_tokens += sequence.computed
        if not self.pool.grow(sequence.table, len(sequence.tokens)):
            raise AssertionError("checked above")
        self.running.append(sequence)

    def _reserve(self) -> int:
        """Blocks kept for running sequences, one each, so that a new one is not preempted at once."""
        return len(self.running)

    def _allocate(self, sequence: Sequence, count: int, chunks: dict[int, PlannedChunk]) -> bool:
        """Allocates blocks for `count` more tokens, preempting the youngest; False if it must wait or was preempted."""
        while not self.pool.grow(sequence.table, sequence.submitted + count):
            # A sequence in flight writes into its blocks: if all younger ones are, this one waits.
            victim = next((one for one in reversed(self.running) if not one.in_flight), None)
            if victim is None or self.running.index(victim) < self.running.index(sequence):
                return False
            if victim is sequence and sequence is not self.running[-1]:
                return False
            self.running.remove(victim)
            chunks.pop(victim.id, None)
            self._preempt(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.computed = sequence.submitted = 0
        sequence.admission += 1


def _submitted(chunks: list[PlannedChunk]) -> list[PlannedChunk]:
    for chunk in chunks:
        chunk.sequence.submitted = chunk.end
    return chunks


def _chunk(sequence: Sequence, count: int) -> PlannedChunk:
    return PlannedChunk(sequence=sequence, begin=sequence.submitted, end=sequence.submitted + count)
