"""Log probabilities and biases through the `openai` client, over the real model and a tiny one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fleetstart.runtime.llm.engine.logprobs import token_logprob
from fleetstart.runtime.llm.text.token_texts import TokenTexts
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import Checkpoint, byte_tokenizer, tiny
from tests.runtime.llm.server.test_openai_responses import Served, served, user

CAPITAL: dict[str, Any] = {
    "model": "chat", "messages": user("What is the capital of France?"), "temperature": 0,
    "logprobs": True, "top_logprobs": 4,
}  # fmt: skip
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny()) as subject:
        yield subject


@pytest.fixture(scope="module")
def real(chat_model: Checkpoint) -> Iterator[Served]:
    with served(chat_model) as subject:
        yield subject


def test_they_are_those_of_the_softmax() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    wanted = torch.log_softmax(logits, 0)
    got = token_logprob(logits, 7, 3)
    assert got.logprob == pytest.approx(float(wanted[7]), abs=1e-6)
    assert [token for token, _ in got.top] == torch.topk(wanted, 3).indices.tolist()
    assert token_logprob(logits, 7, 0).top == ()


def test_a_chat_of_the_real_model_has_them_token_by_token(real: Served) -> None:
    answer = real.client.chat.completions.create(**CAPITAL)
    choice = answer.choices[0]
    listed = choice.logprobs.content
    assert "".join(one.token for one in listed) == choice.message.content == ANSWER
    assert b"".join(bytes(one.bytes) for one in listed).decode() == ANSWER
    assert len(listed) == answer.usage.completion_tokens - 1, "all but the end token"
    for one in listed:
        assert one.logprob <= 0
        assert len(one.top_logprobs) == 4
        assert one.top_logprobs[0].token == one.token, "a greedy token is the likeliest"
        assert one.top_logprobs[0].logprob == one.logprob
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0001


@pytest.mark.slow
def test_a_stream_has_the_same_ones(real: Served) -> None:
    whole = real.client.chat.completions.create(**CAPITAL).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in real.client.chat.completions.create(**CAPITAL, stream=True)]
    assert [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == whole


def test_completions_have_the_older_form(real: Served) -> None:
    fields = {"model": "chat", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    answer = real.client.completions.create(**fields)
    listed = answer.choices[0].logprobs
    assert "".join(listed.tokens) == answer.choices[0].text
    assert [len(top) for top in listed.top_logprobs] == [2] * 6
    assert listed.text_offset == [len("".join(listed.tokens[:place])) for place in range(6)]
    assert listed.token_logprobs == [max(top.values()) for top in listed.top_logprobs]
    parts = [chunk.choices[0].logprobs for chunk in real.client.completions.create(**fields, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts if part for value in getattr(part, name)] == getattr(listed, name)


def test_without_alternatives_there_are_none(server: Served) -> None:
    answer = server.client.completions.create(model="chat", prompt="ab", max_tokens=3, logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs is None
    chat = server.client.chat.completions.create(model="chat", messages=user("a"), max_tokens=3, logprobs=True)
    assert all(one.top_logprobs == [] for one in chat.choices[0].logprobs.content)
    plain = server.client.chat.completions.create(model="chat", messages=user("a"), max_tokens=3)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_bias_forbids_and_forces_tokens(server: Served, stream: bool) -> None:
    """The tiny tokenizer has a token a byte: 2 and up are the letters of its alphabet in order."""
    forced, other = Tokenizer(byte_tokenizer()).encode("xy", add_special_tokens=False)
    fields = {"model": "chat", "prompt": "ab", "max_tokens": 5, "temperature": 1.0, "stream": stream}
    said = server.client.completions.create(**fields, logit_bias={str(forced): 100, str(other): -100})
    text = "".join(chunk.choices[0].text for chunk in said) if stream else said.choices[0].text
    assert text == "xxxxx"


def test_pieces_of_characters_have_their_bytes() -> None:
    vocabulary = Tokenizer(byte_tokenizer())
    texts = TokenTexts(vocabulary)
    tokens = vocabulary.encode("é€ a", add_special_tokens=False)
    assert b"".join(texts.raw(token) or b"?" for token in tokens) == "é€ a".encode()
    assert [texts.text(token) for token in tokens[-2:]] == [" ", "a"]
    assert texts.text(1) == "<|im_end|>"
