"""The real model gives the very tokens that transformers gave, alone and eight together, on either path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.text.chat_template import read_chat_template
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import Checkpoint, engine, native, plain, run, text_of, tokens_of

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"]
BLOCKS = 128


WHOLE, BEGINNING = 48, 20
"""Tokens of each answer. The slow path gives beginnings: two answers end within them, and leave the batch."""


def request(case: dict[str, Any], tokens: int) -> Request:
    return Request(tokens=case["prompt_ids"], max_new_tokens=tokens, sampling=SamplingParams(temperature=0))


def check(
    weights: Checkpoint, decoder: Any, max_batch: int, cases: list[dict[str, Any]] = CASES, tokens: int = WHOLE
) -> None:
    deltas = run(
        engine(weights, decoder, blocks=BLOCKS, max_batch=max_batch, token_budget=64),
        [request(case, tokens) for case in cases],
    )
    for case, got in zip(cases, deltas, strict=True):
        assert tokens_of(got) == case["output_ids"][:tokens], case["prompt"]
        whole = len(case["output_ids"]) <= tokens
        text = case["output_text"].removesuffix("<|im_end|>")
        assert text_of(got) == text if whole else text.startswith(text_of(got))
        assert got[-1].finish == ("stop" if case["finished"] and whole else "length")


@pytest.mark.parametrize("max_batch", [1, 8])
def test_native_tokens_are_golden(chat_model: Checkpoint, max_batch: int) -> None:
    check(chat_model, native(chat_model, blocks=BLOCKS, threads=2), max_batch)


@pytest.mark.timeout(600)  # of a busy machine: the reference is slow
def test_torch_tokens_are_golden_eight_together(chat_model: Checkpoint) -> None:
    check(chat_model, plain(chat_model, blocks=BLOCKS), 8, tokens=BEGINNING)


@pytest.mark.timeout(600)  # of a busy machine: the reference is slow
def test_torch_tokens_are_golden_singly(chat_model: Checkpoint) -> None:
    # A prompt of each kind: the reference is slow, and the batch above has every one, as the native decoder has alone.
    kinds = {case["kind"]: case for case in CASES}
    assert len(kinds) == 2
    check(chat_model, plain(chat_model, blocks=BLOCKS), 1, list(kinds.values()), tokens=BEGINNING)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("max_batch", [1, 8])
def test_cuda_tokens_are_golden(chat_model: Checkpoint, max_batch: int) -> None:
    check(chat_model, plain(chat_model, blocks=BLOCKS, device="cuda"), max_batch)


def test_prompts_become_the_golden_tokens(chat_model: Checkpoint) -> None:
    tokenizer = Tokenizer(chat_model.file("tokenizer.json"))
    template = read_chat_template(chat_model.file("tokenizer_config.json"), chat_model.file("chat_template.jinja"))
    assert template is not None
    for case in CASES:
        chat = case["kind"] == "chat"
        text = template.render([{"role": "user", "content": case["prompt"]}]) if chat else case["prompt"]
        assert tokenizer.encode(text, add_special_tokens=not chat) == case["prompt_ids"]
