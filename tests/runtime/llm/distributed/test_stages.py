"""Decoders of a few layers each, in a row, compute what the whole one does; so does one that takes over their cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.llm.batches import EVERY_ISA, batch_of, some_tokens, steps
from tests.runtime.llm.models import Checkpoint, native, stage_of, tiny
from tests.runtime.llm.stages import LAYERS, Pipeline, Sequences, cuts_of_the_layers, some_lengths, stage


@pytest.mark.slow
@pytest.mark.parametrize("isa", EVERY_ISA)
@settings(max_examples=20, deadline=None)
@given(
    cuts=cuts_of_the_layers, lengths=some_lengths, chunk=st.integers(1, 40), threads=st.sampled_from([1, 2]),
    tied=st.booleans(),
)  # fmt: skip
def test_stages_in_a_row_give_the_bits_of_the_whole(
    isa: str, cuts: set[int], lengths: list[int], chunk: int, threads: int, tied: bool
) -> None:
    weights = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    pipeline, whole = Pipeline(isa, weights, cuts, threads=threads), stage(isa, weights)
    for batch in Sequences(lengths, chunk).batches(6):
        assert torch.equal(pipeline.forward(batch), whole.forward(batch))


@pytest.mark.parametrize("cuts", [{1}, {2, 4}, {1, 2, 3, 4}])
def test_torch_stages_in_a_row_equal_the_whole(model: Checkpoint, cuts: set[int]) -> None:
    for got, wanted in zip(steps(Pipeline("torch", model, cuts)), steps(stage("torch", model)), strict=True):
        assert torch.equal(got, wanted)


@settings(max_examples=20, deadline=None)
@given(wanted=st.lists(st.integers(0, 29), max_size=9), threads=st.sampled_from([1, 3]))
def test_logits_of_a_row_are_the_same_bits_beside_any_others(wanted: list[int], threads: int) -> None:
    weights = tiny()
    hidden = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    alone = stage("auto", weights, 0, 1)
    got = stage("auto", weights, 0, 1, threads=threads).logits(hidden[wanted])
    assert got.shape == (len(wanted), 258)
    for row, logits in zip(wanted, got, strict=True):
        assert torch.equal(logits, alone.logits(hidden[row : row + 1])[0])


def test_hidden_states_of_a_stage_stay_while_it_goes_on(model: Checkpoint) -> None:
    first = stage("auto", model, 0, 2)
    batch = batch_of([(some_tokens(9), 0, [0])])
    hidden = first.forward(batch)
    kept = hidden.clone()
    first.forward(batch_of([(some_tokens(9, 7), 0, [1])]))
    first.logits(hidden)
    assert torch.equal(hidden, kept)


def test_a_stage_needs_no_other_stages_tensors(model: Checkpoint) -> None:
    def having(*parts: str) -> Checkpoint:
        tensors = {name: tensor for name, tensor in model.items() if any(part in name for part in parts)}
        return Checkpoint(tensors, {name: model.file(name) for name in ("config.json", "generation_config.json")})

    first = stage_of(having("layers.0.", "layers.1.", "embed_tokens", "model.norm"), 0, 2)
    assert first.head is first.embedding is not None
    assert first.final_norm is not None
    last = stage_of(having("layers.2.", "layers.3.", "layers.4."), 2, 5)
    assert last.head is last.embedding is last.final_norm is None
    assert [len(one.layers) for one in (first, last)] == [2, 3]


@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_only_the_first_stage_has_logits(model: Checkpoint, kind: str) -> None:
    last = stage(kind, model, 2)
    with pytest.raises(ValueError, match="first stage"):
        last.logits(torch.zeros(1, 64))
    for hidden in (None, torch.zeros(1, 64)):
        with pytest.raises(ValueError, match="takes tokens"):
            stage(kind, model, 2 if hidden is None else 0).forward(batch_of([([5], 0, [0])]), hidden)


@pytest.mark.parametrize("hidden", [torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 65)])
def test_hidden_states_of_another_shape_have_no_logits(model: Checkpoint, hidden: Tensor) -> None:
    with pytest.raises(ValueError, match="hidden"):
        native(model).logits(hidden)
