"""The native decoder computes what the torch one does, on every kind of processor, whatever the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.llm.model.rope import inverse_frequencies
from tests.runtime.llm.batches import EVERY_ISA, ISAS, batch_of, some_tokens, steps, table
from tests.runtime.llm.models import Checkpoint, config_of, in_int8, native, plain, tiny


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_native_equals_torch(isa: str, dtype: torch.dtype) -> None:
    weights = tiny(dtype=dtype)
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 48},
        {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"hidden_size": 1552, "intermediate_size": 1600, "num_hidden_layers": 1},
        {"vocab_size": 301},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}},
    ],
    ids=["head of its own", "no groups", "one kv head", "odd head", "long rows", "odd vocabulary", "llama3"],
)  # fmt: skip
def test_native_equals_torch_in_other_shapes(isa: str, changes: dict[str, Any]) -> None:
    weights = tiny(dtype=torch.float32, **changes)
    wide = changes.get("hidden_size", 64) > 1000
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3 if wide else 2e-4, atol=2e-2 if wide else 2e-4)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_torch_equals_transformers(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    weights = tiny(dtype=torch.float32, num_attention_heads=4, **changes)  # transformers wants 4 x 16 = 64
    config = transformers.LlamaConfig(**{**config_fields(weights), "attn_implementation": "eager"})
    theirs = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = theirs.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = some_tokens(60)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    got = plain(weights).forward(batch_of([(tokens, 0, table(0, 60))], every_row=True))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", [native, plain])
def test_final_hidden_states_equal_transformers(decoder: Any) -> None:
    transformers = pytest.importorskip("transformers")
    weights = tiny(dtype=torch.float32, num_attention_heads=4)
    theirs = transformers.LlamaModel(transformers.LlamaConfig(**config_fields(weights))).eval()
    theirs.load_state_dict({name.removeprefix("model."): tensor for name, tensor in dict(weights).items()})
    tokens = some_tokens(60)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).last_hidden_state[0]
    subject = decoder(weights)
    hidden = subject.hidden(batch_of([(tokens, 0, table(0, 60))]))
    torch.testing.assert_close(subject.normed(hidden), wanted, rtol=1e-4, atol=1e-4)
    assert subject.logits(hidden[[]]).shape == (0, config_of(weights).vocab_size)


def test_llama3_frequencies_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    weights = tiny(rope_scaling=scaling, num_attention_heads=4)
    fields = {**config_fields(weights), "rope_parameters": {**scaling, "rope_theta": 10000.0}}
    fields.pop("rope_scaling")
    model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**fields))
    torch.testing.assert_close(inverse_frequencies(config_of(weights).rope, 512), model.inv_freq)


def config_fields(weights: Checkpoint) -> dict[str, Any]:
    import json

    fields: dict[str, Any] = json.loads(weights.file("config.json"))
    return {name: value for name, value in fields.items() if name != "model_type"}


@pytest.mark.slow
@pytest.mark.parametrize("stored", [tiny, lambda: in_int8(tiny())], ids=["fp16", "int8"])
@pytest.mark.parametrize("isa", EVERY_ISA)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_a_row_is_the_same_bits_in_any_batch(
    isa: str, stored: Callable[[], Checkpoint], lengths: list[int], threads: int, seed: int
) -> None:
    weights = stored()
    prompts = [some_tokens(length, seed + number) for number, length in enumerate(lengths)]
    together = native(weights, threads=threads, isa=isa)
    pieces = [(prompt, 0, [3 * number, 3 * number + 1, 3 * number + 2]) for number, prompt in enumerate(prompts)]
    got = together.forward(batch_of(pieces)).clone()
    for number, prompt in enumerate(prompts):
        alone = native(weights, isa=isa).forward(batch_of([(prompt, 0, [5, 4, 3])]))
        assert torch.equal(got[number], alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("isa", EVERY_ISA)
@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 69), max_size=6))
def test_chunks_of_a_prompt_are_the_same_bits_as_the_whole(isa: str, cuts: set[int]) -> None:
    weights, tokens = tiny(), some_tokens(70)
    blocks = table(0, 70)
    whole = native(weights, isa=isa).forward(batch_of([(tokens, 0, blocks)])).clone()
    decoder = native(weights, isa=isa)
    edges = [0, *sorted(cuts), 70]
    for begin, end in itertools.pairwise(edges):
        last = decoder.forward(batch_of([(tokens[begin:end], begin, blocks)]))
    assert torch.equal(last, whole)


@pytest.mark.parametrize("kv", ["fp16", "bf16"])
@pytest.mark.parametrize("isa", ISAS)
def test_narrow_keys_and_values_change_little(isa: str, kv: str) -> None:
    weights = tiny()
    tolerance = 0.1 if kv == "fp16" else 0.5  # of logits that spread over some 20
    for got, wanted in zip(steps(native(weights, isa=isa, kv=kv)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu() -> None:
    weights = tiny(dtype=torch.float32)
    for got, wanted in zip(steps(plain(weights, device="cuda")), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3)


def test_nan_of_a_former_owner_does_not_reach_the_next(tiny_model: Checkpoint) -> None:
    weights = Checkpoint(
        dict(tiny_model), {name: tiny_model.file(name) for name in ("config.json", "generation_config.json")}
    )
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[200] = float("nan")
    weights["model.embed_tokens.weight"] = embedding
    for decoder in (native(weights), plain(weights)):
        decoder.forward(batch_of([([200] * 16, 0, [3])]))
        alone = decoder.forward(batch_of([(some_tokens(5), 0, [0])]))[0, :200].clone()
        reused = decoder.forward(batch_of([(some_tokens(5), 0, [3])]))[0, :200]
        assert torch.equal(alone, reused)
        assert reused.isfinite().all()
