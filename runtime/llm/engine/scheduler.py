"""Scheduler: decides which sequences the next step decodes, prefills, admits and preempts.

Continuous batching with chunked prefill: every decoding sequence gets one row, the rest of the token budget goes to
prompts in chunks. Of this rest, half at most goes to prompts that are much shorter than the oldest one, and all else to
the oldest: a short prompt does not wait for long ones, and a long one takes twice its time at most. When blocks run out
the youngest sequence is preempted: its blocks are freed and its tokens, prompt and output alike, are recomputed later.
The oldest is never preempted, and alone it always fits (`check` rejects what never could), so each step makes progress.

Along a pipeline several steps are in flight. A sequence waits for its last token; a long prompt does not wait: its next
chunk follows the one before, and every stage computes them in that order. On a GPU a step may follow another one whose
tokens only the GPU knows yet (`plan_following`).

With `share_prefixes`, full blocks are kept in the pool, and a sequence that begins with the same tokens starts behind
them. Its last token is always computed, for the next one follows from it.

Pure: no clock, no tensors. The engine computes the plan and reports with `advance`.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort

from .block_pool import BlockKey, BlockPool, block_key
from .context_limit import check_context
from .sequences import PlannedChunk, Sequence, StepPlan


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
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in order of arrival."""
        self._arrivals = itertools.count()
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
        sequence.arrival = next(self._arrivals)
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
        return bool(self.waiting) or any(one.pending > 0 for one in self.running)

    def plan(self, share: int = 1) -> list[PlannedChunk]:
        """Plans the next step: decodes first, then prompts; spread over `share` steps.

        Empty only if idle, or if steps in flight must end first.
        """
        step = StepPlan(self.token_budget, -(-min(len(self.running) + len(self.waiting), self.max_batch) // share))
        for sequence in list(self.running):
            if sequence.pending == 1:  # one row that a user waits for
                self._extend(step, sequence, 1)
        # Steps in flight keep their sequences' blocks: what an older one needs, they could not give back.
        self._plan_prompts(step, preempt=share == 1)
        return step.submitted()

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
        room = self._has_room()
        if self.waiting and not room and len(going_on) < len(sampled):
            return []
        prompts = any(one.pending > 0 for one in self.running)
        after_prompts = any(chunk.end - chunk.begin > 1 for chunk in chunks)
        if not after_prompts and (prompts or room or (self.waiting and len(going_on) < len(sampled))):
            return []
        step = StepPlan(self.token_budget, self.max_batch)
        for one in going_on:
            step.put(one, one.submitted + 1, follows=True)
        if not all(self.pool.grow(one.table, one.submitted + 1) for one in going_on):
            return []
        self._plan_prompts(step, preempt=False)
        return step.submitted()

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

    def put_back(self, sequence: Sequence) -> None:
        """Puts a removed sequence back into the queue, at its place in the order of arrival, to be recomputed."""
        self._preempt(sequence)

    def restart(self) -> None:
        """Requeues all running sequences in order, after the loss of all computed keys and values."""
        while self.running:
            self._preempt(self.running.pop())
        self.pool.forget()

    # ── prompts ────────────────────────────────────────────────────────────────────────────────────

    def _plan_prompts(self, step: StepPlan, *, preempt: bool) -> None:
        """Gives the rest of the step to prompts. With `preempt`, an older one can take the blocks of those that passed
        it."""
        of_step, prompts = step if preempt else None, self._prompts()
        if step.left and prompts and not prompts[0].table:
            self._admit(prompts[0], of_step)
        passing = step.left // 2
        for sequence in _short(prompts):
            if not passing or step.places < 2:  # the last one is for the oldest
                break
            if sequence.table or (self._may_pass(sequence, blocked=preempt) and self._admit(sequence)):
                passing -= self._extend(step, sequence, passing)
        blocked = False
        for sequence in prompts:
            if not step.left:
                break
            if not sequence.table and not blocked:
                blocked = not self._admit(sequence, of_step)
            if sequence.table:
                self._extend(step, sequence, step.left)

    def _extend(self, step: StepPlan, sequence: Sequence, most: int) -> int:
        """Adds at most so many of a running sequence's tokens to the step; returns how many."""
        begin = step.end_of(sequence)
        count = min(len(sequence.tokens) - begin, most, step.left)
        if count <= 0 or not (step.places or step.has(sequence)) or not sequence.table:
            return 0  # without blocks it was just preempted for an older one
        if not self._allocate(sequence, begin + count, step):
            return 0
        step.put(sequence, begin + count)
        return count

    def _prompts(self) -> list[Sequence]:
        """Sequences with more to compute than a token to decode, in order of arrival; waiting ones if there is a
        slot."""
        running = (one for one in self.running if one.pending > 1)
        waiting = self.waiting if len(self.running) < self.max_batch else []
        return list(heapq.merge(running, waiting, key=_arrival))

    # ── admission ──────────────────────────────────────────────────────────────────────────────────

    def _has_room(self) -> bool:
        """Checks whether a waiting sequence can be admitted now."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return False
        if self._room_for(self.waiting[0]) is not None or self._in_the_way(self.waiting[0]):
            return True
        return any(self._may_pass(one, blocked=True) for one in _short(self._prompts()) if not one.table)

    def _may_pass(self, sequence: Sequence, *, blocked: bool) -> bool:
        """Checks whether a waiting sequence can be admitted before older ones: the first of these keeps a slot, and its
        blocks if they are free. If they are not, it may pass only with `blocked`, as long as nothing is in its way."""
        first = self.waiting[0]
        if first is sequence:
            return True
        kept, of_first = self._room_for(sequence), self._room_for(first)
        if kept is None or len(self.running) + 1 >= self.max_batch:
            return False
        if of_first is None:
            return blocked
        taken = self._taken(sequence, kept) + self._taken(first, of_first)
        return taken < self.pool.free_count - self._reserve()

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """Kept blocks that a waiting sequence begins with, if it can be admitted now; None if not.

        The whole prompt must fit, though only a chunk runs: half a prompt that is then preempted by decodes would be
        computed for nothing.
        """
        if len(self.running) >= self.max_batch:
            return None
        kept = self._kept_prefix(sequence)
        return kept if self._taken(sequence, kept) <= self.pool.free_count - self._reserve() else None

    def _taken(self, sequence: Sequence, kept: list[int]) -> int:
        """Free blocks that a waiting sequence takes, which begins with these kept ones."""
        return self.pool.blocks_for(len(sequence.tokens)) - len(kept) + self.pool.unowned_count(kept)

    def _in_the_way(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that passed this one, if it can be admitted without them; none of a step in flight."""
        passed = [one for one in self.running if one.arrival > sequence.arrival and not one.in_flight]
        freed = self.pool.freed_by([one.table for one in passed])
        kept = self._kept_prefix(sequence)
        taken = self._taken(sequence, kept) + len(freed.intersection(kept))
        left = self.pool.free_count + len(freed) - (self._reserve() - len(passed))
        return passed if taken <= left else []

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

    def _admit(self, sequence: Sequence, of_step: StepPlan | None = None) -> bool:
        """Admits a waiting sequence; False if there is no room for it. With the step that is being planned, the
        youngest of those that passed it are preempted for it."""
        kept = self._room_for(sequence)
        if kept is None and of_step is not None:
            passed = self._in_the_way(sequence)
            while passed and kept is None:
                self._make_wait(passed.pop(), of_step)
                kept = self._room_for(sequence)
        if kept is None:
            return False
        self.waiting.remove(sequence)
        self.pool.share(sequence.table, kept)
        sequence.computed = sequence.submitted = len(kept) * self.pool.block_tokens
        if sequence.reused is None:
            sequence.reused = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.reused_tokens += sequence.computed
        if not self.pool.grow(sequence.table, len(sequence.tokens)):
            raise AssertionError("checked above")
        insort(self.running, sequence, key=_arrival)
        return True

    def _reserve(self) -> int:
        """Blocks kept for running sequences, one each, so that a new one is not preempted at once."""
        return len(self.running)

    def _allocate(self, sequence: Sequence, token_count: int, step: StepPlan) -> bool:
        """Allocates blocks for a sequence's first tokens, preempting the youngest; False if it must wait or was
        preempted."""
        while not self.pool.grow(sequence.table, token_count):
            # A sequence in flight writes into its blocks: if all younger ones are, this one waits.
            victim = next((one for one in reversed(self.running) if not one.in_flight), None)
            if victim is None or victim.arrival < sequence.arrival:
                return False
            if victim is sequence and sequence is not self.running[-1]:
                return False
            self._make_wait(victim, step)
            if victim is sequence:
                return False
        return True

    def _make_wait(self, victim: Sequence, step: StepPlan) -> None:
        """Preempts a running sequence, also of the step that is being planned."""
        self.running.remove(victim)
        step.drop(victim)
        self._preempt(victim)
        self.preemptions += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.computed = sequence.submitted = 0
        sequence.admission += 1


def _short(prompts: list[Sequence]) -> list[Sequence]:
    """Those of the prompts, in order of arrival, that may pass the oldest, the shortest first: they have less than half
    of its tokens. Even with half of a step each ends sooner than behind it, and by more than the oldest one loses."""
    return sorted((one for one in prompts if 2 * one.pending < prompts[0].pending), key=lambda one: one.pending)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
