"""Steps ahead with everything that engines have: adapters, grammars, deadlines, late requests, few blocks, refusals.

The model is a stand-in whose next token follows from all tokens before it, read where a cache has them: a wrong block,
a token that is lost, or a row too many changes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.contract.errors import DeadlineExceeded
from fleetstart.runtime.llm.engine import scheduler
from fleetstart.runtime.llm.engine.adapter_engines import AdapterEngines
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import InferenceEngine
from fleetstart.runtime.llm.engine.runner import Batch, LocalRunner
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.engine.test_engine import prompt
from tests.runtime.llm.models import text_of, tiny, tokens_of

VOCABULARY, END, BLOCK_TOKENS, ADAPTERS = 258, 1, 4, ("", "sql", "legal")
TOKENIZER = Tokenizer(tiny().file("tokenizer.json"))
NUMBERS = 997
LOGITS = torch.randn(NUMBERS, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
LOGITS[:, END] += 2.0


@dataclass
class Recall:
    """A decoder whose steps of decodes, or of at least `rows`, are asynchronous; every `refuses`-th of those with
    tokens that only it knows cannot be begun. It holds the scheduler to its limits."""

    blocks: int
    max_batch: int
    token_budget: int
    rows: int = 1 << 30
    refuses: int = 1 << 30
    adapter: str = ""
    ahead: bool = True
    asynchronous: bool = False

    def __post_init__(self) -> None:
        self._cache: list[int | None] = [None] * (self.blocks * BLOCK_TOKENS)
        self._logits = torch.empty(0)
        self._followed = 0
        self.begun = 0

    def forward(self, batch: Batch) -> Tensor:
        read = self.hidden(batch)
        self.asynchronous = self.ahead and (len(batch.tokens) == len(batch.tables) or len(batch.tokens) >= self.rows)
        self._logits.fill_(math.nan)  # the last step's
        self._logits = self.logits(read[batch.logits_rows])
        return self._logits

    def hidden(self, batch: Batch) -> Tensor:
        """Numbers [rows] of the contexts."""
        self.begun += 1
        self.asynchronous = False
        assert 0 < len(batch.tables) <= self.max_batch
        assert len(batch.tokens) <= self.token_budget
        tokens = list(batch.tokens)
        if batch.device_tokens is not None:
            self._followed += 1
            if self._followed % self.refuses == 0:
                raise RuntimeError("no memory for this step")
            assert not any(tokens[: len(batch.device_tokens)])
            tokens[: len(batch.device_tokens)] = batch.device_tokens.tolist()
        places = [
            [table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS for position in range(end + 1)]
            for table, begin, rows_end in zip(batch.tables, batch.starts, batch.starts[1:], strict=False)
            for end in batch.positions[begin:rows_end]
        ]
        for token, own in zip(tokens, places, strict=True):
            self._cache[own[-1]] = token
        return torch.tensor([self._number([self._cache[place] for place in own]) for own in places])

    def _number(self, context: list[int | None]) -> int:
        number = len(self.adapter)
        for token in context:
            assert token is not None, "a slot that no step has written"
            number = (number * 263 + token) % NUMBERS
        return number

    def logits(self, hidden: Tensor) -> Tensor:
        return LOGITS[hidden.long()].clone()

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden[:, None].float()


@dataclass(slots=True)
class Grammar:
    """A constraint and its matcher: any token of a fifth, chosen by those before; at last the end, or a failure."""

    most: int
    fails_at: int
    outputs: tuple[int, ...] = ()
    failure: str = ""

    def matcher(self, outputs: Sequence[int] = ()) -> Grammar:
        return replace(self, outputs=tuple(outputs))

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        marks = np.zeros(VOCABULARY, np.uint8)
        marks[END if len(self.outputs) >= self.most else slice(2 + sum(self.outputs) % 3, None, 5)] = 1
        if len(self.outputs) >= self.fails_at:
            self.failure = "too complex"
        return marks

    def consume(self, token: int) -> None:
        self.outputs += (token,)


def _request(chance: Random, adapters: Sequence[str]) -> Request:
    length, new = chance.choice([1, 1, 2, 5, 8, 13, 21]), chance.randint(1, 12)
    return Request(
        tokens=prompt(30, chance.randint(0, 2))[:length], max_new_tokens=new, adapter=chance.choice(adapters),
        sampling=SamplingParams(
            temperature=chance.choice([0, 0, 1.0]), seed=chance.randint(0, 5), top_p=chance.choice([1.0, 1.0, 0.9]),
            presence_penalty=chance.choice([0] * 9 + [1.0]),
        ),
        stops=["e"] if chance.random() < 0.2 else [], ignore_eos=chance.random() < 0.5,
        logprobs=1 if chance.random() < 0.05 else None,
        deadline_ns=chance.randint(1, 60) if chance.random() < 0.1 else None,
        constraint=Grammar(chance.randint(1, 8), chance.choice([3, 99, 99])) if chance.random() < 0.15 else None,  # type: ignore[arg-type]
    ) if chance.random() < 0.9 else Request(
        tokens=prompt(length), max_new_tokens=0, embeds=True, adapter=chance.choice(adapters)
    )  # fmt: skip


def _engine(decoder: Recall, *, share_prefixes: bool = False) -> Engine:
    scheduler = Scheduler(
        BlockPool(decoder.blocks, BLOCK_TOKENS), max_batch=decoder.max_batch, token_budget=decoder.token_budget,
        context_tokens=64, share_prefixes=share_prefixes,
    )  # fmt: skip
    return Engine(LocalRunner(decoder), scheduler, TOKENIZER, frozenset({END}), lambda: LocalRunner(decoder))


def _said(deltas: list[TokenDelta]) -> list[Any]:
    last = deltas[-1]
    probable = [one.token for delta in deltas for one in delta.logprobs]
    return [tokens_of(deltas), text_of(deltas), probable, last.embedding, last.finish, repr(last.error)]


def _alone(one: Request) -> list[Any]:
    subject = _engine(Recall(16, 1, 64, adapter=one.adapter, ahead=False))
    subject.add(replace(one, deadline_ns=None))
    deltas: list[TokenDelta] = []
    while not subject.idle:
        deltas += subject.step()
    return _said(deltas)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.integers(9, 20),
    max_batch=st.integers(1, 8),
    spare=st.sampled_from([0, 1, 4, 16, 60]),
    rows=st.sampled_from([1, 2, 5, 1 << 30]),
    refuses=st.sampled_from([2, 5, 1 << 30]),
    adapters=st.sampled_from([ADAPTERS, ADAPTERS[:1]]),
)
def test_each_answer_is_that_of_its_request_alone(
    seed: int, blocks: int, max_batch: int, spare: int, rows: int, refuses: int, adapters: Sequence[str]
) -> None:
    chance = Random(seed)  # Hypothesis's own would release the weights before every step
    limits = (blocks, max_batch, max_batch + spare, rows, refuses)
    engines = {name: _engine(Recall(*limits, name), share_prefixes=chance.random() < 0.5) for name in adapters}
    subject: InferenceEngine = AdapterEngines(engines[""], engines.__getitem__, adapters[1:])
    waiting = [_request(chance, adapters) for _ in range(chance.randint(1, 20))]
    places, cancelled = dict[int, Request](), set[int]()
    deltas: list[TokenDelta] = []
    haste, interrupts, now_ns = chance.choice([0.1, 1.0]), chance.choice([0, 0.2, 0.9]), 0
    while waiting or not subject.idle:
        now_ns += 1
        while waiting and chance.random() < haste:
            one = waiting.pop()
            places[subject.add(one)] = one
        if places and chance.random() < 0.03:
            cancelled.add(gone := chance.choice(list(places)))
            subject.cancel(gone)
        if chance.random() < 0.02:
            deltas += subject.release()
            subject.regain()
        deltas += subject.step(now_ns, partial(bool, chance.random() < interrupts))
        assert all(engine.idle or not engine.stalled for engine in engines.values())
    for engine in engines.values():
        assert (engine.scheduler.idle, engine.scheduler.pool.free_count) == (True, blocks)
    for id, one in places.items():
        mine, wanted = [delta for delta in deltas if delta.id == id], _alone(one)
        if id in cancelled or isinstance(mine[-1].error, DeadlineExceeded):
            assert tokens_of(mine) == wanted[0][: len(tokens_of(mine))]
        else:
            assert _said(mine) == wanted
            assert [delta.last for delta in mine].count(True) == 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.integers(9, 20),
    max_batch=st.integers(1, 8),
    spare=st.sampled_from([0, 1, 4, 16]),
    rows=st.sampled_from([1, 2, 5]),
)
def test_no_request_waits_much_longer_than_first_come_first_served_without_steps_ahead(
    seed: int, blocks: int, max_batch: int, spare: int, rows: int
) -> None:
    """Shorter prompts may take half of each step, and each request that ends may let the next one in a step later: at
    most a third as fast, and a few steps."""
    chance = Random(seed)
    requests = [replace(_request(chance, ("",)), deadline_ns=None, logprobs=None) for _ in range(20)]
    first: list[dict[int, int]] = []
    for ahead in (False, True):
        decoder = Recall(blocks, max_batch, max_batch + spare, rows, ahead=ahead)
        subject, found = _engine(decoder), dict[int, int]()
        for one in requests:
            subject.add(one)
        with pytest.MonkeyPatch.context() as patch:
            if not ahead:
                patch.setattr(scheduler, "_short", lambda prompts: [])
            while not subject.idle:
                for delta in subject.step():
                    found.setdefault(delta.id, decoder.begun)
        first.append(found)
    assert first[0].keys() == first[1].keys()
    assert all(first[1][id] <= 3 * wanted + 8 for id, wanted in first[0].items())
