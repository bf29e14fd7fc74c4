"""Laws of the block pool and the scheduler, over random arrivals, lengths and cancellations."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleetstart.runtime.contract.errors import ContextExceeded, InvalidInput
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.engine.sequences import PlannedChunk, Sequence

BLOCK = 4


def sequence(id: int, prompt: int, new: int) -> Sequence:
    return Sequence(id=id, tokens=[7] * prompt, prompt_count=prompt, max_new_tokens=new)


def scheduler(blocks: int = 8, *, max_batch: int = 4, budget: int = 8, context: int = 1000) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), max_batch=max_batch, token_budget=budget, context_tokens=context)


def compute(scheduler: Scheduler, chunks: list[PlannedChunk]) -> None:
    """What the engine does with a plan: computes, samples, ends what has all its tokens."""
    for chunk in chunks:
        samples = chunk.samples
        scheduler.advance(chunk)
        if samples:
            chunk.sequence.tokens.append(7)
            if chunk.sequence.output_count >= chunk.sequence.max_new_tokens:
                scheduler.remove(chunk.sequence)


def decoding(subject: Scheduler, *requests: tuple[int, int]) -> list[PlannedChunk]:
    """The step in flight in which sequences of these prompts and new tokens decode their second token."""
    for id, (prompt, new) in enumerate(requests):
        subject.add(sequence(id, prompt, new))
    compute(subject, subject.plan())
    return subject.plan()


def test_a_step_that_follows_has_the_sequences_that_go_on() -> None:
    subject = scheduler()
    chunks = decoding(subject, (3, 9), (2, 2), (1, 9))
    following = subject.plan_following(chunks)
    assert [(chunk.sequence.id, chunk.begin, chunk.end) for chunk in following] == [(0, 4, 5), (2, 2, 3)]
    assert [len(chunk.sequence.table) for chunk in following] == [2, 1]
    assert subject.plan() == []
    subject.take_back(following)
    compute(subject, chunks)
    assert [(chunk.sequence.id, chunk.begin) for chunk in subject.plan()] == [(0, 4), (2, 2)]


@pytest.mark.parametrize("waits", [(1, 1), (20, 1)], ids=["room", "no room"])
def test_a_step_follows_unless_one_that_waits_has_room(waits: tuple[int, int]) -> None:
    subject = scheduler(blocks=6)
    chunks = decoding(subject, (3, 9), (2, 9))
    subject.add(sequence(2, *waits))
    assert bool(subject.plan_following(chunks)) is (waits == (20, 1))


def test_a_step_does_not_follow_where_one_that_ends_makes_room() -> None:
    subject = scheduler(max_batch=2)
    chunks = decoding(subject, (3, 9), (2, 2))
    assert subject.plan_following(chunks)
    subject.take_back(chunks)
    subject.add(sequence(2, 1, 1))
    assert subject.plan_following(chunks) == []


def test_a_step_that_needs_blocks_of_others_does_not_follow() -> None:
    subject = scheduler(blocks=5, budget=16)
    chunks = decoding(subject, (7, 9), (7, 9))
    assert [chunk.end for chunk in chunks] == [8, 8]  # the next token of either begins a block, and one is free
    assert subject.plan_following(chunks) == []
    assert [chunk.sequence.submitted for chunk in chunks] == [8, 8]
    compute(subject, chunks)
    assert [chunk.begin for chunk in subject.plan()] == [8]


def test_a_step_that_follows_one_with_prompts_goes_on_with_prompts() -> None:
    subject = scheduler(blocks=20)
    for id, prompt in enumerate((3, 9, 6, 2)):
        subject.add(sequence(id, prompt, 9))
    chunks = subject.plan()
    assert [(chunk.sequence.id, chunk.begin, chunk.end) for chunk in chunks] == [(0, 0, 3), (1, 0, 5)]
    following = subject.plan_following(chunks)
    planned = [(chunk.sequence.id, chunk.begin, chunk.end, chunk.follows) for chunk in following]
    assert planned == [(0, 3, 4, True), (1, 5, 9, False), (2, 0, 3, False)]
    assert [chunk.samples for chunk in following] == [True, True, False]
    compute(subject, chunks)
    after = [(chunk.sequence.id, chunk.begin, chunk.end) for chunk in subject.plan_following(following)]
    assert after == [(0, 4, 5), (1, 9, 10), (2, 3, 6), (3, 0, 2)]


def test_no_step_follows_where_a_sequence_is_held_for_another_worker() -> None:
    subject = scheduler()
    chunks = decoding(subject, (3, 9), (2, 9))
    chunks[1].sequence.held = True
    assert subject.plan_following(chunks) == []


class Pool(RuleBasedStateMachine):
    """A pool never gives a block twice, nor loses one."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, BLOCK)
        self.tables: list[list[int]] = [[] for _ in range(4)]

    @rule(index=st.integers(0, 3), tokens=st.integers(0, 60))
    def grow(self, index: int, tokens: int) -> None:
        table, free = self.tables[index], self.pool.free_count
        before = list(table)
        missing = max(self.pool.blocks_for(tokens) - len(before), 0)
        grown = self.pool.grow(table, tokens)
        assert grown is (missing <= free)
        assert table[: len(before)] == before
        assert len(table) == len(before) + (missing if grown else 0)

    @rule(index=st.integers(0, 3))
    def release(self, index: int) -> None:
        self.pool.release(self.tables[index])
        assert self.tables[index] == []

    @precondition(lambda self: any(self.tables))
    @rule()
    def release_twice(self) -> None:
        table = next(table for table in self.tables if table)
        again = list(table)
        self.pool.release(table)
        with pytest.raises(KeyError):
            self.pool.release(again)

    @invariant()
    def each_block_has_one_owner(self) -> None:
        owned = [block for table in self.tables for block in table]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.pool.free_count == 12


