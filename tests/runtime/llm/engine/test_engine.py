"""The engine over real decoders: batches, preemption, stops, limits, cancelling, deadlines, failures."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.contract.errors import DeadlineExceeded, HandlerFailed, InvalidInput, Unavailable
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.runner import Batch
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import Checkpoint, config_of, engine, native, plain, run, text_of, tiny, tokens_of

GREEDY = SamplingParams(temperature=0)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(length: int = 12, new: int = 20, seed: int = 1, **fields: Any) -> Request:
    settings: dict[str, Any] = {"sampling": GREEDY, "ignore_eos": True} | fields
    return Request(tokens=prompt(length, seed), max_new_tokens=new, **settings)


class LogitsOnly:
    """The part of a decoder that computes no embeddings."""

    asynchronous = False

    def hidden(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def normed(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Says(LogitsOnly):
    """A decoder that puts out what it is told, token by token, for one sequence at a time."""

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        self._tokens = tokens
        self._prompt_length = prompt_length

    def forward(self, batch: Batch) -> Tensor:
        logits = torch.zeros(len(batch.logits_rows), 258)
        for row, at in enumerate(batch.logits_rows):
            logits[row, self._tokens[batch.positions[at] + 1 - self._prompt_length]] = 1.0
        return logits


def embedding(length: int, seed: int = 1) -> Request:
    return Request(tokens=prompt(length, seed), max_new_tokens=0, embeds=True)


@pytest.mark.parametrize("decoder", [native, plain])
def test_embeddings_share_steps_with_chats_and_change_nothing(decoder: Any, tiny_model: Checkpoint) -> None:
    chats = [request(length, seed=length) for length in (3, 40)]
    texts = [embedding(length, seed=length) for length in (1, 9, 130)]
    alone = [run(engine(tiny_model, decoder(tiny_model)), [one])[0] for one in chats + texts]
    subject = engine(tiny_model, decoder(tiny_model), token_budget=64)  # the longest takes three chunks
    together = run(subject, [texts[2], chats[0], texts[0], chats[1], texts[1]])
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count
    assert [tokens_of(together[at]) for at in (1, 3)] == [tokens_of(deltas) for deltas in alone[:2]]
    for [delta], [wanted] in zip([together[2], together[4], together[0]], alone[2:], strict=True):
        assert (delta.finish, delta.tokens, len(delta.embedding)) == ("stop", (), config_of(tiny_model).hidden_size)
        torch.testing.assert_close(torch.tensor(delta.embedding), torch.tensor(wanted.embedding), rtol=1e-4, atol=1e-4)


def saying(weights: Checkpoint, text: str, **fields: Any) -> tuple[str, str | None, list[str]]:
    """What comes of a model that says the text, then ends."""
    tokens = [*Tokenizer(weights.file("tokenizer.json")).encode(text, add_special_tokens=False), 1]
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 200} | fields
    subject = engine(weights, Says(tokens, 3))
    [deltas] = run(subject, [Request(tokens=[5, 6, 7], **settings)])
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count
    return text_of(deltas), deltas[-1].finish, [delta.text for delta in deltas]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=8),
    blocks=st.integers(6, 16),
    budget=st.integers(8, 64),
    threads=st.sampled_from([1, 2]),
)
def test_tokens_are_the_same_alone_batched_chunked_and_preempted(
    lengths: list[tuple[int, int]], blocks: int, budget: int, threads: int
) -> None:
    weights = tiny()
    requests = [
        request(length, new, seed, sampling=SamplingParams(temperature=1.0, seed=seed) if seed % 2 else GREEDY)
        for seed, (length, new) in enumerate(lengths)
    ]
    alone = [run(engine(weights, native(weights, blocks=8), max_batch=1), [one])[0] for one in requests]
    tight = engine(weights, native(weights, blocks=blocks, threads=threads), blocks=blocks, token_budget=budget)
    together = run(tight, requests)
    assert [tokens_of(deltas) for deltas in together] == [tokens_of(deltas) for deltas in alone]
    assert [text_of(deltas) for deltas in together] == [text_of(deltas) for deltas in alone]
    assert tight.scheduler.pool.free_count == blocks


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_preemption_happens_and_changes_no_token(tiny_model: Checkpoint, kind: str) -> None:
    decoder: Any = native if kind == "native" else plain
    requests = [request(20, 40, seed) for seed in range(4)]
    roomy = engine(tiny_model, decoder(tiny_model))
    wanted = [tokens_of(deltas) for deltas in run(roomy, requests)]
    tight = engine(tiny_model, decoder(tiny_model, blocks=7), blocks=7)
    assert [tokens_of(deltas) for deltas in run(tight, requests)] == wanted
    assert roomy.scheduler.preemptions == 0
    assert tight.scheduler.preemptions > 0


def test_finish_reasons_and_counts(tiny_model: Checkpoint) -> None:
    assert saying(tiny_model, "hello") == ("hello", "stop", [*"hello", ""])
    assert saying(tiny_model, "hello", max_new_tokens=3)[:2] == ("hel", "length")
    assert saying(tiny_model, "hello", max_new_tokens=5)[:2] == ("hello", "length")
    assert saying(tiny_model, "hello", max_new_tokens=6)[:2] == ("hello", "stop")


def test_characters_come_whole(tiny_model: Checkpoint) -> None:
    assert saying(tiny_model, "né 😀!") == ("né 😀!", "stop", ["n", "", "é", " ", "", "", "", "😀", "!", ""])
    assert saying(tiny_model, "a😀", max_new_tokens=3)[:2] == ("a\ufffd", "length")


def test_a_stop_string_across_tokens_is_not_shown(tiny_model: Checkpoint) -> None:
    text, finish, pieces = saying(tiny_model, "one STOP two", stops=["STOP"])
    assert (text, finish) == ("one ", "stop")
    assert pieces == ["o", "n", "e", " ", "", "", "", ""]
    assert saying(tiny_model, "one STO", stops=["STOP"])[:2] == ("one STO", "stop")
    assert saying(tiny_model, "one STO", stops=["STOP"], max_new_tokens=6)[:2] == ("one ST", "length")
    assert saying(tiny_model, "abé", stops=["é"], max_new_tokens=4)[:2] == ("ab", "stop")


def test_eos_may_be_ignored(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, Says([65, 1, 66], 3))
    [deltas] = run(subject, [Request(tokens=[5, 6, 7], max_new_tokens=3, sampling=GREEDY, ignore_eos=True)])
    assert tokens_of(deltas) == [65, 1, 66]
    assert deltas[-1].finish == "length"


def test_cancelling_frees_the_blocks_at_once(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model))
    ids = [subject.add(request(30, 50, seed)) for seed in range(3)]
    subject.step()
    pool = subject.scheduler.pool
    used = pool.block_count - pool.free_count
    subject.cancel(ids[1])
    assert pool.block_count - pool.free_count == used * 2 // 3
    assert {delta.id for delta in subject.step()} == {ids[0], ids[2]}
    for id in ids:
        subject.cancel(id)
    assert subject.idle
    assert subject.scheduler.idle
    assert pool.free_count == pool.block_count
    assert subject.step() == []


def test_a_waiting_request_may_be_cancelled(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model), max_batch=1)
    first, second = subject.add(request(new=3)), subject.add(request(new=3, seed=2))
    subject.step()
    subject.cancel(second)
    subject.step()
    [last] = subject.step()
    assert (last.id, last.finish) == (first, "length")
    assert subject.idle


def test_a_deadline_ends_a_request_and_no_other(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model), max_batch=2)
    late = subject.add(request(new=50, deadline_ns=1000))
    other = subject.add(request(new=50, seed=2))
    waiting = subject.add(request(new=50, seed=3, deadline_ns=1000))
    subject.step(0)
    assert {delta.id for delta in subject.step(999)} == {late, other}
    deltas = {delta.id: delta for delta in subject.step(1000)}
    assert isinstance(deltas[late].error, DeadlineExceeded)
    assert "after 2 new tokens" in str(deltas[late].error)
    assert isinstance(deltas[waiting].error, DeadlineExceeded)
    assert deltas[other].tokens
    assert not subject.idle


def test_too_long_a_prompt_is_refused_and_changes_nothing(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model), context_tokens=64)
    with pytest.raises(InvalidInput, match=r"context length is 64 tokens; .* together 65"):
        subject.add(request(60, 5))
    assert subject.idle
    [deltas] = run(subject, [request(60, 4)])
    assert len(tokens_of(deltas)) == 4


def test_a_failing_step_ends_its_sequences_and_the_rest_go_on(
    tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    inner = native(tiny_model)

    class FailsOnce(LogitsOnly):
        left = 1

        def forward(self, batch: Batch) -> Tensor:
            if self.left:
                self.left -= 1
                raise RuntimeError("out of memory")
            return inner.forward(batch)

    subject = engine(tiny_model, FailsOnce(), max_batch=1)
    first, second = subject.add(request(new=2)), subject.add(request(new=2, seed=2))
    with caplog.at_level(logging.CRITICAL):
        [failed] = subject.step()
    assert failed.id == first
    assert isinstance(failed.error, HandlerFailed)
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count
    deltas = [delta for _ in range(2) for delta in subject.step()]
    assert [delta.id for delta in deltas] == [second, second]
    assert deltas[-1].finish == "length"


def test_failing_all_tells_everyone(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model), max_batch=1)
    ids = {subject.add(request(seed=seed)) for seed in range(3)}
    subject.step()
    deltas = subject.fail_all(Unavailable("going down"))
    assert {delta.id for delta in deltas} == ids
    assert all(delta.last for delta in deltas)
    assert subject.idle
    assert subject.scheduler.idle


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_no_numbers_fails_and_others_go_on(value: float, temperature: float) -> None:
    weights = tiny(tie_word_embeddings=False)
    weights["model.embed_tokens.weight"][9] = value
    sampling = SamplingParams(temperature=temperature, seed=1)
    broken, sound = (
        Request(tokens=tokens, max_new_tokens=4, sampling=sampling, ignore_eos=True, logprobs=1)
        for tokens in ([5, 9], [5, 7])
    )
    subject = engine(weights, native(weights))
    [last], deltas = run(subject, [broken, sound])
    assert isinstance(last.error, HandlerFailed)
    assert "after 0 tokens: its logits are NaN or infinite" in last.error.message
    assert "weights" in last.error.hint
    assert len(tokens_of(deltas)) == 4
