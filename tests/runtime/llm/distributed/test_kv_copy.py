"""What is copied to a worker that takes requests over: everything, once, whatever happens meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.llm.distributed.kv_copy import PIECE_TOKENS, ComputedSequence, KvCopyPlan
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.scheduler import Scheduler, Sequence

BLOCK = 4


def held(sequence: Sequence) -> ComputedSequence:
    return ComputedSequence(sequence.id, tuple(sequence.table), sequence.computed)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=8),
    blocks=st.integers(34, 60),
    steps=st.integers(1, 60),
    breaks=st.integers(0, 5),
)
def test_the_target_has_every_token_of_who_runs(
    lengths: list[tuple[int, int]], blocks: int, steps: int, breaks: int
) -> None:
    """A pool in which sequences come, go and yield; the source writes whose token a slot holds, the copy follows."""
    scheduler = Scheduler(BlockPool(blocks, BLOCK), max_batch=4, token_budget=32, context_tokens=1000)
    for id, (prompt, new) in enumerate(lengths):
        scheduler.add(Sequence(id=id, tokens=[0] * prompt, prompt_count=prompt, max_new_tokens=new))
    source: dict[tuple[int, int], tuple[int, int]] = {}
    target: dict[tuple[int, int], tuple[int, int]] = {}
    copy = KvCopyPlan(BLOCK)

    def bring(most: int | None = None) -> None:
        for span in copy.missing(map(held, scheduler.running))[:most]:
            assert 0 < span.end - span.begin <= PIECE_TOKENS
            for token in range(span.begin, span.end):
                slot = (span.table[token // BLOCK], token % BLOCK)
                target[slot] = source[slot]
            copy.done(span)

    for _ in range(steps):
        for chunk in scheduler.plan():
            sequence = chunk.sequence
            for token in range(chunk.begin, chunk.end):
                source[sequence.table[token // BLOCK], token % BLOCK] = (sequence.id, token)
            scheduler.advance(chunk)
            if chunk.samples:
                sequence.tokens.append(0)
                if sequence.output_count >= sequence.max_new_tokens:
                    scheduler.remove(sequence)
        bring(breaks)
    bring()
    for sequence in scheduler.running:
        for token in range(sequence.computed):
            assert target[sequence.table[token // BLOCK], token % BLOCK] == (sequence.id, token)
    assert not copy.missing(map(held, scheduler.running))


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