TestPool = pytest.mark.slow(Pool.TestCase)


def assert_plan_is_sound(scheduler: Scheduler, chunks: list[PlannedChunk]) -> None:
    assert sum(chunk.end - chunk.begin for chunk in chunks) <= scheduler.token_budget
    assert len(scheduler.running) <= scheduler.max_batch
    assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
    owned = [block for sequence in scheduler.running for block in sequence.table]
    assert len(owned) == len(set(owned))
    assert len(owned) + scheduler.pool.free_count == scheduler.pool.block_count
    assert all(not sequence.table and sequence.computed == 0 for sequence in scheduler.waiting)
    for chunk in chunks:
        assert chunk.sequence in scheduler.running
        assert chunk.sequence.computed == chunk.begin < chunk.end <= len(chunk.sequence.tokens)
        assert len(chunk.sequence.table) * BLOCK >= chunk.end


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=20),
    blocks=st.integers(4, 24),
    max_batch=st.integers(1, 6),
    budget=st.integers(0, 30),
    seed=st.integers(0, 10_000),
)
def test_all_that_is_admitted_finishes_and_every_block_comes_back(
    lengths: list[tuple[int, int]], blocks: int, max_batch: int, budget: int, seed: int
) -> None:
    subject = scheduler(blocks, max_batch=max_batch, budget=max_batch + budget)
    chance = random.Random(seed)
    fits = [pair for pair in lengths if sum(pair) <= subject.context_tokens]
    arriving = [sequence(id, *pair) for id, pair in enumerate(fits)]
    admitted: list[Sequence] = []
    cancelled: set[int] = set()
    # Each step computes at least one token of the oldest, and each of its tokens at most once: it never yields.
    limit = sum(len(one.tokens) + one.max_new_tokens for one in arriving) + len(arriving) + 1
    steps = 0
    while arriving or not subject.idle:
        while arriving and (subject.idle or chance.random() < 0.3):
            admitted.append(arriving.pop(0))
            subject.add(admitted[-1])
        oldest = min((one.id for one in [*subject.running, *subject.waiting]), default=None)
        chunks = subject.plan()
        assert_plan_is_sound(subject, chunks)
        assert oldest in {chunk.sequence.id for chunk in chunks}
        compute(subject, chunks)
        if subject.running and chance.random() < 0.05:
            victim = chance.choice(subject.running)
            cancelled.add(victim.id)
            subject.remove(victim)
        steps += 1
        assert steps <= limit
    for one in admitted:
        assert one.id in cancelled or one.output_count == one.max_new_tokens
    assert subject.pool.free_count == blocks


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    subject = scheduler(blocks=4)
    with pytest.raises(ContextExceeded, match=r"16 tokens; .* too long for 7 new ones: it has 10, together 17") as one:
        subject.add(sequence(1, 10, 7))
    assert "larger max_context and kv_memory" in one.value.hint
    with pytest.raises(InvalidInput, match="prompt is empty"):
        subject.add(sequence(1, 0, 7))
    assert subject.idle
    subject.add(sequence(1, 10, 6))


def test_decodes_go_first_and_the_prompt_gets_the_rest_of_the_budget() -> None:
    subject = scheduler(blocks=32, budget=8)
    first, second = sequence(1, 4, 9), sequence(2, 30, 9)
    subject.add(first)
    compute(subject, subject.plan())
    subject.add(second)
    spans = []
    for _ in range(5):
        chunks = subject.plan()
        spans.append([(chunk.sequence.id, chunk.begin, chunk.end, chunk.samples) for chunk in chunks])
        compute(subject, chunks)
    assert spans[0] == [(1, 4, 5, True), (2, 0, 7, False)]
    assert spans[3] == [(1, 7, 8, True), (2, 21, 28, False)]
    assert spans[4] == [(1, 8, 9, True), (2, 28, 30, True)]


