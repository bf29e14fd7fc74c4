"""Shards of a model: all ranks' parts of a tensor are the tensor, each number once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.contract.weights.decoder_config import read_config
from fleetstart.runtime.llm.model.layers import StageWeights, gather
from fleetstart.runtime.llm.model.shard import Shard
from fleetstart.runtime.llm.tensor_parallel.loader import stored_bytes
from tests.runtime.llm.families import CASES, family_model
from tests.runtime.llm.models import Checkpoint, config_of, tiny

BY_ROWS = ("q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias", "gate_bias", "up_bias")
BY_COLUMNS = ("o", "down")
IN_EACH = ("attention_norm", "ffn_norm", "q_norm", "k_norm", "attention_output_norm", "ffn_output_norm")
IN_FIRST = ("o_bias", "down_bias")


@given(size=st.integers(0, 10_000), count=st.integers(1, 64))
def test_parts_are_consecutive_disjoint_and_even(size: int, count: int) -> None:
    parts = [Shard(rank, count).part(size) for rank in range(count)]
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(size))
    assert max(part.stop - part.start for part in parts) - min(part.stop - part.start for part in parts) <= 1


def shards_of(weights: Checkpoint, count: int) -> list[StageWeights]:
    config = config_of(weights)
    return [gather(weights, config, 0, config.layer_count, Shard(rank, count)) for rank in range(count)]


def check(weights: Checkpoint, count: int) -> None:
    """Joined as they were divided, the parts are the whole model's tensors."""
    config = config_of(weights)
    whole, shards = gather(weights, config, 0, config.layer_count), shards_of(weights, count)

    def same(wanted: Tensor | None, parts: list[Tensor | None], dim: int) -> None:
        given = [part for part in parts if part is not None]
        assert len(given) == (len(parts) if wanted is not None else 0)
        if wanted is not None:
            assert torch.equal(torch.cat(given, dim), wanted)

    same(whole.embedding, [shard.embedding for shard in shards], 0)
    same(whole.head, [shard.head for shard in shards], 0)
    for index, layer in enumerate(whole.layers):
        for names, dim in ((BY_ROWS, 0), (BY_COLUMNS, 1)):
            for name in names:
                same(getattr(layer, name), [getattr(shard.layers[index], name) for shard in shards], dim)
        for name in IN_EACH:
            wanted = getattr(layer, name)
            for shard in shards:
                got = getattr(shard.layers[index], name)
                assert got is None if wanted is None else torch.equal(got, wanted)
        for name in IN_FIRST:
            same(getattr(layer, name), [getattr(shards[0].layers[index], name)], 0)
            assert all(getattr(shard.layers[index], name) is None for shard in shards[1:])


@pytest.mark.parametrize("case", CASES)
def test_each_familys_tensors_are_covered_exactly_once(case: str) -> None:
    check(family_model(case).weights, 2)


@given(
    count=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    repeats=st.integers(1, 3),
    ffn=st.integers(1, 5),
    vocab=st.integers(2, 40),
    tied=st.booleans(),
)
def test_any_shape_that_divides_is_covered_exactly_once(
    count: int, kv_heads: int, repeats: int, ffn: int, vocab: int, tied: bool
) -> None:
    weights = tiny(
        num_attention_heads=count * kv_heads * repeats, num_key_value_heads=count * kv_heads, head_dim=2,
        intermediate_size=count * ffn, vocab_size=vocab, hidden_size=8, tie_word_embeddings=tied, num_hidden_layers=1,
    )  # fmt: skip
    check(weights, count)
    sizes = [stored_bytes(shard) for shard in shards_of(weights, count)]
    norms = sum(tensor.nbytes for name, tensor in weights.items() if "norm" in name)
    assert sum(sizes) == sum(tensor.nbytes for tensor in weights.values()) + (count - 1) * norms


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 9), ("num_key_value_heads", 3), ("intermediate_size", 97)]
)
def test_what_does_not_divide_is_named(field: str, value: int) -> None:
    fields: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    heads = {"num_key_value_heads": value} if field == "num_attention_heads" else {}
    weights = tiny(**(fields | {field: value} | heads))
    config = read_config(weights.file("config.json"))
    assert config.not_split(1) == ""
    named = "num_attention_heads" if field == "num_attention_heads" else field
    assert config.not_split(2) == f"{named} {value} is no multiple of 2"
