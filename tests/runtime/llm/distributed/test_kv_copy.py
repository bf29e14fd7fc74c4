"""What is copied to a worker that takes requests over: everything, once, whatever happens meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetstart.runtime.llm.distributed.kv_copy import PIECE_TOKENS, ComputedSequence, KvCopyPlan
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.engine.sequences import Sequence

BLOCK = 4


def held(sequence: Sequence) -> ComputedSequence:
    return ComputedSequence(sequence.id, tuple(sequence.table), sequence.computed, admission=sequence.admission)


class Cache:
    """A pool in which sequences come, go and yield; the source writes whose token a slot holds, the copy follows."""

    def __init__(self, lengths: list[tuple[int, int]], blocks: int) -> None:
        self.scheduler = Scheduler(BlockPool(blocks, BLOCK), max_batch=4, token_budget=32, context_tokens=1000)
        for id, (prompt, new) in enumerate(lengths):
            self.scheduler.add(Sequence(id=id, tokens=[0] * prompt, prompt_count=prompt, max_new_tokens=new))
        self.source: dict[tuple[int, int], tuple[int, int]] = {}
        self.target: dict[tuple[int, int], tuple[int, int]] = {}
        self.copy = KvCopyPlan(BLOCK)

    def step(self) -> None:
        for chunk in self.scheduler.plan():
            sequence = chunk.sequence
            for token in range(chunk.begin, chunk.end):
                self.source[sequence.table[token // BLOCK], token % BLOCK] = (sequence.id, token)
            self.scheduler.advance(chunk)
            if chunk.samples:
                sequence.tokens.append(0)
                if sequence.output_count >= sequence.max_new_tokens:
                    self.scheduler.remove(sequence)

    def bring(self, most: int | None = None, steps: Iterator[int] | None = None) -> None:
        """Copies what is missing; so many steps run while each piece is read."""
        for span in self.copy.missing(map(held, self.scheduler.running))[:most]:
            assert 0 < span.end - span.begin <= PIECE_TOKENS
            for token in range(span.begin, span.end):
                slot = (span.table[token // BLOCK], token % BLOCK)
                self.target[slot] = self.source[slot]
                if steps is not None and token in (span.begin, (span.begin + span.end) // 2):
                    for _ in range(next(steps)):
                        self.step()
            self.copy.done(span)

    def assert_copied(self) -> None:
        for sequence in self.scheduler.running:
            for token in range(sequence.computed):
                assert self.target[sequence.table[token // BLOCK], token % BLOCK] == (sequence.id, token)
        assert not self.copy.missing(map(held, self.scheduler.running))


requests = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(lengths=requests, blocks=st.integers(34, 60), steps=st.integers(1, 60), breaks=st.integers(0, 5))
def test_the_target_has_every_token_of_who_runs(
    lengths: list[tuple[int, int]], blocks: int, steps: int, breaks: int
) -> None:
    cache = Cache(lengths, blocks)
    for _ in range(steps):
        cache.step()
        cache.bring(breaks)
    cache.bring()
    cache.assert_copied()


@settings(max_examples=150, deadline=None)
@given(
    lengths=requests,
    blocks=st.integers(34, 60),
    pace=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    rounds=st.integers(1, 6),
)
@example(
    lengths=[(3, 7), (12, 48), (22, 50), (36, 59), (53, 45)],
    blocks=34,
    pace=[30, 0, 10, 1, 10, 0, 0, 30, 10, 1, 1, 3, 10, 0, 3, 0, 3, 3, 30, 0],
    rounds=2,
)
def test_blocks_that_change_hands_while_they_are_read_are_copied_again(
    lengths: list[tuple[int, int]], blocks: int, pace: list[int], rounds: int
) -> None:
    """The engine goes on during the rounds, and stands still in the last one."""
    cache = Cache(lengths, blocks)
    cache.step()
    for _ in range(rounds):
        cache.bring(steps=itertools.cycle(pace))
    cache.bring()
    cache.assert_copied()


def test_a_block_that_comes_back_to_its_sequence_is_copied_again() -> None:
    copy = KvCopyPlan(BLOCK)
    before = ComputedSequence(1, (7,), 4)
    [span] = copy.missing([before])
    copy.done(span)  # another sequence had the block while it was read
    [span] = copy.missing([replace(before, admission=1)])
    assert (span.begin, span.end) == (0, 4)
    copy.done(span)
    assert not copy.missing([replace(before, admission=1)])


def test_only_what_is_new_is_copied_again() -> None:
    copy = KvCopyPlan(BLOCK)
    [span] = copy.missing([ComputedSequence(1, (7, 3), 6)])
    assert (span.begin, span.end) == (0, 6)
    copy.done(span)
    [span] = copy.missing([ComputedSequence(1, (7, 3, 9), 9)])
    assert (span.begin, span.end) == (6, 9)
    copy.done(span)
    assert not copy.missing([ComputedSequence(1, (7, 3, 9), 9)])
    [span] = copy.missing([ComputedSequence(2, (3,), 2)])
    assert (span.begin, span.end) == (0, 2), "another sequence's block is copied anew"