def test_the_youngest_yields_and_is_computed_anew_before_those_who_came_later() -> None:
    subject = scheduler(blocks=4, max_batch=3, budget=12)
    old, young, later = sequence(1, 4, 12), sequence(2, 4, 8), sequence(3, 4, 8)
    for one in (old, young, later):
        subject.add(one)
    order: list[int] = []
    while not subject.idle:
        chunks = subject.plan()
        assert_plan_is_sound(subject, chunks)
        before = {one.id for one in subject.running}
        compute(subject, chunks)
        order += sorted(before - {one.id for one in subject.running})
    assert subject.preemptions > 0
    assert order == [1, 2, 3]


def spans(chunks: list[PlannedChunk]) -> list[tuple[int, int, int]]:
    return sorted((chunk.sequence.id, chunk.begin, chunk.end) for chunk in chunks)


def test_a_short_prompt_passes_long_ones_and_the_oldest_has_half_of_the_step() -> None:
    subject = scheduler(blocks=200, max_batch=8, budget=16)
    for id in range(4):
        subject.add(sequence(id, 150, 2))
    compute(subject, subject.plan())
    subject.add(sequence(4, 5, 2))
    assert spans(subject.plan()) == [(0, 16, 27), (4, 0, 5)]
    subject = scheduler(blocks=200, max_batch=8, budget=16)
    for id, prompt in enumerate((150, 150, 74, 30, 9)):
        subject.add(sequence(id, prompt, 2))
    assert spans(subject.plan()) == [(0, 0, 8), (4, 0, 8)]


@pytest.mark.parametrize("prompt", [70, 40], ids=["as long", "half as long as what is left"])
def test_a_prompt_that_would_win_less_than_the_oldest_loses_waits(prompt: int) -> None:
    subject = scheduler(blocks=200, budget=16)
    subject.add(sequence(0, 80, 2))
    subject.add(sequence(1, prompt, 2))
    assert spans(subject.plan()) == [(0, 0, 16)]


def test_short_prompts_without_end_take_a_long_one_half_of_its_rate() -> None:
    subject = scheduler(blocks=400, max_batch=4, budget=16)
    subject.add(sequence(0, 20, 2))
    long, later = sequence(1, 400, 2), sequence(2, 400, 2)
    subject.add(long)
    subject.add(later)
    ended = dict[int, int]()
    for step in range(1, 200):
        subject.add(sequence(1000 + step, 9, 1))
        compute(subject, subject.plan())
        for one in (long, later):
            if one.output_count:
                ended.setdefault(one.id, step)
    assert ended[1] <= 2 * 420 / 16 + 1 < ended[2] <= 2 * 820 / 16 + 1


def test_who_passes_leaves_a_slot_and_blocks_for_the_oldest_that_waits() -> None:
    subject = scheduler(blocks=56, max_batch=3, budget=16)
    for id, prompt in enumerate((100, 100, 4, 4)):
        subject.add(sequence(id, prompt, 30))
    compute(subject, subject.plan())
    assert [one.id for one in subject.running] == [0, 2]  # a third slot is the second one's
    subject = scheduler(blocks=53, max_batch=4, budget=16)
    for id, prompt in enumerate((100, 100, 8)):  # 25 blocks and 25, one more for each that runs, and 2
        subject.add(sequence(id, prompt, 4))
    compute(subject, subject.plan())
    assert [one.id for one in subject.running] == [0]


def test_who_passed_one_that_had_no_blocks_gives_them_back() -> None:
    subject = scheduler(blocks=12, max_batch=4, budget=16)
    subject.add(sequence(0, 12, 3))
    compute(subject, subject.plan())
    subject.add(sequence(1, 40, 2))
    subject.add(sequence(2, 4, 40))
    compute(subject, subject.plan())
    assert [one.id for one in subject.running] == [0, 2]
    while 1 not in [one.id for one in subject.running]:
        compute(subject, subject.plan())
    assert subject.preemptions == 1
    assert [one.id for one in subject.waiting] == [2]
    while not subject.idle:
        compute(subject, subject.plan())
    assert subject.pool.free_count == 12


def test_a_step_does_not_follow_where_a_short_prompt_may_pass_one_without_blocks() -> None:
    subject = scheduler(blocks=12)
    chunks = decoding(subject, (3, 9))
    subject.add(sequence(1, 44, 2))
    subject.add(sequence(2, 40, 2))
    assert subject.plan_following(chunks)
    subject.take_back(chunks)
    subject.add(sequence(3, 4, 2))
    assert subject.plan_following(chunks) == []


def test_a_budget_that_cannot_hold_the_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        scheduler(max_batch=8, budget=7)
