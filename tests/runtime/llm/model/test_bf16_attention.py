"""Attention of the native decoder over keys and values in bf16, which AMX multiplies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from tests.runtime.llm.batches import HAS_AMX, batch_of, some_tokens, table
from tests.runtime.llm.models import BLOCK_TOKENS, config_of, stage_of, tiny

pytestmark = pytest.mark.skipif(not HAS_AMX, reason="needs AMX")

TOKENS = 200
EXACT = 1e4
"""Scores capped at this much stay as they are, but to 1e-7 of it: capped ones are computed in fp32."""


def decoder(
    *, window: int | None = None, softcap: float | None = None, threads: int = 1, blocks: int = 64, **changes: Any
) -> NativeDecoder:
    weights = tiny(dtype=torch.bfloat16, **changes)
    config = config_of(weights)
    config = replace(config, attention_softcap=softcap, windows=(window,) * config.layer_count)
    return NativeDecoder(
        config, stage_of(weights), kv_dtype="bf16", block_count=blocks, block_tokens=BLOCK_TOKENS, threads=threads,
        isa="amx",
    )  # fmt: skip


def all_logits(of: NativeDecoder, tokens: list[int]) -> Tensor:
    return of.forward(batch_of([(tokens, 0, table(0, len(tokens)))], every_row=True)).clone()


@pytest.mark.parametrize("window", [None, 5, 16, 100])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (20, 1)], ids=lambda heads: f"{heads[0]} heads over {heads[1]}")
@pytest.mark.parametrize("head_dim", [32, 48, 64, 96])  # 48 is no multiple of a tile's depth
def test_attention_is_that_in_fp32_but_for_rounding(head_dim: int, heads: tuple[int, int], window: int | None) -> None:
    shape = {
        "head_dim": head_dim, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "num_hidden_layers": 1,
    }  # fmt: skip
    wanted = all_logits(decoder(window=window, softcap=EXACT, **shape), some_tokens(TOKENS))
    got = all_logits(decoder(window=window, **shape), some_tokens(TOKENS))
    assert (got - wanted).abs().mean() < 0.01 * wanted.std()
    assert (got - wanted).abs().max() < 0.2 * wanted.std()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, TOKENS - 1), max_size=8), window=st.sampled_from([None, 7, 64, 70]))
def test_each_row_is_the_same_bits_in_whatever_chunk(cuts: set[int], window: int | None) -> None:
    tokens, blocks = some_tokens(TOKENS), table(0, TOKENS)
    whole = all_logits(decoder(window=window, head_dim=32), tokens)
    chunked = decoder(window=window, head_dim=32)
    for begin, end in itertools.pairwise([0, *sorted(cuts), TOKENS]):
        got = chunked.forward(batch_of([(tokens[begin:end], begin, blocks)], every_row=True))
        assert torch.equal(got, whole[begin:end])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5), threads=st.sampled_from([1, 2, 3]))
def test_each_row_is_the_same_bits_in_whatever_batch(lengths: list[int], threads: int) -> None:
    prompts = [some_tokens(length, number) for number, length in enumerate(lengths)]
    pieces = [(prompt, 0, table(10 * number, len(prompt))) for number, prompt in enumerate(prompts)]
    got = decoder(head_dim=64, threads=threads).forward(batch_of(pieces, every_row=True)).clone()
    assert torch.equal(got, torch.cat([all_logits(decoder(head_dim=64), prompt) for prompt in prompts]))


def test_what_other_requests_left_in_a_block_changes_nothing() -> None:
    tokens = some_tokens(40)
    wanted = all_logits(decoder(head_dim=32), tokens)
    used = decoder(head_dim=32)
    used.write_kv([0, 1, 2, 3], 0, 64, 0, b"\xff" * (64 * 2 * 2 * 32 * 2 * 3))  # of NaN: 2 heads, 3 layers
    assert torch.equal(all_logits(used, tokens), wanted)
