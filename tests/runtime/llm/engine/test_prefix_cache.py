"""Shared beginnings of prompts: blocks hold what their key says, and the tokens are those of an engine without."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.llm.engine.block_pool import BlockPool, block_key
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.runner import LocalRunner
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.engine.sequences import Sequence
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, engine, native, plain, run, tokens_of

BLOCK = 4
GREEDY = SamplingParams(temperature=0)
SYSTEM = [7 + number % 91 for number in range(40)]


def request(tokens: list[int], new: int = 12) -> Request:
    return Request(tokens=tokens, max_new_tokens=new, sampling=GREEDY, ignore_eos=True)


def cached(deltas: list[TokenDelta]) -> int:
    return sum(delta.cached_tokens for delta in deltas)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=16),
    blocks=st.integers(10, 24),
    seed=st.integers(0, 10_000),
)
def test_a_sequence_finds_its_own_tokens_in_every_slot_that_it_reads(
    prompts: list[tuple[int, int, int]], blocks: int, seed: int
) -> None:
    """Prompts of three families with shared beginnings, in a pool that is too small for all; some are cancelled."""
    chance = random.Random(seed)
    pool = BlockPool(blocks, BLOCK)
    scheduler = Scheduler(pool, max_batch=3, token_budget=9, context_tokens=1000, share_prefixes=True)
    for id, (family, words, new) in enumerate(prompts):
        tokens = [family] * (family * 5 + 1) + [50] * words + [id] * (id % 3)
        if len(tokens) + new <= scheduler.context_tokens:
            scheduler.add(Sequence(id=id, tokens=tokens, prompt_count=len(tokens), max_new_tokens=new))
    memory: dict[tuple[int, int], tuple[int, ...]] = {}
    while not scheduler.idle:
        chunks = scheduler.plan()
        assert chunks
        for chunk in chunks:
            sequence = chunk.sequence
            for token in range(chunk.begin, chunk.end):
                memory[sequence.table[token // BLOCK], token % BLOCK] = tuple(sequence.tokens[: token + 1])
        for chunk in chunks:
            sequence = chunk.sequence
            for token in range(chunk.end):
                assert memory[sequence.table[token // BLOCK], token % BLOCK] == tuple(sequence.tokens[: token + 1])
            samples = chunk.samples
            scheduler.advance(chunk)
            if samples:
                sequence.tokens.append(chance.randrange(2))
            if sequence.output_count >= sequence.max_new_tokens or chance.random() < 0.03:
                scheduler.remove(sequence)
        held = {block for sequence in scheduler.running for block in sequence.table}
        assert len(held) + pool.free_count == blocks
    assert pool.free_count == blocks


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), lost=st.booleans())
def test_kept_blocks_are_given_away_when_room_is_needed_the_oldest_end_first(lengths: list[int], lost: bool) -> None:
    pool = BlockPool(8, BLOCK)
    for number, length in enumerate(lengths):
        table: list[int] = []
        assert pool.grow(table, length)
        key = b""
        for block in table[: length // BLOCK]:
            key = block_key(key, [number] * BLOCK)
            pool.keep(block, key)
        pool.release(table)
        assert pool.free_count == 8
    last = lengths[-1] // BLOCK
    keys: list[bytes] = []
    for _ in range(last):
        keys.append(block_key(keys[-1] if keys else b"", [len(lengths) - 1] * BLOCK))
    assert len(pool.find(keys)) == last  # nothing has needed their room
    if lost:
        pool.forget()
        assert (pool.kept_count, pool.find(keys)) == (0, [])
    everything: list[int] = []
    assert pool.grow(everything, 8 * BLOCK)
    assert sorted(everything) == list(range(8))
    assert pool.kept_count == 0


@pytest.mark.parametrize("decoder", [native, plain])
def test_tokens_are_equal_with_and_without(decoder: object, tiny_model: Checkpoint) -> None:
    requests = [request([*SYSTEM, *[120 + length] * length]) for length in (3, 9, 20, 1)]
    requests.append(request(SYSTEM))
    make = native if decoder is native else plain
    without = engine(tiny_model, make(tiny_model))
    sharing = engine(tiny_model, make(tiny_model), share_prefixes=True)
    for one in requests:
        expected, [deltas] = run(without, [one])[0], run(sharing, [one])
        assert tokens_of(deltas) == tokens_of(expected)
        assert cached(deltas) == (0 if one is requests[0] else 2 * BLOCK_TOKENS)
    together = run(sharing, requests)
    assert [tokens_of(deltas) for deltas in together] == [tokens_of(d) for d in run(without, requests)]
    assert sharing.load.cached_tokens == sum(map(cached, together)) + 4 * 2 * BLOCK_TOKENS
    assert without.load.cached_tokens == 0


def test_a_chat_goes_on_from_the_answer_before(tiny_model: Checkpoint) -> None:
    sharing = engine(tiny_model, native(tiny_model), share_prefixes=True)
    [first] = run(sharing, [request(SYSTEM, new=30)])
    again = request([*SYSTEM, *tokens_of(first), 99, 98])
    [second] = run(sharing, [again])
    assert cached(second) == 64  # 40 of the prompt and 29 of the answer were computed: four blocks
    [expected] = run(engine(tiny_model, native(tiny_model)), [again])
    assert tokens_of(second) == tokens_of(expected)


def test_a_pool_that_is_too_small_for_all_gives_the_same_tokens(tiny_model: Checkpoint) -> None:
    requests = [request([*SYSTEM[: 8 + 8 * (n % 4)], n, n + 1], new=24) for n in range(2, 14)]
    without = engine(tiny_model, native(tiny_model), blocks=8, max_batch=3)
    sharing = engine(tiny_model, native(tiny_model, blocks=8), blocks=8, max_batch=3, share_prefixes=True)
    expected, got = run(without, requests), run(sharing, requests)
    assert sharing.scheduler.preemptions > 0
    assert [tokens_of(deltas) for deltas in got] == [tokens_of(deltas) for deltas in expected]
    assert sharing.scheduler.pool.free_count == 8


def test_another_runner_has_none_of_the_blocks_of_the_one_before(tiny_model: Checkpoint) -> None:
    sharing = engine(tiny_model, native(tiny_model), share_prefixes=True)
    one = request([*SYSTEM, 5])
    [expected] = run(sharing, [one])
    sharing.take_over(LocalRunner(native(tiny_model)))
    [deltas] = run(sharing, [one])
    assert (tokens_of(deltas), cached(deltas)) == (tokens_of(expected), 0)
